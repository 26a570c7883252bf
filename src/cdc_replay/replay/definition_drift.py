"""Tables whose rows were copied with another row filter, or other columns, than are in force now.

A changed filter does nothing to existing rows (R9.12), as natively: rows outside the new filter stay, rows
inside it are missing until they are updated. `refresh --reconcile` deletes and inserts these rows; `status`,
`explain` and `validate` report the tables.

The definition of the copy is in the subscriber's state (`subscriber.copy_definitions`), later ones are in the
change log, and the present one is on the publisher. A filter that was changed and changed back counts: rows
that changed in between came through the other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from cdc_replay.errors import PublicationRefused
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import Connection
from cdc_replay.publication.resolve import SyncedTable, synced_tables
from cdc_replay.replay.log_view import LogView
from cdc_replay.replay.table_notice import TableNotice
from cdc_replay.subscriber import subscription_tables
from cdc_replay.subscriber.copy_definitions import (
    CopyDefinition,
    Definition,
    read_copy_definitions,
    record_copy_definition,
)


def definition_of(table: SyncedTable) -> Definition:
    """The definition that decides which rows and columns a copy of the table has."""
    filters = None if table.filters is None else frozenset(row_filter.sql for row_filter in table.filters)
    return Definition(filters, frozenset(table.columns))


def record_copy_definitions(
    connection: Connection, subscription: str, lsn: Lsn, tables: Iterable[SyncedTable]
) -> None:
    """Record that the tables' rows are those of `lsn`, by the definitions that `tables` have.

    Their values are too: an earlier rewrite is made up for, and a later one is in the log (R11.9).
    """
    for table in tables:
        record_copy_definition(connection, subscription, table.table.name, lsn, definition_of(table))
        subscription_tables.clear_rewrite(connection, subscription, table.table.name)


def definition_drifts(
    connection: Connection,
    subscription: Subscription,
    change_log: LogView,
    present: PublisherCatalog | None = None,
) -> dict[QualifiedName, TableNotice]:
    """The ready tables whose definition has changed at any time since their rows were copied, by name.

    They may hold rows outside the present filter, or lack rows inside it.

    `present` is the publisher's present catalog, if the caller has it; else the log's last one counts.

    Raises:
        ChangeLogMissing, ChangeLogDamaged, ChangeLogUnavailable: if the definitions cannot be read.
    """
    states = subscription_tables.table_states(connection, subscription.name)
    copies = {
        name: copied
        for name, copied in read_copy_definitions(connection, subscription.name).items()
        if isinstance(states.get(name), Ready)
    }
    since = _in_force_since({copied.lsn for copied in copies.values()}, change_log) if copies else {}
    present_catalogs = () if present is None else (present,)
    in_force = {
        lsn: _InForce.under(subscription, (*catalogs, *present_catalogs)) for lsn, catalogs in since.items()
    }
    return {
        name: TableNotice(
            name,
            f"its row filter or columns have changed since its rows were copied at {copied.lsn}: rows outside"
            " the new definition may remain, and rows inside it may be missing; `cdc-replay refresh"
            f" {subscription.name} --reconcile` deletes and inserts them",
            "R9.12",
        )
        for name, copied in copies.items()
        if _differs(name, copied, in_force[copied.lsn])
    }


@dataclass(frozen=True, slots=True)
class _InForce:
    """The subscription's tables by name, under each catalog since a position; the last is the present one.

    `columns` are those of all tables under the first catalog.
    """

    columns: Mapping[QualifiedName, frozenset[str]]
    tables: tuple[Mapping[QualifiedName, SyncedTable], ...]

    @classmethod
    def under(cls, subscription: Subscription, catalogs: Sequence[PublisherCatalog]) -> Self:
        columns = {
            table.name: frozenset(column.name for column in table.columns)
            for catalog in catalogs[:1]
            for table in catalog.tables.values()
        }
        return cls(columns, tuple(_synced(subscription, catalog) for catalog in catalogs))


def _in_force_since(
    positions: Iterable[Lsn], change_log: LogView
) -> Mapping[Lsn, tuple[PublisherCatalog, ...]]:
    history, end_lsn = change_log.catalogs(), change_log.end_lsn()
    return {
        lsn: tuple(history.within(Window(lsn, end_lsn)).values()) if lsn < end_lsn else ()
        for lsn in positions
    }


def _differs(name: QualifiedName, copied: CopyDefinition, in_force: _InForce) -> bool:
    """Whether rows may be outside or missing, or lack values."""
    definitions = [tables[name] for tables in in_force.tables if name in tables]
    if not definitions:
        return False
    if any(filters_differ(table, copied.definition.filters) for table in definitions):
        return True
    # A column that is new to the table does not count: its values come with the rows that get them.
    withheld = in_force.columns.get(name, frozenset()) - copied.definition.columns
    for table in definitions:
        withheld |= {column.name for column in table.table.columns} - set(table.columns)
    return not withheld.isdisjoint(definitions[-1].columns)


def filters_differ(table: SyncedTable, copied: frozenset[str] | None) -> bool:
    """Whether the filters are others; one without a text is judged when it has one."""
    if table.filters is None or copied is None:
        return (table.filters is None) != (copied is None)
    if any(
        not row_filter.is_printed and row_filter.unprinted_sql not in copied for row_filter in table.filters
    ):
        return False
    texts = (
        row_filter.unprinted_sql if row_filter.unprinted_sql in copied else row_filter.sql
        for row_filter in table.filters
    )
    return copied != frozenset(texts)


def _synced(subscription: Subscription, catalog: PublisherCatalog) -> dict[QualifiedName, SyncedTable]:
    try:
        return {table.table.name: table for table in synced_tables(catalog, subscription.publications)}
    except PublicationRefused:
        return {}
