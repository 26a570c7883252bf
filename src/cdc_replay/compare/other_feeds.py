"""Other feeds of a subscription's tables: which rows of the subscriber they may have inserted.

A native REFRESH PUBLICATION deletes no row (R7.13). `refresh --reconcile` does, so it must not treat rows of
another subscription as surplus.

| the same table of the subscriber is fed by      | its rows are                                        |
|-------------------------------------------------|-----------------------------------------------------|
| another subscription of this project, to the    | those that pass its current row filters, or any in  |
| same publisher, by row filters                  | force since its copy (R9.12): they stay             |
| one that ever had no row filter, or a filter    | unknown: the table is refused                       |
| that the subscriber cannot evaluate exactly     |                                                     |
| one of another publisher, or not configured     | unknown: the table is refused                       |
| a native subscription                           | unknown: the table is refused                       |
| any of them, by another table of the same       | unknown: the table is refused                       |
| partition tree                                  |                                                     |

The filters are those of the publisher's catalogs. A filter is evaluated on the subscriber only if its meaning
depends only on the values of the columns (`filters.compile`), these columns are published to the other
subscription, and the subscriber's columns have the same types and collations. The SQL is printed from its
tree (`filters.printed`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from psycopg import sql

from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import PublicationRefused, ReconcileRefused
from cdc_replay.filters.compile import ArrowFilter, compile_filter
from cdc_replay.filters.names import NotPrintableError
from cdc_replay.filters.printed import print_for_subscriber
from cdc_replay.model.lsn import Window
from cdc_replay.model.publication import PublisherCatalog, RowFilter, TableColumn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Pending
from cdc_replay.postgres.connection import Connection
from cdc_replay.publication.effective_filter import ROW_ACTIONS
from cdc_replay.publication.resolve import SyncedTable, resolve, synced_tables
from cdc_replay.subscriber import state_schema, subscription_records, subscription_tables
from cdc_replay.subscriber.copy_definitions import CopyDefinition, read_copy_definitions
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.target_tables import TargetColumn, TargetTable, read_target_tables

_TREES: Final = """
    with requested as (
        select class.oid, namespace.nspname as schema_name, class.relname as table_name
        from unnest(%s::text[], %s::text[]) as given (schema_name, table_name)
        join pg_namespace as namespace on namespace.nspname = given.schema_name
        join pg_class as class on class.relnamespace = namespace.oid and class.relname = given.table_name
    )
    select schema_name, table_name, oid, oid from requested
    union
    select schema_name, table_name, oid, relid::oid from requested, pg_partition_ancestors(oid) as relid
    union
    select schema_name, table_name, oid, relid::oid from requested, pg_partition_tree(oid)
"""
"""The requested tables, each with all tables of its partition tree, itself included."""

_SUBSCRIPTIONS: Final = """
    select class.oid, entry.subscription, entry.schema_name, entry.table_name
    from pg_class as class
    join pg_namespace as namespace on namespace.oid = class.relnamespace
    join cdc_replay.subscription_table as entry
        on entry.relation = class.oid or entry.relation is null and entry.schema_name = namespace.nspname and
        entry.table_name = class.relname
    where class.oid = any(%s) and entry.subscription <> %s
    order by entry.subscription, entry.schema_name, entry.table_name
"""

_NATIVE: Final = """
    select srrelid, native.subname
    from pg_subscription_rel join pg_subscription as native on native.oid = srsubid
    where srrelid = any(%s)
        and native.subdbid = (select oid from pg_database where datname = current_database())
    order by native.subname
"""

_WIDER: Final[Mapping[str, frozenset[str]]] = {
    "smallint": frozenset({"integer", "bigint"}),
    "integer": frozenset({"bigint"}),
    "character varying": frozenset({"text"}),
}
"""Publisher's type: types of the subscriber with the same values and the same comparison."""


@dataclass(frozen=True, slots=True)
class _Feed:
    """Subscription `name` feeds our `target`, or another table of its tree, from the publisher's `table`."""

    target: QualifiedName
    name: str
    table: QualifiedName
    is_same_table: bool


@dataclass(frozen=True, slots=True)
class LogState:
    """The URI of the publisher's log, its current catalog, and all configured subscriptions by name."""

    change_log: str
    catalog: PublisherCatalog
    configured: Mapping[str, Subscription]


class ReadSubscription(Protocol):
    """A subscription, and a connection to its subscriber."""

    @property
    def subscription(self) -> Subscription:
        """Its definition."""

    @property
    def connection(self) -> Connection:
        """The connection."""


class _UnknownRowsError(Exception):
    """The rows of a feed cannot be determined, for this reason."""


def rows_of_other_feeds(
    session: SubscriptionSession, log_state: LogState, tables: Iterable[QualifiedName]
) -> dict[QualifiedName, sql.Composed]:
    """By table, the condition for rows of the subscriber that other feeds may have inserted.

    Raises:
        ReconcileRefused: naming every table with another feed whose rows are unknown.
    """
    rows = tuple(_rows_by_feed(session, log_state, tables))
    reasons = [feed_rows.unknown for feed_rows in rows if feed_rows.unknown is not None]
    if reasons:
        raise ReconcileRefused(
            f'subscription "{session.subscription.name}" cannot be reconciled: it could delete rows of other'
            " subscriptions",
            detail="\n".join(reasons),
            hint="Nothing was changed. Rows of another subscription of this database stay if its row filter"
            " identifies them: give it a filter that compares columns with constants, or feed the table by"
            " one subscription only.",
            rule="R7.13",
        )
    return _conditions(rows)


def identified_rows_of_other_feeds(
    session: SubscriptionSession, log_state: LogState, tables: Iterable[QualifiedName]
) -> dict[QualifiedName, sql.Composed]:
    """The conditions of `rows_of_other_feeds`, for tables whose other feeds are all known."""
    rows = tuple(_rows_by_feed(session, log_state, tables))
    left_out = {feed_rows.table for feed_rows in rows if feed_rows.unknown is not None}
    return _conditions(feed_rows for feed_rows in rows if feed_rows.table not in left_out)


def claims_by_feed(
    session: ReadSubscription, log_state: LogState, table: QualifiedName
) -> tuple[dict[str, sql.Composed], tuple[str, ...]]:
    """By other feed of a table, the condition for its rows; and the feeds whose rows are unknown."""
    rows = tuple(_rows_by_feed(session, log_state, [table]))
    unknown = dict.fromkeys(feed_rows.feed for feed_rows in rows if feed_rows.unknown is not None)
    return {feed_rows.feed: feed_rows.claim for feed_rows in rows if feed_rows.claim is not None}, tuple(
        unknown
    )


@dataclass(frozen=True, slots=True)
class _FeedRows:
    """The rows of a feed in a table: a condition, None if there are none; or why they are unknown."""

    table: QualifiedName
    feed: str
    claim: sql.Composed | None = None
    unknown: str | None = None


def _rows_by_feed(
    session: ReadSubscription, log_state: LogState, tables: Iterable[QualifiedName]
) -> Iterator[_FeedRows]:
    trees = _trees(session, tables)
    for relation, name in session.connection.execute(_NATIVE, (list(trees),)).fetchall():
        for table in trees[relation]:
            reason = f'table "{table}": native subscription "{name}" also feeds it, and its rows are unknown'
            yield _FeedRows(table, name, unknown=reason)
    for feed in _feeds(session, trees):
        try:
            yield _FeedRows(feed.target, feed.name, _OtherFeed(session, log_state, feed).claim())
        except _UnknownRowsError as error:
            reason = f'table "{feed.target}": subscription "{feed.name}" also feeds it, {error}'
            yield _FeedRows(feed.target, feed.name, unknown=reason)


def _conditions(rows: Iterable[_FeedRows]) -> dict[QualifiedName, sql.Composed]:
    claims: dict[QualifiedName, list[sql.Composed]] = {}
    for feed_rows in rows:
        if feed_rows.claim is not None:
            claims.setdefault(feed_rows.table, []).append(feed_rows.claim)
    return {
        table: sql.SQL("({})").format(sql.SQL(" or ").join(conditions))
        for table, conditions in claims.items()
    }


def other_feeds(
    session: SubscriptionSession, tables: Iterable[QualifiedName]
) -> dict[QualifiedName, tuple[str, ...]]:
    """By table, the other subscriptions that feed it, or another table of its partition tree."""
    trees = _trees(session, tables)
    names: dict[QualifiedName, dict[str, None]] = {}
    for relation, name in session.connection.execute(_NATIVE, (list(trees),)):
        for target in trees[relation]:
            names.setdefault(target, {})[name] = None
    for feed in _feeds(session, trees):
        names.setdefault(feed.target, {})[feed.name] = None
    return {target: tuple(feeds) for target, feeds in names.items()}


def _trees(
    session: ReadSubscription, tables: Iterable[QualifiedName]
) -> Mapping[int, Mapping[QualifiedName, bool]]:
    """By oid, all tables of the partition trees of `tables`, with the requested table and if it is that."""
    names = list(tables)
    requested = ([name.schema for name in names], [name.name for name in names])
    trees: dict[int, dict[QualifiedName, bool]] = {}
    for schema, name, oid, relation in session.connection.execute(_TREES, requested):
        trees.setdefault(relation, {})[QualifiedName(schema, name)] = oid == relation
    return trees


def _feeds(session: ReadSubscription, trees: Mapping[int, Mapping[QualifiedName, bool]]) -> list[_Feed]:
    if not state_schema.is_installed(session.connection):
        return []
    rows = session.connection.execute(_SUBSCRIPTIONS, (list(trees), session.subscription.name))
    return [
        _Feed(target, name, QualifiedName(schema, table), is_same)
        for relation, name, schema, table in rows
        for target, is_same in trees[relation].items()
    ]


@dataclass(frozen=True, slots=True)
class _OtherFeed:
    session: ReadSubscription
    log_state: LogState
    feed: _Feed

    def claim(self) -> sql.Composed | None:
        """The condition for rows that it may have inserted; None if there are none.

        Raises:
            _UnknownRowsError: if its row filters do not identify its rows.
        """
        if not self.feed.is_same_table:
            raise _UnknownRowsError(f'by table "{self.feed.table}" of the same partition tree')
        change_log = ChangeLog.open(self.log_state.change_log)
        publications = self._publications(change_log.header.system_identifier)
        conditions: dict[RowFilter, sql.Composed] = {}
        for catalog in (*self._catalogs_since_copy(change_log), self.log_state.catalog):
            synced, filters = _synced_and_filters(catalog, publications, self.feed.table)
            if synced is not None and filters is None:
                raise _UnknownRowsError("and has or had no row filter for it, so every row may be its own")
            for row_filter in filters or ():
                if synced is not None and row_filter not in conditions:
                    conditions[row_filter] = self._condition(synced, row_filter)
        self._check_copy_filters(conditions)
        return sql.SQL("({})").format(sql.SQL(" or ").join(conditions.values())) if conditions else None

    def _publications(self, system_identifier: str) -> tuple[str, ...]:
        """The publications recorded at its copy, and those of the configuration."""
        name = self.feed.name
        record = subscription_records.subscription_record(self.session.connection, name)
        configured = self.log_state.configured.get(name)
        if configured is None or record is None:
            raise _UnknownRowsError("and is not in the configuration")
        is_same = configured.publisher == self.session.subscription.publisher
        if not is_same or record.publisher_system_identifier != system_identifier:
            raise _UnknownRowsError("and has another publisher")
        return tuple(dict.fromkeys((*record.publications, *configured.publications)))

    @property
    def _copy_definition(self) -> CopyDefinition | None:
        return read_copy_definitions(self.session.connection, self.feed.name).get(self.feed.table)

    @property
    def _state(self) -> object:
        return subscription_tables.table_states(self.session.connection, self.feed.name).get(self.feed.table)

    def _catalogs_since_copy(self, change_log: ChangeLog) -> tuple[PublisherCatalog, ...]:
        # A new log has none before the first capture.
        if self._copy_definition is None or not (catalogs := change_log.catalogs()):
            return ()
        since = min(self._copy_definition.lsn, change_log.end_lsn)
        history = CatalogHistory(catalogs)
        return tuple(history.within(Window(since, change_log.end_lsn)).values())

    def _check_copy_filters(self, filters: Iterable[RowFilter]) -> None:
        """Check that all its rows were replicated through one of `filters`."""
        if self._copy_definition is None:
            if not isinstance(self._state, Pending):
                raise _UnknownRowsError("and the row filter of its copied rows is unknown")
            return
        former = self._copy_definition.definition.filters
        if former is None:
            raise _UnknownRowsError("and had no row filter for it, so every row may be its own")
        known = {text for row_filter in filters for text in (row_filter.sql, row_filter.unprinted_sql)}
        if not former <= known:
            raise _UnknownRowsError(
                f"and the row filter of its copy at {self._copy_definition.lsn} is not in the"
                f" change log; run `cdc-replay capture {self.session.subscription.publisher}` first"
            )

    def _condition(self, synced: SyncedTable, row_filter: RowFilter) -> sql.Composed:
        """The filter as a condition that the subscriber evaluates like the publisher."""
        compiled = compile_filter(row_filter, synced.table)
        if not isinstance(compiled, ArrowFilter):
            raise _UnknownRowsError(f"and the subscriber cannot evaluate its row filter: {compiled.because}")
        present = self.log_state.catalog.tables.get(synced.table.id)
        # By attribute number: a column may have been renamed.
        names = {column.attnum: column.name for column in present.columns} if present else {}
        target = read_target_tables(self.session.connection, [self.feed.target])[self.feed.target]
        for column in compiled.columns:
            is_published = column.name in synced.columns and column.attnum in names
            if not is_published or not _compares_equally(column, names[column.attnum], target):
                raise _UnknownRowsError(
                    f'and the subscriber cannot evaluate its row filter: column "{column.name}" is not'
                    " published, or has another type or collation there"
                )
        by_present_names = dataclasses.replace(synced.table, columns=present.columns if present else ())
        try:
            passes = print_for_subscriber(self.session.connection, None, by_present_names, [row_filter])
        except NotPrintableError as error:
            raise _UnknownRowsError(f"and the subscriber cannot evaluate its row filter: {error}") from error
        return sql.SQL("({} is true)").format(passes)


def _synced_and_filters(
    catalog: PublisherCatalog, publications: Sequence[str], name: QualifiedName
) -> tuple[SyncedTable | None, tuple[RowFilter, ...] | None]:
    """The table as the publications list it, and all filters that apply to its rows; None: any row."""
    try:
        listed = {filter_set.table.name: filter_set for filter_set in synced_tables(catalog, publications)}
        synced = listed.get(name)
        filter_sets = (
            [] if synced is None else [synced.filters, *_stream_filters(catalog, publications, synced)]
        )
    except PublicationRefused as error:
        raise _UnknownRowsError("and PostgreSQL refuses its publications") from error
    filters: dict[RowFilter, None] = {}
    for filter_set in filter_sets:
        if filter_set is None:
            return synced, None
        filters |= dict.fromkeys(filter_set)
    return synced, tuple(filters)


def _stream_filters(
    catalog: PublisherCatalog, publications: Sequence[str], synced: SyncedTable
) -> Iterator[tuple[RowFilter, ...] | None]:
    """The filters of the change stream, which can differ from those of the initial copy (R7.5)."""
    for leaf in synced.leaves:
        published = resolve(catalog, publications, leaf.id)
        if published is not None and published.table.name == synced.table.name:
            yield from (published.filters[action] for action in ROW_ACTIONS if action in published.actions)


def _compares_equally(column: TableColumn, name: str, table: TargetTable) -> bool:
    """Whether the subscriber's column `name` has the publisher's values and comparison."""
    target = next((candidate for candidate in table.columns if candidate.name == name), None)
    if target is None or not _has_same_values(column.type_sql, target.base_type_sql):
        return False
    return _collation_of(column) == _collation_in(target)


def _has_same_values(published: str, target: str) -> bool:
    without_length, _, rest = published.partition("(")
    _, _, suffix = rest.partition(")")
    unlimited = without_length + suffix
    return target in {published, unlimited} or target in _WIDER.get(unlimited, ())


def _collation_of(column: TableColumn) -> str | None:
    """The collation; None: the database's default, or no collation."""
    return None if column.collation_sql is None else column.collation_sql.replace('"', "")


def _collation_in(target: TargetColumn) -> str | None:
    if target.collation is None or target.collation == ("pg_catalog", "default"):
        return None
    return ".".join(target.collation)
