"""The publisher's rows of unequal buckets, in temporary tables of the subscriber's session.

A temporary table has the published columns with the target's types, so that the same input functions read the
rows as in the target. It disappears with the session.
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
from cdc_replay.postgres.copy import CopyCounts, CopyTarget, copy_across
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.subscriber.apply_connection import database_time_zone
from cdc_replay.subscriber.as_owner import TargetSession
from cdc_replay.subscriber.staged_columns import check_types, staged_type, typed_value
from cdc_replay.subscriber.target_tables import TargetTable


@dataclass(frozen=True, slots=True)
class TablePair:
    """A published table and its target; `key` identifies a row on both sides, empty if there is none.

    Conditions: `passes` for the publisher's rows that pass the row filters, None without filters; `outside`
    for rows of the target outside them, None if the subscriber cannot evaluate them; `claimed` for rows that
    another feed of the target may have inserted, which are never deleted. `time_zone` is that of sessions
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
    def from_tables(
        cls,
        synced: SyncedTable,
        target: TargetTable,
        publisher: Connection,
        subscriber: Connection,
        session: TargetSession,
    ) -> TablePair:
        """Build the pair; the target has all published columns.

        Raises:
            InvalidFilter: if a row filter cannot be read.
        """
        key = digest.common_key(synced.table, target, synced.columns)
        passes = print_filters(publisher, synced.table, synced.filters)
        pair = cls(synced, target, key, database_time_zone(subscriber), passes)
        outside, _ = digest.subscriber_filter_condition(
            pair.subscriber(subscriber, session), publisher, synced
        )
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
        """The columns that determine a row's bucket: its key, or all."""
        return self.key or self.columns

    def publisher(self, connection: Connection) -> TableSide:
        """The publisher's side."""
        rows = digest.publisher_rows(self.synced.table, self.columns, self.passes, self._conversions)
        of_publisher, _ = digest.side_names(self.synced.table.name)
        return TableSide(connection, rows, self.key, self.columns, table=of_publisher)

    def subscriber(self, connection: Connection, session: TargetSession) -> TableSide:
        """The subscriber's side, without rows known to be outside the filter."""
        rows = digest.subscriber_rows(self.name, self.columns, is_partitioned=self.target.is_partitioned)
        if self.outside is not None:
            inside = "select {} from ({}) as rows where not ({})"
            rows = sql.SQL(inside).format(names(self.columns), rows, self.outside)
        _, of_subscriber = digest.side_names(self.name)
        return TableSide(connection, rows, self.key, self.columns, session=session, table=of_subscriber)

    def select_rows(self, buckets: Buckets) -> sql.Composed:
        """The query of the publisher's rows in these buckets, with unconverted values."""
        return self._select(self.columns, self.passes or sql.SQL("true"), buckets)

    def select_unpublished_keys(self, buckets: Buckets, passes: sql.Composed) -> sql.Composed:
        """The query of the keys of the publisher's unpublished rows in these buckets."""
        return self._select(self.key, digest.outside_filter(passes), buckets)

    def _select(self, columns: Sequence[str], condition: sql.Composable, buckets: Buckets) -> sql.Composed:
        converted = self._conversions
        key = sql.SQL(", ").join(converted.get(name, sql.Identifier(name)) for name in self.hashed_key)
        table = self.synced.table
        return sql.SQL("select {} from {} where ({}) and {}").format(
            names(columns),
            digest.from_clause(table.name, is_partitioned=table.is_partitioned),
            condition,
            buckets.condition(digest.hash_of(key)),
        )

    @property
    def _conversions(self) -> dict[str, sql.Composed]:
        return digest.conversions(self.synced.table, self.target, self.columns, self.time_zone)


@dataclass(frozen=True, slots=True)
class StagedRows:
    """A pair whose rows in `buckets` are staged in temporary table `table`; None: the sides are equal."""

    pair: TablePair
    buckets: Buckets
    table: sql.Identifier | None
    rows: int
    bytes: int

    def create_view(self, connection: Connection, table: sql.Identifier) -> sql.Identifier:
        """A view of the table with the target's types; its reader's rights apply to the casts."""
        view = temporary("staged")
        target = self.pair.target
        values = (
            sql.SQL("{} as {}").format(
                typed_value(
                    sql.Identifier(name),
                    target.column(name),
                    owner_is_untrusted=target.acting.rights.owner_is_untrusted,
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
    pair: TablePair, index: int, buckets: Buckets, publisher: Connection, subscriber: Connection
) -> StagedRows:
    """Copy the publisher's rows of the buckets; `index` makes the temporary table's name unique.

    Raises:
        CdcReplayError: as `copy_across`.
    """
    if not buckets.ids and pair.outside is None:
        return StagedRows(pair, buckets, None, 0, 0)
    table = _create(subscriber, f"reconcile_{index}", pair.target, pair.columns)
    if not buckets.ids:
        return StagedRows(pair, buckets, table, 0, 0)
    copied: CopyCounts = copy_across(
        publisher, [pair.select_rows(buckets)], subscriber, CopyTarget(table, pair.name, pair.columns)
    )
    subscriber.execute(sql.SQL("analyze {}").format(table))
    return StagedRows(pair, buckets, table, copied.rows, copied.bytes)


def stage_unpublished_keys(
    staged: StagedRows, index: int, publisher: Connection, subscriber: Connection
) -> sql.Identifier | None:
    """Copy the keys of the publisher's unpublished rows of the same buckets.

    None if there are no such rows, or no key.

    Raises:
        CdcReplayError: as `copy_across`.
    """
    pair, passes = staged.pair, staged.pair.passes
    if passes is None or not pair.key or not staged.buckets.ids:
        return None
    table = _create(subscriber, f"unpublished_{index}", pair.target, pair.key)
    rows = pair.select_unpublished_keys(staged.buckets, passes)
    copy_across(publisher, [rows], subscriber, CopyTarget(table, pair.name, pair.key))
    return table


def _create(connection: Connection, name: str, target: TargetTable, columns: Sequence[str]) -> sql.Identifier:
    table, owner_is_untrusted = temporary(name), target.acting.rights.owner_is_untrusted
    typed = sql.SQL(", ").join(
        sql.SQL("{} {}").format(
            sql.Identifier(column), staged_type(target.column(column), owner_is_untrusted=owner_is_untrusted)
        )
        for column in columns
    )
    connection.execute(sql.SQL("create temporary table {} ({})").format(table, typed))
    if owner_is_untrusted:
        check_types(connection, table, target.name)
    return table


def temporary(name: str) -> sql.Identifier:
    """The name of a temporary table of the session."""
    return sql.Identifier("pg_temp", name)


def names(columns: Sequence[str], alias: str = "") -> sql.Composed:
    """The columns separated by commas, qualified by `alias` if given."""
    qualified = ((alias, name) if alias else (name,) for name in columns)
    return sql.SQL(", ").join(sql.Identifier(*parts) for parts in qualified)


@contextlib.contextmanager
def comparison_errors(table: QualifiedName) -> Iterator[None]:
    """Translate errors of both servers while a table is compared.

    Raises:
        InvalidFilter: if a row filter, or the type of the subscriber's column, fails on a value.
        MissingPrivilege, ServerUnavailable: as `translated_errors`.
    """
    action = f'cannot compare table "{table}"'
    try:
        with translated_errors(action):
            yield
    except psycopg.DataError as error:
        raise InvalidFilter(
            f"{action}: {error.diag.message_primary}",
            detail=error.diag.message_detail,
            hint="A row filter fails on a row, or the subscriber's type rejects a value:"
            " correct the row, the filter or the type.",
            rule="R7.6",
        ) from error
    except psycopg.Error as error:
        raise CdcReplayError(
            f"{action}: {error.diag.message_primary or error}", detail=error.diag.message_detail
        ) from error
