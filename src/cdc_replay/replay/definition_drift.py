"""Tables whose rows were brought with another row filter, or other columns, than are in force now.

A changed filter does nothing to rows that are there (R9.12), as natively: rows that it shuts out stay, rows
that it lets in are missing until they are touched. `refresh --reconcile` removes and brings them; who looks
at a subscription is told so.

What the rows were brought with is in the subscriber's state (`subscriber.copy_definitions`), what was in
force since is in the change log, and what is in force now on the publisher. A filter that was changed and
changed back counts: what came meanwhile came by the other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import PublicationRefused
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import Connection
from cdc_replay.publication.resolve import SyncedTable, synced_tables
from cdc_replay.subscriber import subscription_tables
from cdc_replay.subscriber.copy_definitions import (
    CopyDefinition,
    Definition,
    read_copy_definitions,
    record_copy_definition,
)


@dataclass(frozen=True, slots=True)
class DefinitionDrift:
    """A table that may hold rows outside the present filter, or lack rows inside it.

    `lsn` is when its rows were brought.
    """

    table: QualifiedName
    subscription: str
    lsn: Lsn

    @property
    def notice(self) -> str:
        """One sentence, with the remedy."""
        return (
            "its row filter or columns have changed since its rows were brought"
            f" at {self.lsn}: rows that are outside now may remain, and rows that are inside be missing;"
            f" `cdc-replay refresh {self.subscription} --reconcile` removes and brings them"
        )

    def __str__(self) -> str:
        return f"{self.table}: {self.notice} (R9.12)"


def definition_of(table: SyncedTable) -> Definition:
    """What decides which rows and columns a copy of the table brings."""
    filters = None if table.filters is None else frozenset(each.sql for each in table.filters)
    return Definition(filters, frozenset(table.columns))


def record_copy_definitions(
    connection: Connection, subscription: str, lsn: Lsn, tables: Iterable[SyncedTable]
) -> None:
    """Record that the tables' rows are those of `lsn`, by the definitions that `tables` have.

    So are their values: a rewrite before it is made good, and one behind it is in the log (R11.9).
    """
    for table in tables:
        record_copy_definition(connection, subscription, table.table.name, lsn, definition_of(table))
        subscription_tables.clear_rewrite(connection, subscription, table.table.name)


def definition_drifts(
    connection: Connection,
    subscription: Subscription,
    change_log: str,
    present: PublisherCatalog | None = None,
) -> dict[QualifiedName, DefinitionDrift]:
    """The ready tables whose definition was another one at any time since their rows were brought, by name.

    `present` is the publisher's catalog as of now, where the caller has it; else the log's last one counts.

    Raises:
        ChangeLogMissing, ChangeLogDamaged, ChangeLogUnavailable: if the definitions cannot be read.
    """
    states = subscription_tables.table_states(connection, subscription.name)
    known = {
        name: each
        for name, each in read_copy_definitions(connection, subscription.name).items()
        if isinstance(states.get(name), Ready)
    }
    since = _in_force_since({each.lsn for each in known.values()}, change_log) if known else {}
    last = () if present is None else (present,)
    in_force = {
        lsn: [_CatalogTables(catalog, _synced(subscription, catalog)) for catalog in (*catalogs, *last)]
        for lsn, catalogs in since.items()
    }
    return {
        name: DefinitionDrift(name, subscription.name, each.lsn)
        for name, each in known.items()
        if _differs(name, each, in_force[each.lsn])
    }


@dataclass(frozen=True, slots=True)
class _CatalogTables:
    """A catalog, and the tables that the subscription has under it, by name."""

    catalog: PublisherCatalog
    tables: Mapping[QualifiedName, SyncedTable]


def _in_force_since(positions: Iterable[Lsn], change_log: str) -> Mapping[Lsn, tuple[PublisherCatalog, ...]]:
    log = ChangeLog.open(change_log)
    history = CatalogHistory(log.catalogs())
    return {
        lsn: tuple(history.within(Window(lsn, log.end_lsn)).values()) if lsn < log.end_lsn else ()
        for lsn in positions
    }


def _differs(name: QualifiedName, known: CopyDefinition, in_force: Sequence[_CatalogTables]) -> bool:
    """Whether rows may be outside or missing, or lack values; `in_force` is in order, the last is of now."""
    found = [each.tables[name] for each in in_force if name in each.tables]
    if not found:
        return False
    if any(definition_of(each).filters != known.definition.filters for each in found):
        return True
    # A column that is new to the table is not meant: its values arrive with the rows that get them.
    withheld = _columns(name, in_force[0].catalog) - known.definition.columns
    for each in found:
        withheld |= {column.name for column in each.table.columns} - set(each.columns)
    return not withheld.isdisjoint(found[-1].columns)


def _synced(subscription: Subscription, catalog: PublisherCatalog) -> dict[QualifiedName, SyncedTable]:
    try:
        return {each.table.name: each for each in synced_tables(catalog, subscription.publications)}
    except PublicationRefused:
        return {}


def _columns(name: QualifiedName, catalog: PublisherCatalog) -> set[str]:
    """The columns that the table had."""
    tables = (each for each in catalog.tables.values() if each.name == name)
    return {column.name for table in tables for column in table.columns}
