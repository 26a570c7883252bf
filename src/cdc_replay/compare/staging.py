"""The publisher's rows of unequal buckets, in temporary tables of the subscriber's session.

A temporary table has the published columns with the types of the target's own, so the rows are read by the
same input functions that would read them into the target. It goes with the session, however that ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

from cdc_replay.compare import digest
from cdc_replay.compare.buckets import Buckets
from cdc_replay.compare.digest import TableSide
from cdc_replay.errors import CdcReplayError, InvalidFilter
from cdc_replay.filters.printed import print_filters
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.postgres.copy import Copied, CopyTarget, copy_across
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.subscriber.apply_connection import database_time_zone
from cdc_replay.subscriber.as_owner import TargetSession
from cdc_replay.subscriber.staged_columns import check_types, staged_type, typed_value
from cdc_replay.subscriber.tables import TargetTable


@dataclass(frozen=True, slots=True)
class TablePair:
    """A published table and its target; rows belong together by `key`, empty where there is none.

    `passes` is true of the publisher's rows that the row filters let through, None where there are none;
    `outside` of rows of the target that they shut out, where the subscriber can tell; `claimed` of rows that
    another feed of the target may have brought, which are never deleted. `time_zone` is that of the sessions
    which write to the target.
    """

    synced: SyncedTable
    target: TargetTable
    key: tuple[str, ...]
    time_zone: str
    passes: sql.Composed | None = None
    outside: sql.Composed | None = None
    claimed: sql.Composed | None = None

    @classmethod
    def of(
        cls,
        synced: SyncedTable,
        target: TargetTable,
        publisher: Connection,
        subscriber: Connection,
        session: TargetSession,
    ) -> TablePair:
        """The pair; the target has all the published columns.

        Raises:
            InvalidFilter: if a row filter cannot be read.
        """
        key = digest.common_key(synced.table, target, synced.columns)
        passes = print_filters(publisher, synced.table, synced.filters)
        pair = cls(synced, target, key, database_time_zone(subscriber), passes)
        outside, _ = digest.outside_there(pair.subscriber(subscriber, session), publisher, synced)
        return dataclasses.replace(pair, outside=outside)

    @property
    def name(self) -> QualifiedName:
        """The table's."""
        return self.target.name

    @property
    def columns(self) -> tuple[str, ...]:
        """The published columns."""
        return self.synced.columns

    @property
    def hashed_key(self) -> tuple[str, ...]:
        """What decides about a row's bucket: its key, or all of it."""
        return self.key or self.columns

    def publisher(self, connection: Connection) -> TableSide:
        """The rows that the target should hold."""
        rows = digest.publisher_rows(self.synced.table, self.columns, self.passes, self._converted)
        of_publisher, _ = digest.named_sides(self.synced.table.name)
        return TableSide(connection, rows, self.key, self.columns, table=of_publisher)

    def subscriber(self, connection: Connection, session: TargetSession) -> TableSide:
        """The rows that it holds, without those that are known to be outside of the filter."""
        rows = digest.subscriber_rows(self.name, self.columns, is_partitioned=self.target.is_partitioned)
        if self.outside is not None:
            inside = "select {} from ({}) as rows where not ({})"
            rows = sql.SQL(inside).format(names(self.columns), rows, self.outside)
        _, of_subscriber = digest.named_sides(self.name)
        return TableSide(connection, rows, self.key, self.columns, session=session, table=of_subscriber)

    def rows_of(self, buckets: Buckets) -> sql.Composed:
        """The publisher's rows in these buckets, with the values as they are there."""
        return self._selected(self.columns, self.passes or sql.SQL("true"), buckets)

    def unpublished_keys_of(self, buckets: Buckets, passes: sql.Composed) -> sql.Composed:
        """The keys of the publisher's rows in these buckets that do not pass."""
        return self._selected(self.key, digest.outside_filter(passes), buckets)

    def _selected(self, columns: Sequence[str], condition: sql.Composable, buckets: Buckets) -> sql.Composed:
        converted = self._converted
        key = sql.SQL(", ").join(converted.get(name, sql.Identifier(name)) for name in self.hashed_key)
        table = self.synced.table
        return sql.SQL("select {} from {} where ({}) and {}").format(
            names(columns),
            digest.from_table(table.name, is_partitioned=table.is_partitioned),
            condition,
            buckets.condition(digest.hash_of(key)),
        )

    @property
    def _converted(self) -> dict[str, sql.Composed]:
        return digest.conversions(self.synced.table, self.target, self.columns, self.time_zone)


@dataclass(frozen=True, slots=True)
class StagedRows:
    """A pair whose rows in `buckets` are staged in temporary table `table`; None: there is nothing to do."""

    pair: TablePair
    buckets: Buckets
    table: sql.Identifier | None
    rows: int
    bytes: int

    def create_view(self, connection: Connection, table: sql.Identifier) -> sql.Identifier:
        """A view of the table in which values have their types; who reads it makes the casts."""
        view = temporary("staged")
        target = self.pair.target
        values = (
            sql.SQL("{} as {}").format(
                typed_value(
                    sql.Identifier(name),
                    target.column(name),
                    is_of_another=target.acting.rights.is_of_another,
                ),
                sql.Identifier(name),
            )
            for name in self.pair.columns
        )
        columns = sql.SQL(", ").join([sql.Identifier("ctid"), *values])
        connection.execute(
            sql.SQL("create temporary view {} as select {} from {}").format(view, columns, table)
        )
        return view


def stage(
    pair: TablePair, number: int, buckets: Buckets, publisher: Connection, subscriber: Connection
) -> StagedRows:
    """Bring the publisher's rows of the buckets; `number` tells the session's temporary tables apart.

    Raises:
        CdcReplayError: as `copy_across`.
    """
    if not buckets.numbers and pair.outside is None:
        return StagedRows(pair, buckets, None, 0, 0)
    table = _create(subscriber, f"reconcile_{number}", pair.target, pair.columns)
    if not buckets.numbers:
        return StagedRows(pair, buckets, table, 0, 0)
    copied: Copied = copy_across(
        publisher, [pair.rows_of(buckets)], subscriber, CopyTarget(table, pair.name, pair.columns)
    )
    subscriber.execute(sql.SQL("analyze {}").format(table))
    return StagedRows(pair, buckets, table, copied.rows, copied.bytes)


def stage_unpublished_keys(
    staged: StagedRows, number: int, publisher: Connection, subscriber: Connection
) -> sql.Identifier | None:
    """Bring the keys of the rows of the same buckets that the publisher has and does not publish.

    None where that can be no row that is told from others by its key.

    Raises:
        CdcReplayError: as `copy_across`.
    """
    pair, passes = staged.pair, staged.pair.passes
    if passes is None or not pair.key or not staged.buckets.numbers:
        return None
    table = _create(subscriber, f"unpublished_{number}", pair.target, pair.key)
    rows = pair.unpublished_keys_of(staged.buckets, passes)
    copy_across(publisher, [rows], subscriber, CopyTarget(table, pair.name, pair.key))
    return table


def _create(connection: Connection, name: str, target: TargetTable, columns: Sequence[str]) -> sql.Identifier:
    """A temporary table for values of these columns of the target."""
    table, is_of_another = temporary(name), target.acting.rights.is_of_another
    typed = sql.SQL(", ").join(
        sql.SQL("{} {}").format(
            sql.Identifier(column), staged_type(target.column(column), is_of_another=is_of_another)
        )
        for column in columns
    )
    connection.execute(sql.SQL("create temporary table {} ({})").format(table, typed))
    if is_of_another:
        check_types(connection, table, target.name)
    return table


def temporary(name: str) -> sql.Identifier:
    """A temporary table of the session."""
    return sql.Identifier("pg_temp", name)


def names(columns: Sequence[str], alias: str = "") -> sql.Composed:
    """The columns, of `alias` if there is one, with commas."""
    qualified = ((alias, name) if alias else (name,) for name in columns)
    return sql.SQL(", ").join(sql.Identifier(*each) for each in qualified)


@contextlib.contextmanager
def comparing(table: QualifiedName) -> Iterator[None]:
    """Errors of either server while a table is compared, which name it.

    Raises:
        InvalidFilter: if a row filter, or the type of the subscriber's column, fails on a value.
        MissingPrivilege, ServerUnavailable: as `translated_errors`.
    """
    what = f'cannot compare table "{table}"'
    try:
        with translated_errors(what):
            yield
    except psycopg.DataError as error:
        raise InvalidFilter(
            f"{what}: {error.diag.message_primary}",
            detail=error.diag.message_detail,
            hint="A row filter fails on a row, or the subscriber's type does not take a value:"
            " correct the row, the filter or the type.",
            rule="R7.6",
        ) from error
    except psycopg.Error as error:
        raise CdcReplayError(
            f"{what}: {error.diag.message_primary or error}", detail=error.diag.message_detail
        ) from error
