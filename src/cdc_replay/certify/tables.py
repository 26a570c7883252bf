"""The tables that are compared: how each is judged, and the comparison at a fence."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.certify.deviations import (
    TableFacts,
    certify_table,
    columns_by_session,
    listed_keys,
)
from cdc_replay.certify.differing_columns import RowOnSides, read_rows, with_key_of
from cdc_replay.certify.native_side import NAME
from cdc_replay.compare.comparison import Comparison, NotCompared, ValidatedTable, compare_table
from cdc_replay.compare.difference import DifferenceKind
from cdc_replay.compare.fence import ComparisonFence
from cdc_replay.compare.table_pair import TablePair
from cdc_replay.model.certificate import CertifiedTable, Deviation
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, open_snapshot
from cdc_replay.postgres.planned_tables import PlannedTable, lock_planned_tables, read_only_tables
from cdc_replay.publication.resolve import SyncedTable, synced_tables, why_not_mirrored
from cdc_replay.replay.definition_drift import definition_drifts, definition_of
from cdc_replay.replay.log_view import LogView
from cdc_replay.subscriber.as_owner import act_on
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.target_tables import TargetTable

if TYPE_CHECKING:
    from psycopg import sql

LISTED_KEYS: Final = 100_000
"""Differing keys of each kind that are looked at one by one; if more differ, those are not explained."""

# The servers' own types: what is not stored out of line is always sent (R4.6).
_TOASTABLE: Final = """
    select attname::text from pg_catalog.pg_attribute
    where attrelid = %s and attnum > 0 and not attisdropped and attlen = -1 and attstorage <> 'p'
"""


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """A table on all sides: as published, as native and as we have it (None if we do not).

    `claimed` is the condition for rows of ours that other subscriptions may have inserted, None if unknown.
    """

    published: SyncedTable
    native: SyncedTable
    target: TargetTable | None
    facts: TableFacts
    claimed: sql.Composed | None = None

    @property
    def name(self) -> QualifiedName:
        """The table's."""
        return self.published.table.name


def compared_tables(
    session: SubscriptionSession,
    catalog: PublisherCatalog,
    server: Connection,
    names: Sequence[QualifiedName],
    change_log: LogView,
) -> tuple[ComparedTable, ...]:
    """The tables of these names, with what is known of them before both follow.

    `server` is the throw-away server, on which they exist.
    """
    publications = session.subscription.publications
    published = {synced.table.name: synced for synced in synced_tables(catalog, publications)}
    native = _native_tables(server)
    targets = session.read_targets(names)
    drifts = definition_drifts(session.connection, session.subscription, change_log, catalog)
    tables = []
    for name in names:
        facts = TableFacts(may_be_unsent=_may_be_unsent(server, published[name], native[name]))
        if (target := targets.get(name)) is not None:
            by_session = columns_by_session(published[name].table.columns, target)
            facts = dataclasses.replace(facts, by_session=by_session)
        history: Deviation | None = None
        if name in drifts:
            history = Deviation.FILTER_CHANGED
        elif why_not_mirrored(catalog, publications, published[name]) is not None:
            history = Deviation.ACTIONS_NOT_PUBLISHED
        elif not session.subscription.copy_data:
            history = Deviation.NOT_COPIED
        facts = dataclasses.replace(facts, history=history)
        tables.append(ComparedTable(published[name], native[name], target, facts))
    return tuple(tables)


def with_claims(
    tables: Sequence[ComparedTable], claims: Mapping[QualifiedName, sql.Composed]
) -> tuple[ComparedTable, ...]:
    """The tables with the rows that other subscriptions may have inserted."""
    return tuple(dataclasses.replace(table, claimed=claims.get(table.name)) for table in tables)


def with_keys_that_differ(fence: ComparisonFence, tables: Sequence[ComparedTable]) -> Iterator[ComparedTable]:
    """The tables; those that may differ from the start with the keys that do, as of this fence."""
    for table in tables:
        if table.facts.history is None:
            yield table
            continue
        keys = frozenset(listed_keys(_compare(fence, table), tuple(DifferenceKind)))
        yield dataclasses.replace(table, facts=dataclasses.replace(table.facts, differed_at_start=keys))


def with_changes(
    tables: Sequence[ComparedTable],
    before: PublisherCatalog,
    later: Sequence[PublisherCatalog],
    publications: Sequence[str],
    rewritten: frozenset[QualifiedName],
) -> Iterator[ComparedTable]:
    """The tables with what happened to their definitions while both followed."""
    first = _definitions(before, publications)
    others = [_definitions(catalog, publications) for catalog in later]
    for table in tables:
        changed = any(definitions.get(table.name) != first.get(table.name) for definitions in others)
        facts = dataclasses.replace(
            table.facts, definition_changed=changed, is_rewritten=table.name in rewritten
        )
        yield dataclasses.replace(table, facts=facts)


def certify_at_fence(
    fence: ComparisonFence, table: ComparedTable, publisher_dsn: str, subscription: str
) -> CertifiedTable:
    """Compare one table, and explain its differences.

    Raises:
        ServerUnavailable: if a server is lost.
    """
    compared = _compare(fence, table)
    rows: Mapping[str, RowOnSides] = {}
    keys = listed_keys(compared, (DifferenceKind.DIFFERENT,))
    if keys and table.target is not None:
        with _publisher(publisher_dsn, subscription) as publisher:
            rows = _rows_on_sides(fence, table, table.target, publisher, keys)
    return certify_table(str(table.name), compared, rows, table.facts)


def _compare(fence: ComparisonFence, table: ComparedTable) -> Comparison | NotCompared:
    validated = ValidatedTable(
        table.native, table.target, full=True, claimed=table.claimed, published=table.published
    )
    return compare_table(fence, validated, LISTED_KEYS)


def _rows_on_sides(
    fence: ComparisonFence,
    table: ComparedTable,
    target: TargetTable,
    publisher: Connection,
    keys: Sequence[str],
) -> Mapping[str, RowOnSides]:
    with (
        fence.publisher.transaction(),
        fence.subscriber.transaction(),
        act_on(fence.subscriber, [target], only_reads=True) as sessions,
    ):
        session = sessions.session_for(target)
        pair = TablePair.from_tables(table.native, target, fence.publisher, fence.subscriber, session)
        native, ours = pair.publisher(fence.publisher), pair.subscriber(session)
        lock_planned_tables(publisher, [PlannedTable.from_catalog(table.published.table)])
        source = TablePair.from_tables(table.published, target, publisher, fence.subscriber, session)
        return read_rows(native, ours, with_key_of(source.publisher(publisher), native), keys)


@contextlib.contextmanager
def _publisher(dsn: str, subscription: str) -> Iterator[Connection]:
    """A read-only transaction that executes nothing of a table's owner, as for a copy."""
    with open_snapshot(dsn, purpose=f"certify {subscription}") as connection:
        read_only_tables(connection)
        yield connection


def _native_tables(server: Connection) -> dict[QualifiedName, SyncedTable]:
    """The native tables as the comparison takes published ones: all rows, all columns."""
    catalog = read_catalog(server)
    return {synced.table.name: synced for synced in synced_tables(catalog, [NAME])}


def _may_be_unsent(server: Connection, published: SyncedTable, native: SyncedTable) -> frozenset[str]:
    if published.filters is None:
        return frozenset()
    rows = server.execute(_TOASTABLE, (int(native.table.id),)).fetchall()
    return frozenset(name for (name,) in rows)


def _definitions(catalog: PublisherCatalog, publications: Sequence[str]) -> dict[QualifiedName, object]:
    """By table: what decides which rows and columns are sent."""
    return {
        synced.table.name: (definition_of(synced), why_not_mirrored(catalog, publications, synced))
        for synced in synced_tables(catalog, publications)
    }
