"""A published table and its target: the queries of both sides, and which of their rows are compared.

The publisher's rows are those of the initial copy: the filters of the listed relation, any of them true
(R7.4), the table alone or the whole partitioned table (R7.6).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from cdc_replay.compare.buckets import Buckets
from cdc_replay.compare.digest import TableSide, hash_of
from cdc_replay.filters.names import NotPrintableError
from cdc_replay.filters.printed import print_filters, print_for_subscriber
from cdc_replay.model.publication import Table, TableColumn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.identifiers import commas, names, table_reference
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.subscriber.apply_connection import database_time_zone
from cdc_replay.subscriber.as_owner import AsOurselves, TargetSession
from cdc_replay.subscriber.target_tables import TargetTable

KEEPS_TEXT: Final = ("text", "character varying")
"""Types whose input functions change no text."""

WITH_LENGTH: Final = re.compile(r"(character varying|character|bit varying|bit)\(([0-9]+)\)(\[\])?")
"""Types whose input functions refuse what a cast cuts or pads: all but blanks after the length."""

FITS: Final = {
    "character varying": "length(rtrim({text}, ' ')) <= {length}",
    "character": "length(rtrim({text}, ' ')) <= {length}",
    "bit varying": """length({text}::"bit") <= {length}""",
    "bit": """length({text}::"bit") = {length}""",
}
"""By type, the condition that its input function accepts a text; `"bit"` has no length."""

ALL_FIT: Final = "not exists (select from unnest(value::text[]) as element where not {fits})"

BY_TEXT_THAT_FITS: Final = """case when num_nulls({column}) = 0 then (
    select case when {fits} then format('%s', value::{type}) else value end
    from format('%s', {column}) as value
) end"""
"""Any other text stays as it is, so that it differs from every value of the type."""

BY_TEXT: Final = "case when num_nulls({column}) = 0 then format('%s', {column})::{type} end"
"""Not `is null`, which is also true of a row of NULLs."""

WITHOUT_TIME_ZONE: Final = (1082, 1114)
"""`date` and `timestamp`."""

IN_TIME_ZONE: Final = "({column}::timestamp at time zone {time_zone})::{type}"

_IS_TYPE: Final = "select pg_catalog.to_regtype(%s) is not null"


@dataclass(frozen=True, slots=True)
class TablePair:
    """A published table and its target; `key` identifies a row on both sides, empty if there is none.

    `columns` are compared. Conditions: `passes` for the publisher's rows that pass the row filters, None
    without filters; `outside` for rows of the target outside them, None if the subscriber cannot evaluate
    them, for the reason `unknown`; `claimed` for rows that another feed of the target may have inserted,
    which are never deleted, and outside of the filters not compared; `left_out` for rows that are not
    compared either. `converted` are the publisher's values of columns that have another type on the
    subscriber. Rows outside of the buckets `within` take no part; None: all do.
    """

    synced: SyncedTable
    target: TargetTable
    key: tuple[str, ...]
    columns: tuple[str, ...]
    converted: Mapping[str, sql.Composed]
    passes: sql.Composed | None = None
    outside: sql.Composed | None = None
    unknown: str | None = None
    claimed: sql.Composed | None = None
    left_out: sql.Composed | None = None
    within: Buckets | None = None

    @classmethod
    def from_tables(
        cls,
        synced: SyncedTable,
        target: TargetTable,
        publisher: Connection,
        subscriber: Connection,
        session: TargetSession,
        *,
        only_key: bool = False,
    ) -> TablePair:
        """Build the pair; the target has all published columns. With `only_key`, only a key is compared.

        Raises:
            InvalidFilter: if a row filter cannot be read.
        """
        key = common_key(synced.table, target, synced.columns)
        columns = key if key and only_key else synced.columns
        converted = conversions(publisher, subscriber, synced.table, target, columns)
        passes = print_filters(publisher, synced.table, synced.filters)
        pair = cls(synced, target, key, columns, converted, passes)
        outside, unknown = _outside_condition(pair.subscriber(session), publisher, subscriber, synced)
        return dataclasses.replace(pair, outside=outside, unknown=unknown)

    def without_rows_of_others(
        self, published: SyncedTable, claimed: sql.Composed, subscriber: Connection, session: TargetSession
    ) -> TablePair:
        """The pair without rows that other feeds claim outside of the row filters of `published`.

        That is for a native copy of the published table, which itself has no row filters.

        Raises:
            InvalidFilter: if a row filter cannot be read.
        """
        outside, _ = _outside_condition(self.subscriber(session), None, subscriber, published)
        if outside is None:
            return self
        return dataclasses.replace(self, left_out=sql.SQL("({} and {})").format(outside, claimed))

    @property
    def name(self) -> QualifiedName:
        """The table's."""
        return self.target.name

    @property
    def hashed_key(self) -> tuple[str, ...]:
        """The columns that determine a row's bucket: its key, or all."""
        return self.key or self.columns

    def publisher(self, connection: Connection) -> TableSide:
        """The publisher's side."""
        values = commas(
            sql.SQL("{} as {}").format(self.converted.get(name, sql.Identifier(name)), sql.Identifier(name))
            for name in self.columns
        )
        rows = self._select(values, self.passes)
        table = f'table "{self.synced.table.name}" of the publisher'
        return TableSide(rows, self.key, self.columns, AsOurselves(connection), table)

    def subscriber(self, session: TargetSession) -> TableSide:
        """The subscriber's side, with rows outside the filter, which may read columns not compared."""
        target = table_reference(self.name, is_partitioned=self.target.is_partitioned)
        rows = sql.SQL("select {} from {}").format(names(self.synced.columns), target)
        if self.outside is not None and self.claimed is not None:
            rows = sql.SQL("{} where not ({} and {})").format(rows, self.outside, self.claimed)
        elif self.left_out is not None:
            rows = sql.SQL("{} where not {}").format(rows, self.left_out)
        table = f'table "{self.synced.table.name}" of the subscriber'
        return TableSide(rows, self.key, self.columns, session, table, self.outside)

    def select_rows(self, buckets: Buckets) -> sql.Composed:
        """The query of the publisher's rows in these buckets, with unconverted values."""
        return self._select(names(self.columns), self._within(buckets, self.passes or sql.SQL("true")))

    def select_unpublished_keys(self, buckets: Buckets, passes: sql.Composed) -> sql.Composed:
        """The query of the keys of the publisher's unpublished rows in these buckets."""
        return self._select(names(self.key), self._within(buckets, outside_filter(passes)))

    def _within(self, buckets: Buckets, condition: sql.Composable) -> sql.Composed:
        key = commas(self.converted.get(name, sql.Identifier(name)) for name in self.hashed_key)
        return sql.SQL("({}) and {}").format(condition, buckets.condition(hash_of(key)))

    def _select(self, values: sql.Composed, condition: sql.Composable | None) -> sql.Composed:
        table = self.synced.table
        query = sql.SQL("select {} from {}").format(
            values, table_reference(table.name, is_partitioned=table.is_partitioned)
        )
        return query if condition is None else sql.SQL("{} where {}").format(query, condition)


def outside_filter(passes: sql.Composable) -> sql.Composed:
    """The condition for rows outside the filter; NULL does not match (R3.1, R7.4)."""
    return sql.SQL("({}) is not true").format(passes)


def _outside_condition(
    side: TableSide, publisher: Connection | None, subscriber: Connection, synced: SyncedTable
) -> tuple[sql.Composed | None, str | None]:
    """The condition for the subscriber's rows outside the filters; or None, and why it cannot evaluate them.

    Raises:
        MissingPrivilege: if the role may not read the rows at all.
        InvalidFilter: if a row filter cannot be read.
    """
    if synced.filters is None:
        return None, None
    try:
        passes = print_for_subscriber(subscriber, publisher, synced.table, synced.filters)
    except NotPrintableError as error:
        return None, str(error)
    # The server itself checks that it has the columns, and operators for their types.
    query = sql.SQL("select {} from ({}) as rows limit 0").format(outside_filter(passes), side.rows)
    try:
        with side.read_errors(), subscriber.transaction():
            side.session.query(query)
    except psycopg.ProgrammingError as error:
        return None, error.diag.message_primary or str(error)
    return outside_filter(passes), None


def conversions(
    publisher: Connection, subscriber: Connection, table: Table, target: TargetTable, columns: Sequence[str]
) -> dict[str, sql.Composed]:
    """The publisher's expressions for values of columns that have another built-in type on the subscriber.

    That type's name is the subscriber's word: before it is part of a statement, the publisher reads it as the
    name of a type, and one that it does not have converts nothing. Texts of a user-defined type are compared
    unchanged, because the publisher may not have the type. A domain counts as its base type.
    """
    expressions: dict[str, sql.Composed] = {}
    for name in columns:
        target_type = target.column(name).base_type_sql
        column = table.column(name)
        # Only types of pg_catalog are written without their schema.
        converts = "." not in target_type and target_type not in KEEPS_TEXT
        if converts and column.type_sql != target_type and _is_type(publisher, target_type):
            expressions[name] = _conversion(subscriber, column, target_type)
    return expressions


def _is_type(publisher: Connection, name: str) -> bool:
    """Whether it is a type of the publisher.

    Raises:
        psycopg.errors.SyntaxError: if it is no name of a type at all.
    """
    ((is_type,),) = publisher.execute(_IS_TYPE, (name,)).fetchall()
    return bool(is_type)


def _conversion(subscriber: Connection, column: TableColumn, target_type: str) -> sql.Composed:
    identifier = sql.Identifier(column.name)
    if match := WITH_LENGTH.fullmatch(target_type):
        return sql.SQL(BY_TEXT_THAT_FITS).format(
            column=identifier, fits=_fits(*match.groups()), type=sql.SQL(target_type)
        )
    gets_zone = target_type.startswith("timestamp") and target_type.endswith("with time zone")
    if gets_zone and column.type_oid in WITHOUT_TIME_ZONE:
        time_zone = sql.Literal(database_time_zone(subscriber))
        return sql.SQL(IN_TIME_ZONE).format(column=identifier, type=sql.SQL(target_type), time_zone=time_zone)
    return sql.SQL(BY_TEXT).format(column=identifier, type=sql.SQL(target_type))


def _fits(scalar_type: str, length: str, brackets: str | None) -> sql.Composed:
    """The condition that the input function of a type with a length accepts `value`."""
    text = sql.Identifier("value" if brackets is None else "element")
    fits = sql.SQL(FITS[scalar_type]).format(text=text, length=sql.Literal(int(length)))
    return fits if brackets is None else sql.SQL(ALL_FIT).format(fits=fits)


def common_key(table: Table, target: TargetTable, columns: Collection[str]) -> tuple[str, ...]:
    """The columns that identify a row on both sides, empty if there are none.

    The publisher's replica identity key, else its primary key, else the subscriber's identity; only if all
    its columns are in `columns`.
    """
    for key in (table.key_columns, table.primary_key, target.identity):
        if key and set(key) <= set(columns):
            return tuple(key)
    return ()
