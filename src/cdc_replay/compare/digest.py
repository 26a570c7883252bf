"""Hashes of a table's rows, computed by each server.

Every row has two hashes: of its key, and of all compared columns. The key's hash puts the row into a bucket
(`buckets`); only rows of unequal buckets are listed, as hashes and keys.

Hashes are comparable between servers because:

- A value's text is the output of its type's output function (`row(…)::text` calls it), not a cast to text:
  the change stream and COPY send the same text, and NULL and '' stay distinct. Sessions are pinned (R1.11),
  and the text is hashed in UTF8 for every database encoding.
- If the subscriber's column has another type, the publisher's text first passes that type's input function,
  as in replication (`table_pair.conversions`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.compare.difference import RowValues
from cdc_replay.errors import InvalidMessage
from cdc_replay.postgres.connection import translated_errors
from cdc_replay.postgres.identifiers import commas, names
from cdc_replay.subscriber.as_owner import TargetSession

LONGEST_KEY: Final = 200
"""Characters shown of a key value, or of a row without key."""

HASHED_ROWS: Final = """
    select md5(convert_to(row({key})::text, 'UTF8')) as key_hash,
           md5(convert_to(row({columns})::text, 'UTF8')) as row_hash,
           array[{shown}] as shown,
           {outside} as outside
    from ({rows}) as rows
    offset 0
"""
"""One row per row of a side. OFFSET 0 keeps the planner from computing each hash once per use."""

LISTED_ROWS: Final = """
    select key_hash, row_hash, count(*), min(shown), bool_or(outside)
    from ({hashed}) as hashed
    where {within}
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

VALUES_OF_ROWS: Final = """
    select key_hash, shown
    from (select {key_hash} as key_hash, array[{values}]::text[] as shown from ({rows}) as rows) as hashed
    where key_hash = any ({hashes}::text[])
"""

LONGEST_VALUE: Final = 200
"""Characters of a value that a report shows."""

ROWS_SHOWN: Final = 3
"""Rows of one key that a report shows: a subscriber's table need not be unique."""


@dataclass(frozen=True, slots=True)
class TableSide:
    """How one server reads its side of a table.

    `rows` is a query of exactly the compared columns, under the publisher's names. `outside` is a boolean
    expression over them, true for rows outside the filter; None if there are none.
    """

    rows: sql.Composable
    key: tuple[str, ...]
    columns: tuple[str, ...]
    session: TargetSession
    table: str
    """The table and its server, in errors."""
    outside: sql.Composable | None = None

    @property
    def hashed_key(self) -> tuple[str, ...]:
        """The columns that determine a row's bucket: its key, or all."""
        return self.key or self.columns

    def inside(self) -> TableSide:
        """The side without the rows outside the filter."""
        if self.outside is None:
            return self
        inside = sql.SQL("select {} from ({}) as rows where not ({})")
        rows = inside.format(names(self.columns), self.rows, self.outside)
        return dataclasses.replace(self, rows=rows, outside=None)

    @contextlib.contextmanager
    def read_errors(self) -> Iterator[None]:
        """Translate errors while rows of this side are read.

        Raises:
            MissingPrivilege, ServerUnavailable: as `translated_errors`, with table and server.
            InvalidMessage: if the server's rows have another form; what an owner's code answers is judged by
                `act_on`.
        """
        grant = (
            "On that server, grant the role SELECT on the table and USAGE on its schema, and BYPASSRLS if"
            " row-level security restricts it."
        )
        try:
            with translated_errors(f"cannot read {self.table}", grant=grant):
                yield
        except (ValueError, TypeError) as error:
            if self.session.runs_as_owner:
                raise
            raise InvalidMessage(
                f"cannot read {self.table}: the server answers with rows of another form"
            ) from error

    def hashed(self) -> sql.Composed:
        """`HASHED_ROWS` of this side. Without a key, the whole row is the key."""
        key = names(self.hashed_key)
        outside = self.outside or sql.SQL("false")
        return sql.SQL(HASHED_ROWS).format(
            key=key, columns=names(self.columns), shown=self._shown(), outside=outside, rows=self.rows
        )

    def _shown(self) -> sql.Composable:
        longest = sql.Literal(LONGEST_KEY)
        if not self.key:
            return sql.SQL("left(row({})::text, {})").format(names(self.columns), longest)
        values = (
            sql.SQL("left(format('%s', {}), {})").format(sql.Identifier(name), longest) for name in self.key
        )
        return commas(values)


@dataclass(frozen=True, slots=True)
class HashedRow:
    """`count` equal rows: hashes in hexadecimal, and the key's values for display."""

    key_hash: str
    row_hash: str
    count: int
    shown: tuple[str, ...]
    outside_filter: bool


def hash_of(values: sql.Composable) -> sql.Composed:
    """The hash of a list of values in hexadecimal, as `HASHED_ROWS` has it."""
    return sql.SQL("md5(convert_to(row({})::text, 'UTF8'))").format(values)


def list_rows(side: TableSide, within: sql.Composable) -> Iterator[HashedRow]:
    """The rows under a condition on `key_hash`, ordered by the hashes; read through a cursor."""
    query = sql.SQL(LISTED_ROWS).format(hashed=side.hashed(), within=within)
    columns = "key_hash text, row_hash text, count bigint, shown text[], outside boolean"
    with side.read_errors():
        for key_hash, row_hash, count, shown, outside in side.session.stream(query, columns):
            yield HashedRow(str(key_hash), str(row_hash), int(count), tuple(shown), outside)


def read_values(side: TableSide, key_hashes: Sequence[str]) -> dict[str, tuple[RowValues, ...]]:
    """The rows with these keys, by the hash of the key: the first `ROWS_SHOWN` of each."""
    values = commas(
        sql.SQL("case when num_nulls({0}) = 0 then left(format('%s', {0}), {1}) end").format(
            sql.Identifier(name), sql.Literal(LONGEST_VALUE)
        )
        for name in side.columns
    )
    query = sql.SQL(VALUES_OF_ROWS).format(
        key_hash=hash_of(names(side.hashed_key)),
        values=values,
        rows=side.rows,
        hashes=sql.Literal(list(key_hashes)),
    )
    by_key: dict[str, tuple[RowValues, ...]] = {}
    with side.read_errors():
        for key_hash, shown in side.session.stream(query, "key_hash text, shown text[]"):
            rows = by_key.get(key_hash, ())
            if len(rows) < ROWS_SHOWN:
                by_key[key_hash] = (*rows, tuple(shown))
    return by_key


def duplicate_keys(side: TableSide, limit: int) -> tuple[int, list[tuple[str, ...]]]:
    """The number of keys that occur more than once, and the values of the first.

    Keys are compared by the server's own operator, so that an index on the key can answer.
    """
    duplicates = sql.SQL(KEYS_THAT_OCCUR_AGAIN).format(key=names(side.key), rows=side.rows)
    keys = dataclasses.replace(side, rows=duplicates, columns=side.key, outside=None)
    query = sql.SQL(DUPLICATE_KEYS).format(hashed=keys.hashed(), limit=sql.Literal(limit))
    rows = side.session.query(query)
    total = rows[0][0] if rows else 0
    return total, [tuple(shown) for _, shown in rows]
