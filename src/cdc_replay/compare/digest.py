"""Digests of a table's content, computed by each server.

Every row has two hashes: of its key, and of all compared columns. The key's hash puts the row into one of
`BUCKETS` buckets; a bucket's digest is the sum of its rows' hashes, so it depends on neither order nor plan.
Equal digests mean equal buckets; only rows of unequal buckets are listed, as hashes and keys.

Hashes are comparable between servers because:

- A value's text is the output of its type's output function (`row(…)::text` calls it), not a cast to text:
  the change stream and COPY send the same text, and NULL and '' stay distinct. Sessions are pinned (R1.11),
  and the text is hashed in UTF8 for every database encoding.
- If the subscriber's column has another type, the publisher's text first passes that type's input function,
  as in replication (`json` → `jsonb` changes the text, and is no difference). A date or timestamp that
  becomes a `timestamptz` is in the subscriber's time zone.

The publisher's rows are those of the initial copy: the filters of the listed relation, any of them true
(R7.4), the table alone or the whole partitioned table (R7.6).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import psycopg
from psycopg import sql

from cdc_replay.filters.names import NotPrintableError
from cdc_replay.filters.printed import print_for_subscriber
from cdc_replay.model.publication import Table
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.subscriber.as_owner import AsOurselves, TargetSession
from cdc_replay.subscriber.target_tables import TargetTable

BUCKETS: Final = 256
"""Buckets per table: the resolution of differences before rows are listed."""

LONGEST_KEY: Final = 200
"""Characters shown of a key value, or of a row without key."""

KEEPS_TEXT: Final = ("text", "character varying")
"""Types whose input functions change no text."""

BY_TEXT: Final = "case when num_nulls({column}) = 0 then format('%s', {column})::{type} end"
"""Not `is null`, which is also true of a row of NULLs."""

WITHOUT_TIME_ZONE: Final = (1082, 1114)
"""`date` and `timestamp`."""

IN_TIME_ZONE: Final = "({column}::timestamp at time zone {time_zone})::{type}"

HASHED_ROWS: Final = """
    select md5(convert_to(row({key})::text, 'UTF8')) as key_hash,
           md5(convert_to(row({columns})::text, 'UTF8')) as row_hash,
           array[{shown}] as shown,
           {outside} as outside
    from ({rows}) as rows
    offset 0
"""
"""One row per row of a side. OFFSET 0 keeps the planner from computing each hash once per use."""

BUCKET_DIGESTS: Final = """
    select ('x' || left(key_hash, 2))::bit(8)::int as bucket,
           count(*),
           sum(('x' || left(row_hash, 16))::bit(64)::bigint)::text,
           sum(('x' || right(row_hash, 16))::bit(64)::bigint)::text,
           count(*) filter (where outside)
    from ({hashed}) as hashed
    group by bucket
    order by bucket
"""

ROWS_OF_BUCKETS: Final = """
    select key_hash, row_hash, count(*), min(shown), bool_or(outside)
    from ({hashed}) as hashed
    where ('x' || left(key_hash, 2))::bit(8)::int = any ({buckets})
    group by key_hash, row_hash
    order by key_hash collate pg_catalog."C", row_hash collate pg_catalog."C"
"""

KEYS_THAT_OCCUR_AGAIN: Final = "select {key} from ({rows}) as rows group by {key} having count(*) > 1"

DUPLICATE_KEYS: Final = """
    select count(*) over (), shown
    from ({hashed}) as hashed
    order by key_hash collate pg_catalog."C"
    limit {limit}
"""

ROWS_OUTSIDE_FILTER: Final = """
    select min(shown)
    from ({hashed}) as hashed
    where outside
    group by key_hash
    order by key_hash collate pg_catalog."C"
    limit {limit}
"""


@dataclass(frozen=True, slots=True)
class TableSide:
    """How one server reads its side of a table.

    `rows` is a query of exactly the compared columns, under the publisher's names. `outside` is a boolean
    expression over them, true for rows outside the filter; None if there are none.
    """

    connection: Connection
    rows: sql.Composable
    key: tuple[str, ...]
    columns: tuple[str, ...]
    outside: sql.Composable | None = None
    session: TargetSession | None = None
    """Reads with the rights of the table's owner, if that is another role; None: with ours."""
    table: str = field(kw_only=True)

    @property
    def reader(self) -> TargetSession:
        """The session that reads the rows."""
        return self.session or AsOurselves(self.connection)

    @contextlib.contextmanager
    def read_errors(self) -> Iterator[None]:
        """Translate errors while rows of this side are read.

        Raises:
            MissingPrivilege, ServerUnavailable: as `translated_errors`, with table and server.
        """
        grant = (
            "On that server, grant the role SELECT on the table and USAGE on its schema, and BYPASSRLS if"
            " row-level security restricts it."
        )
        with translated_errors(f"cannot read {self.table}", grant=grant):
            yield

    def hashed(self) -> sql.Composed:
        """`HASHED_ROWS` of this side. Without a key, the whole row is the key."""
        key = _names(self.key or self.columns)
        outside = self.outside or sql.SQL("false")
        return sql.SQL(HASHED_ROWS).format(
            key=key, columns=_names(self.columns), shown=self._shown(), outside=outside, rows=self.rows
        )

    def _shown(self) -> sql.Composable:
        longest = sql.Literal(LONGEST_KEY)
        if not self.key:
            return sql.SQL("left(row({})::text, {})").format(_names(self.columns), longest)
        values = (
            sql.SQL("left(format('%s', {}), {})").format(sql.Identifier(name), longest) for name in self.key
        )
        return sql.SQL(", ").join(values)


@dataclass(frozen=True, slots=True)
class BucketDigest:
    """Row count of one bucket, the sum of the row hashes, and the number of rows outside the filter."""

    rows: int
    digest: tuple[str, str]
    outside_filter: int


NO_ROWS: Final = BucketDigest(0, ("0", "0"), 0)
"""An empty bucket."""


@dataclass(frozen=True, slots=True)
class HashedRow:
    """`count` equal rows: hashes in hexadecimal, and the key's values for display."""

    key_hash: str
    row_hash: str
    count: int
    shown: tuple[str, ...]
    outside_filter: bool


def side_names(table: QualifiedName) -> tuple[str, str]:
    """The names of the publisher's and the subscriber's table in errors."""
    return f'table "{table}" of the publisher', f'table "{table}" of the subscriber'


def publisher_rows(
    table: Table,
    columns: Sequence[str],
    passes: sql.Composable | None,
    converted: Mapping[str, sql.Composable],
) -> sql.Composed:
    """The query of the publisher's rows that pass the row filters.

    `converted` gives expressions for columns with another type on the subscriber.
    """
    selected = sql.SQL(", ").join(
        sql.SQL("{} as {}").format(converted.get(name, sql.Identifier(name)), sql.Identifier(name))
        for name in columns
    )
    return sql.SQL("select {} from {}{}").format(
        selected, from_clause(table.name, is_partitioned=table.is_partitioned), where_clause(passes)
    )


def subscriber_rows(name: QualifiedName, columns: Sequence[str], *, is_partitioned: bool) -> sql.Composed:
    """The query of all rows of the subscriber's table."""
    return sql.SQL("select {} from {}").format(
        _names(columns), from_clause(name, is_partitioned=is_partitioned)
    )


def outside_filter(passes: sql.Composable) -> sql.Composed:
    """The condition for rows outside the filter; NULL does not match (R3.1, R7.4)."""
    return sql.SQL("({}) is not true").format(passes)


def subscriber_filter_condition(
    side: TableSide, publisher: Connection, synced: SyncedTable
) -> tuple[sql.Composed | None, str | None]:
    """The condition for the subscriber's rows outside the filters; or None, and why it cannot evaluate them.

    Raises:
        MissingPrivilege: if the role may not read the rows at all.
        InvalidFilter: if a row filter cannot be read.
    """
    if synced.filters is None:
        return None, None
    try:
        passes = print_for_subscriber(side.connection, publisher, synced.table, synced.filters)
    except NotPrintableError as error:
        return None, str(error)
    # The server itself checks that it has the columns, and operators for their types.
    query = sql.SQL("select {} from ({}) as rows limit 0").format(outside_filter(passes), side.rows)
    try:
        with side.read_errors(), side.connection.transaction():
            side.reader.query(query)
    except psycopg.ProgrammingError as error:
        return None, error.diag.message_primary or str(error)
    return outside_filter(passes), None


def conversions(
    table: Table, target: TargetTable, columns: Sequence[str], time_zone: str
) -> dict[str, sql.Composed]:
    """Expressions for the subscriber's values of columns that have another built-in type there.

    Texts of a user-defined type are compared unchanged, because the publisher may not have the type. A domain
    counts as its base type. `time_zone` is that of sessions which write to the subscriber.
    """
    expressions: dict[str, sql.Composed] = {}
    for name in columns:
        target_type = target.column(name).base_type_sql
        # Only types of pg_catalog are written without their schema.
        converts = "." not in target_type and not target_type.startswith(KEEPS_TEXT)
        column = table.column(name)
        if converts and column.type_sql != target_type:
            gets_zone = target_type.startswith("timestamp") and target_type.endswith("with time zone")
            by_zone = gets_zone and column.type_oid in WITHOUT_TIME_ZONE
            expressions[name] = sql.SQL(IN_TIME_ZONE if by_zone else BY_TEXT).format(
                column=sql.Identifier(name), type=sql.SQL(target_type), time_zone=sql.Literal(time_zone)
            )
    return expressions


def common_key(table: Table, target: TargetTable, columns: Collection[str]) -> tuple[str, ...]:
    """The columns that identify a row on both sides, empty if there are none.

    The publisher's replica identity key, else its primary key, else the subscriber's identity; only if all
    its columns are in `columns`.
    """
    for key in (table.key_columns, table.primary_key, target.identity):
        if key and set(key) <= set(columns):
            return tuple(key)
    return ()


def hash_of(values: sql.Composable) -> sql.Composed:
    """The hash of a list of values in hexadecimal, as `HASHED_ROWS` has it."""
    return sql.SQL("md5(convert_to(row({})::text, 'UTF8'))").format(values)


def bucket_digests(side: TableSide) -> dict[int, BucketDigest]:
    """The digest of each bucket that has rows, by bucket number."""
    query = sql.SQL(BUCKET_DIGESTS).format(hashed=side.hashed())
    with side.read_errors():
        return {
            bucket: BucketDigest(rows, (high, low), outside)
            for bucket, rows, high, low, outside in side.reader.query(query)
        }


def rows_of_buckets(side: TableSide, buckets: Sequence[int]) -> Iterator[HashedRow]:
    """The rows of some buckets, ordered by hash of the key, then of the row; read through a cursor."""
    query = sql.SQL(ROWS_OF_BUCKETS).format(hashed=side.hashed(), buckets=sql.Literal(list(buckets)))
    columns = "key_hash text, row_hash text, count bigint, shown text[], outside boolean"
    for key_hash, row_hash, count, shown, outside in side.reader.stream(query, columns):
        yield HashedRow(key_hash, row_hash, count, tuple(shown), outside)


def duplicate_keys(side: TableSide, limit: int) -> tuple[int, list[tuple[str, ...]]]:
    """The number of keys that occur more than once, and the values of the first.

    Keys are compared by the server's own operator, so that an index on the key can answer.
    """
    duplicates = sql.SQL(KEYS_THAT_OCCUR_AGAIN).format(key=_names(side.key), rows=side.rows)
    keys = dataclasses.replace(side, rows=duplicates, columns=side.key, outside=None)
    query = sql.SQL(DUPLICATE_KEYS).format(hashed=keys.hashed(), limit=sql.Literal(limit))
    rows = side.reader.query(query)
    total = rows[0][0] if rows else 0
    return total, [tuple(shown) for _, shown in rows]


def rows_outside_filter(side: TableSide, limit: int) -> list[tuple[str, ...]]:
    """The key values of the first rows outside the filter."""
    query = sql.SQL(ROWS_OUTSIDE_FILTER).format(hashed=side.hashed(), limit=sql.Literal(limit))
    return [tuple(shown) for (shown,) in side.reader.query(query)]


def _names(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def from_clause(name: QualifiedName, *, is_partitioned: bool) -> sql.Composed:
    """The table without its inheritance children, or with all its partitions (R7.6)."""
    only = sql.SQL("" if is_partitioned else "only ")
    return sql.SQL("{}{}").format(only, sql.Identifier(name.schema, name.name))


def where_clause(passes: sql.Composable | None) -> sql.Composable:
    """The WHERE clause for rows that pass one of the filters; empty without filters (R7.4)."""
    return sql.SQL("") if passes is None else sql.SQL(" where {}").format(passes)
