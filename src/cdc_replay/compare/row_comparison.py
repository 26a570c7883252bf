"""The staged rows and the target's rows of the same buckets, one by one, in temporary tables.

Both are compared as the target's types print them. Equal rows cancel out, each as often as it occurs.
Remaining rows of the target are `surplus`, remaining staged rows are `missing`; of rows of one key, `pairs`
has one of each. A key may have several texts, such as 1.0 and 1.00: a row of one and a row of another are of
one key, too, if they are equal by the operators of the target's own key (`renamed`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, LiteralString

from psycopg import sql

from cdc_replay.compare.digest import hash_of
from cdc_replay.compare.staging import StagedRows, temporary
from cdc_replay.compare.table_pair import TablePair
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.identifiers import commas, names
from cdc_replay.subscriber.apply_connection import pinned_text_formats
from cdc_replay.subscriber.as_owner import TargetSession
from cdc_replay.subscriber.staged_columns import StagedColumns
from cdc_replay.subscriber.target_statements import equal, target_reference

_PRESENT: Final = """
    {into}
    select relation, row_id, key_hash, row_hash, claimed,
           row_number() over (partition by key_hash, row_hash order by claimed) as ordinal
    from (
        select target.tableoid as relation, target.ctid as row_id,
               {key_hash}::uuid as key_hash, {row_hash}::uuid as row_hash, {claimed} as claimed
        from {target} as target
        where {within} or {outside} and not {claimed}
    ) as rows
"""
_PRESENT_COLUMNS: Final = (
    "relation oid, row_id tid, key_hash uuid, row_hash uuid, claimed boolean, ordinal bigint"
)
"""Unclaimed rows come first when equal rows cancel out, or rows of one key are updated."""

_EXPECTED: Final = """
    create temporary table {expected} as
    select row_id, key_hash, row_hash, false as claimed,
           row_number() over (partition by key_hash, row_hash) as ordinal
    from (
        select staged.ctid as row_id, {key_hash}::uuid as key_hash, {row_hash}::uuid as row_hash
        from {staged} as staged
    ) as rows
"""

_UNMATCHED: Final = """
    create temporary table {unmatched} as
    select side.*, row_number() over (partition by side.key_hash order by side.claimed) as of_key
    from {side} as side
    where not exists (
        select from {opposite} as opposite
        where opposite.key_hash = side.key_hash and opposite.row_hash = side.row_hash
            and opposite.ordinal = side.ordinal
    )
"""

_RENAMED: Final = """
    {into}
    select distinct on (surplus.relation, surplus.row_id)
        missing.row_id, surplus.key_hash, surplus.of_key
    from {missing} as missing
    join {staged} as staged on staged.ctid = missing.row_id
    join {target} as target on {same_key}
    join {surplus} as surplus on surplus.relation = target.tableoid and surplus.row_id = target.ctid
    where {is_inserted} and not exists (
        select from {missing} as missing
        where missing.key_hash = surplus.key_hash and missing.of_key = surplus.of_key
    )
"""
_RENAMED_COLUMNS: Final = "row_id tid, key_hash uuid, of_key bigint"

_RENAME: Final = """
    update {missing} as missing set key_hash = renamed.key_hash, of_key = renamed.of_key
    from {renamed} as renamed where renamed.row_id = missing.row_id
"""

_PAIRS: Final = """
    create temporary table {pairs} as
    select surplus.relation, surplus.row_id, missing.row_id as staged_row_id
    from {surplus} as surplus join {missing} as missing using (key_hash, of_key)
"""

_PAIRS_OF_UNIQUE_KEYS: Final = """
    create temporary table {pairs} as
    select surplus.relation, surplus.row_id, missing.row_id as staged_row_id
    from {surplus} as surplus join {missing} as missing using (key_hash)
    where not exists (
        select from {surplus} as duplicate
        where duplicate.key_hash = surplus.key_hash and duplicate.of_key > 1
    ) and not exists (
        select from {missing} as duplicate
        where duplicate.key_hash = missing.key_hash and duplicate.of_key > 1
    )
"""
"""Rows of a key that occurs more than once on a side cannot be paired."""

_IS_DELETED: Final = """
    not surplus.claimed and not exists (
        select from {missing} as missing
        where missing.key_hash = surplus.key_hash and missing.of_key = surplus.of_key
    )
"""

_IS_INSERTED: Final = """
    not exists (
        select from {surplus} as surplus
        where surplus.key_hash = missing.key_hash and surplus.of_key = missing.of_key
    )
"""

_TEMPORARY: Final = ("present", "expected", "surplus", "missing", "renamed", "pairs", "detached")


@dataclass(frozen=True, slots=True)
class RowComparison:
    """Compares staged rows, in `table`, with the target's, and runs statements on the result."""

    connection: Connection
    session: TargetSession
    staged: StagedRows
    table: sql.Identifier
    typed: sql.Identifier
    """The staged rows with the target's types."""

    @property
    def pair(self) -> TablePair:
        """The table and its target."""
        return self.staged.pair

    @property
    def outside(self) -> sql.Composable:
        """The condition for rows of the target that are known to be outside the filter, and take part."""
        pair = self.pair
        if pair.outside is None or pair.within is None:
            return pair.outside or sql.SQL("false")
        takes_part = pair.within.condition(hash_of(names(pair.hashed_key, "target")))
        return sql.SQL("(({}) and {})").format(pair.outside, takes_part)

    def compare(self) -> None:
        """Fill `surplus`, `missing` and `pairs`; rows outside the filter count in every bucket."""
        self._compare(self.outside, _PAIRS)

    def compare_by_key(self) -> None:
        """The same, where rows outside the filter count only in the buckets; a key's only rows are a pair."""
        self._compare(sql.SQL("false"), _PAIRS_OF_UNIQUE_KEYS)

    def _compare(self, outside: sql.Composable, pairs: LiteralString) -> None:
        with pinned_text_formats(self.connection):
            self._hash_rows(outside)
            present, expected = temporary("present"), temporary("expected")
            for name, side, opposite in (("surplus", present, expected), ("missing", expected, present)):
                self._create(_UNMATCHED, name, unmatched=temporary(name), side=side, opposite=opposite)
                self.session.share(temporary(name))
            self._rename_equal_keys()
            self._create(pairs, "pairs")
        self.session.share(temporary("pairs"))

    def _hash_rows(self, outside: sql.Composable) -> None:
        pair, buckets = self.pair, self.staged.buckets
        key = hash_of(names(pair.hashed_key, "target"))
        self.execute(
            _PRESENT,
            into=self.session.into_temporary(temporary("present"), [sql.SQL(_PRESENT_COLUMNS)]),
            key_hash=key,
            row_hash=hash_of(names(pair.columns, "target")),
            within=buckets.condition(key) if buckets.ids else sql.SQL("false"),
            outside=outside,
            claimed=pair.claimed or sql.SQL("false"),
        )
        self._analyze("present")
        key = hash_of(names(pair.hashed_key, "staged"))
        self._create(_EXPECTED, "expected", key_hash=key, row_hash=hash_of(names(pair.columns, "staged")))

    def _rename_equal_keys(self) -> None:
        """Let `missing` name a key as `surplus` does, if only its text differs."""
        renamed = temporary("renamed")
        into = self.session.into_temporary(renamed, [sql.SQL(_RENAMED_COLUMNS)])
        self.execute(_RENAMED, into=into, same_key=self._same_key())
        self.connection.execute(self.format(_RENAME))

    def _same_key(self) -> sql.Composable:
        """`target` and `staged` are equal by the target's own key; never, if it has none."""
        identity = self.pair.target.identity
        if not identity or not set(identity) <= set(self.pair.columns):
            return sql.SQL("false")
        return sql.SQL(" and ").join(
            equal(equality, sql.Identifier("target", name), sql.Identifier("staged", name))
            for name in identity
            if (equality := self.pair.target.column(name).equality) is not None
        )

    @property
    def has_renamed(self) -> bool:
        """Whether the key of a row of both sides has another text."""
        return self.count("select count(*) from {renamed}") > 0

    def execute(self, statement: LiteralString, **parts: sql.Composable) -> int:
        """Run a statement on the target; returns the number of changed rows."""
        return self.session.execute(self.format(statement, **parts))

    def query(self, statement: LiteralString, **parts: sql.Composable) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return self.session.query(self.format(statement, **parts))

    def count(self, statement: LiteralString, **parts: sql.Composable) -> int:
        """The only value of a query."""
        ((count,),) = self.query(statement, **parts)
        return int(count)

    def format(self, statement: LiteralString, **parts: sql.Composable) -> sql.Composed:
        """The statement with the names of tables, and conditions for rows to delete and to insert."""
        tables = {
            **{name: temporary(name) for name in _TEMPORARY},
            "staged": self.typed,
            "target": target_reference(self.pair.target),
        }
        is_deleted, is_inserted = (sql.SQL(text).format(**tables) for text in (_IS_DELETED, _IS_INSERTED))
        return sql.SQL(statement).format(
            **{**tables, "is_deleted": is_deleted, "is_inserted": is_inserted, **parts}
        )

    def drop(self) -> None:
        """Drop the temporary tables, for the next table of the transaction."""
        tables = commas(map(temporary, _TEMPORARY))
        self.connection.execute(sql.SQL("drop table if exists {}").format(tables))

    def _create(self, statement: LiteralString, name: str, **parts: sql.Composable) -> None:
        self.connection.execute(self.format(statement, staged=self.table, **parts))
        self._analyze(name)

    def _analyze(self, name: str) -> None:
        self.connection.execute(sql.SQL("analyze {}").format(temporary(name)))


@contextlib.contextmanager
def open_comparison(
    connection: Connection, session: TargetSession, staged: StagedRows, table: sql.Identifier
) -> Iterator[RowComparison]:
    """A comparison with the rows staged in `table`, in the caller's transaction."""
    if not session.runs_as_owner:
        yield RowComparison(connection, session, staged, table, table)
        return
    view, columns = temporary("staged"), StagedColumns.from_target(staged.pair.target, staged.pair.columns)
    columns.share(connection, session, table, view, others=("ctid",))
    yield RowComparison(connection, session, staged, table, view)
    connection.execute(sql.SQL("drop view {}").format(view))
