"""Make the target's rows of some buckets the staged ones, in the caller's transaction.

Rows are compared here once more, one by one: what is staged with what the target holds under the lock, both
as the target's types write them. Equal rows cancel out, each as often as it is there, and are not touched.
What is left of the target is surplus, what is left of the staged rows is missing; where both have a row of
one key, that one is updated, all others are deleted and inserted.

    deletes, then updates in place, then inserts    a unique constraint sees the final rows as far as it can
    rows that exchange unique values, or columns    are taken out and put back, as a whole: a column of the
    that UPDATE must not set                        subscriber's own keeps its value
    surplus rows that another feed claims           stay: it may have brought them

`merge_values` only updates rows that both have, and counts the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, LiteralString

from psycopg import errors as pg
from psycopg import sql

from cdc_replay.compare.digest import LONGEST_KEY, from_table, hash_of
from cdc_replay.compare.staging import StagedRows, TablePair, comparing, names, temporary
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.copy import subscriber_write_errors
from cdc_replay.subscriber.apply_connection import pinned_text_formats
from cdc_replay.subscriber.as_owner import TargetSession, act_on
from cdc_replay.subscriber.staged_columns import collate
from cdc_replay.subscriber.target_tables import TargetColumn

_ALWAYS: Final = "a"
"""`pg_attribute.attidentity` of GENERATED ALWAYS AS IDENTITY."""

_PRESENT: Final = """
    {into}
    select relation, place, key_hash, row_hash, claimed,
           row_number() over (partition by key_hash, row_hash order by claimed) as number
    from (
        select t.tableoid as relation, t.ctid as place,
               {key_hash}::uuid as key_hash, {row_hash}::uuid as row_hash, {claimed} as claimed
        from {target} as t
        where {within} or {outside} and not {claimed}
    ) as rows
"""
_PRESENT_COLUMNS: Final = (
    "relation oid, place tid, key_hash uuid, row_hash uuid, claimed boolean, number bigint"
)
"""Unclaimed rows come first where equal rows cancel out, or rows of one key are updated."""

_WANTED: Final = """
    create temporary table {wanted} as
    select place, key_hash, row_hash, false as claimed,
           row_number() over (partition by key_hash, row_hash) as number
    from (
        select s.ctid as place, {key_hash}::uuid as key_hash, {row_hash}::uuid as row_hash from {staged} as s
    ) as rows
"""

_LEFT_OVER: Final = """
    create temporary table {left_over} as
    select one.*, row_number() over (partition by one.key_hash order by one.claimed) as of_key
    from {one} as one
    where not exists (
        select from {other} as other
        where other.key_hash = one.key_hash and other.row_hash = one.row_hash and other.number = one.number
    )
"""

_PAIRS: Final = """
    create temporary table {pairs} as
    select surplus.relation, surplus.place, missing.place as staged
    from {surplus} as surplus join {missing} as missing using (key_hash, of_key)
"""

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

_DELETE: Final = """
    delete from {target} as t using {surplus} as surplus
    where t.tableoid = surplus.relation and t.ctid = surplus.place and {is_deleted}
"""

_UPDATE: Final = """
    update {target} as t set {assignments}
    from {pairs} as p join {staged} as s on s.ctid = p.staged
    where t.tableoid = p.relation and t.ctid = p.place
"""

_TAKE: Final = """
    {into}
    select {values}
    from {target} as t, {pairs} as p join {staged} as s on s.ctid = p.staged
    where t.tableoid = p.relation and t.ctid = p.place
"""

_TAKE_OUT: Final = """
    delete from {target} as t using {pairs} as p where t.tableoid = p.relation and t.ctid = p.place
"""

_PUT_BACK: Final = """
    insert into {table} ({columns}) overriding system value select {columns} from {taken}
"""

_INSERT: Final = """
    insert into {table} {columns} overriding system value
    select {values}
    from {missing} as missing join {staged} as s on s.ctid = missing.place
    where {is_inserted}
"""

_DELETED_ROWS: Final = """
    from {target} as r join {surplus} as surplus on r.tableoid = surplus.relation and r.ctid = surplus.place
    where {is_deleted}
"""

_UPDATED_ROWS: Final = "from {pairs} as p join {staged} as r on r.ctid = p.staged"

_INSERTED_ROWS: Final = """
    from {missing} as missing join {staged} as r on r.ctid = missing.place where {is_inserted}
"""

_FIRST_KEYS: Final = """
    select count(*) over (), {shown} {rows} order by {order} limit {limit}
"""

KEYS_SHOWN: Final = 5
"""Of the rows of a table that would be deleted, updated and inserted."""

_PAIRS_OF_ONE: Final = """
    create temporary table {pairs} as
    select surplus.relation, surplus.place, missing.place as staged
    from {surplus} as surplus join {missing} as missing using (key_hash)
    where not exists (
        select from {surplus} as again where again.key_hash = surplus.key_hash and again.of_key > 1
    ) and not exists (
        select from {missing} as again where again.key_hash = missing.key_hash and again.of_key > 1
    )
"""
"""The rows of a key that either side has more than once cannot be told apart."""

_COUNT_MISSING: Final = """
    select count(*) from {missing} as missing
    where not exists (select from {surplus} as surplus where surplus.key_hash = missing.key_hash)
"""

_COUNT_SURPLUS: Final = """
    select count(*) from {surplus} as surplus
    where not exists (select from {missing} as missing where missing.key_hash = surplus.key_hash)
"""

_COUNT_TAKEN_OUT: Final = """
    select count(*)
    from {surplus} as surplus
    join (select {key_hash}::uuid as key_hash from {unpublished} as s group by 1) as unpublished
        using (key_hash)
    join (select t.tableoid as relation, t.ctid as place from {target} as t where not ({outside})) as inside
        using (relation, place)
    where not exists (select from {missing} as missing where missing.key_hash = surplus.key_hash)
"""
"""A row that is outside by the values that it has here came by another way."""

_TEMPORARY: Final = ("present", "wanted", "surplus", "missing", "pairs", "taken")


@dataclass(frozen=True, slots=True)
class Merged:
    """How many rows of the target were changed."""

    insert: int = 0
    update: int = 0
    delete: int = 0


@dataclass(frozen=True, slots=True)
class Foreseen:
    """How many rows a merge would change in one way, and the keys of the first of them."""

    rows: int = 0
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Preview:
    """What a merge would do to its target."""

    insert: Foreseen = Foreseen()
    update: Foreseen = Foreseen()
    delete: Foreseen = Foreseen()


def merge(connection: Connection, session: TargetSession, staged: StagedRows) -> Merged:
    """Make the target hold the staged rows in their buckets; it is locked against other writers.

    Raises:
        ApplyConflict: if a constraint of the target does not allow a row.
        MissingPrivilege, SubscriberNotReady, ServerUnavailable: as `subscriber_write_errors`.
    """
    if staged.table is None:
        return Merged()
    with (
        subscriber_write_errors(staged.pair.name),
        _merging(connection, session, staged, staged.table) as merging,
    ):
        return merging.run()


def preview(connection: Connection, staged: StagedRows) -> Preview:
    """What `merge` would do, in a transaction of its own that writes nothing but temporary tables.

    Raises:
        As `comparing`.
    """
    if staged.table is None:
        return Preview()
    target = staged.pair.target
    with (
        comparing(staged.pair.name),
        connection.transaction(force_rollback=True),
        act_on(connection, [target], only_reads=True) as sessions,
        _merging(connection, sessions.session_for(target), staged, staged.table) as merging,
    ):
        return merging.preview()


@dataclass(frozen=True, slots=True)
class MergedValues:
    """What comparing rows by their key has come to.

    `differ` rows are on both sides with other values, and `update` of them have the publisher's now.
    `missing` are rows that are published and not here. Of the rows that are only here, the publisher has
    `taken_out` without publishing them, and `own` not at all.
    """

    update: int = 0
    differ: int = 0
    missing: int = 0
    taken_out: int = 0
    own: int = 0

    @property
    def may_have_other_keys(self) -> bool:
        """Whether the key itself may have been rewritten, so that one key need not be one row."""
        return bool(self.missing and self.own)


def merge_values(
    connection: Connection,
    session: TargetSession,
    staged: StagedRows,
    unpublished: sql.Identifier | None,
    *,
    moves: bool,
) -> MergedValues:
    """Give rows that both sides have the staged values, if it `moves` any; no row comes or goes.

    `unpublished` has the keys of the publisher's rows in the same buckets that are not published.

    Raises:
        ApplyConflict, MissingPrivilege, SubscriberNotReady, ServerUnavailable: as `merge`.
    """
    if staged.table is None or not staged.buckets.numbers:
        return MergedValues()
    with (
        subscriber_write_errors(staged.pair.name),
        _merging(connection, session, staged, staged.table) as merging,
    ):
        return merging.run_values(unpublished, moves=moves)


@contextlib.contextmanager
def _merging(
    connection: Connection, session: TargetSession, staged: StagedRows, table: sql.Identifier
) -> Iterator[_Merge]:
    if not session.runs_as_owner:
        yield _Merge(connection, session, staged, table, table)
        return
    view = staged.create_view(connection, table)
    session.share(view)
    yield _Merge(connection, session, staged, table, view)
    connection.execute(sql.SQL("drop view {}").format(view))


@dataclass(frozen=True, slots=True)
class _Merge:
    connection: Connection
    session: TargetSession
    staged: StagedRows
    table: sql.Identifier
    typed: sql.Identifier
    """What is staged, as values of the target's types."""

    @property
    def pair(self) -> TablePair:
        return self.staged.pair

    def run(self) -> Merged:
        with pinned_text_formats(self.connection):
            self._compare(self.pair.outside or sql.SQL("false"), _PAIRS)
        deleted = self._run(_DELETE, is_deleted=self._filled(_IS_DELETED))
        updated = self._update()
        inserted = self._insert()
        self._drop()
        return Merged(inserted, updated, deleted)

    def preview(self) -> Preview:
        with pinned_text_formats(self.connection):
            self._compare(self.pair.outside or sql.SQL("false"), _PAIRS)
            return Preview(*(self._foreseen(rows) for rows in (_INSERTED_ROWS, _UPDATED_ROWS, _DELETED_ROWS)))

    def _foreseen(self, rows: LiteralString) -> Foreseen:
        key = self.pair.key
        of_key = [sql.Identifier("r", name) for name in key]
        texts = sql.SQL(", ").join(sql.SQL("format('%s', {})").format(each) for each in of_key)
        whole = sql.SQL("left(row({})::text, {})").format(
            names(self.pair.columns, "r"), sql.Literal(LONGEST_KEY)
        )
        is_ordered = key and all(self.pair.target.column(name).less for name in key)
        found = self._query(
            _FIRST_KEYS,
            shown=texts if key else whole,
            rows=self._filled(
                rows, is_deleted=self._filled(_IS_DELETED), is_inserted=self._filled(_IS_INSERTED)
            ),
            order=sql.SQL(", ").join(of_key) if is_ordered else texts if key else whole,
            limit=sql.Literal(KEYS_SHOWN),
        )
        return Foreseen(
            found[0][0] if found else 0,
            tuple(f"({', '.join(key)})=({', '.join(shown)})" if key else shown[0] for _, *shown in found),
        )

    def run_values(self, unpublished: sql.Identifier | None, *, moves: bool) -> MergedValues:
        """Update the rows that both sides have, if it `moves` any, and count those of one side."""
        with pinned_text_formats(self.connection):
            self._compare(sql.SQL("false"), _PAIRS_OF_ONE)
            surplus = self._count(_COUNT_SURPLUS)
            taken_out = 0 if unpublished is None else self._taken_out(unpublished)
        found = MergedValues(
            differ=self._count("select count(*) from {pairs}"),
            missing=self._count(_COUNT_MISSING),
            taken_out=taken_out,
            own=surplus - taken_out,
        )
        if moves and found.differ and not found.may_have_other_keys:
            found = dataclasses.replace(found, update=self._update())
        self._drop()
        return found

    def _taken_out(self, unpublished: sql.Identifier) -> int:
        key = hash_of(names(self.pair.hashed_key, "s"))
        self.session.share(unpublished)
        outside = self.pair.outside or sql.SQL("false")
        return self._count(_COUNT_TAKEN_OUT, key_hash=key, unpublished=unpublished, outside=outside)

    def _drop(self) -> None:
        dropped = sql.SQL(", ").join(map(temporary, _TEMPORARY))
        self.connection.execute(sql.SQL("drop table if exists {}").format(dropped))

    def _compare(self, outside: sql.Composable, pairs: LiteralString) -> None:
        """Fill `surplus`, `missing` and `pairs`; `outside` is true of rows of whatever bucket."""
        pair = self.pair
        key = hash_of(names(pair.hashed_key, "t"))
        columns = hash_of(names(pair.columns, "t"))
        buckets = self.staged.buckets
        within = buckets.condition(key) if buckets.numbers else sql.SQL("false")
        claimed = pair.claimed or sql.SQL("false")
        into = self._into("present", sql.SQL(_PRESENT_COLUMNS))
        hashes = {"key_hash": key, "row_hash": columns}
        self._run(_PRESENT, **hashes, into=into, within=within, outside=outside, claimed=claimed)
        key = hash_of(names(pair.hashed_key, "s"))
        self._make(_WANTED, key_hash=key, row_hash=hash_of(names(pair.columns, "s")))
        self._analyze("present", "wanted")
        self._make(_LEFT_OVER, left_over=temporary("surplus"), one=temporary("present"), other=_WANTED_TABLE)
        self._make(_LEFT_OVER, left_over=temporary("missing"), one=_WANTED_TABLE, other=temporary("present"))
        self._analyze("surplus", "missing")
        self._make(pairs)
        self._analyze("pairs")
        for name in ("surplus", "missing", "pairs"):
            self.session.share(temporary(name))

    def _into(self, name: str, columns: sql.Composable) -> sql.Composed:
        """What puts the rows of a query into a temporary table; statements of an owner cannot make one."""
        table = temporary(name)
        if not self.session.runs_as_owner:
            return sql.SQL("create temporary table {} as").format(table)
        self.connection.execute(sql.SQL("create temporary table {} ({})").format(table, columns))
        self.session.share(table)
        return sql.SQL("insert into {}").format(table)

    def _update(self) -> int:
        settable = [each for each in self._published() if each.name not in self.pair.key]
        if all(each.identity != _ALWAYS for each in settable) and settable:
            assignments = (
                sql.SQL("{} = {}").format(sql.Identifier(each.name), sql.Identifier("s", each.name))
                for each in settable
            )
            try:
                with self.connection.transaction():
                    return self._run(_UPDATE, assignments=sql.SQL(", ").join(assignments))
            except (pg.UniqueViolation, pg.ExclusionViolation):
                pass  # rows may exchange their values: then all must be out at once
        return self._take_out_and_put_back()

    def _take_out_and_put_back(self) -> int:
        columns = [each for each in self.pair.target.columns if not each.is_generated]
        written = [each.name for each in columns]
        published = {each.name for each in self._published()}
        values = (sql.Identifier("s" if name in published else "t", name) for name in written)
        typed = (
            sql.SQL("{} {}{}").format(sql.Identifier(each.name), sql.SQL(each.type_sql), collate(each))
            for each in columns
        )
        into = self._into("taken", sql.SQL(", ").join(typed))
        self._run(_TAKE, into=into, values=sql.SQL(", ").join(values))
        self._run(_TAKE_OUT)
        return self._run(_PUT_BACK, columns=names(written)) if written else 0

    def _insert(self) -> int:
        columns = self.pair.columns
        # A table may have no column at all, and its rows are counted all the same.
        listed = sql.SQL("({})").format(names(columns)) if columns else sql.SQL("")
        is_inserted = self._filled(_IS_INSERTED)
        return self._run(_INSERT, columns=listed, values=names(columns, "s"), is_inserted=is_inserted)

    def _published(self) -> Iterable[TargetColumn]:
        return [self.pair.target.column(name) for name in self.pair.columns]

    def _run(self, statement: LiteralString, **parts: sql.Composable) -> int:
        return self.session.execute(self._filled(statement, **parts, staged=self.typed))

    def _count(self, statement: LiteralString, **parts: sql.Composable) -> int:
        ((count,),) = self._query(statement, **parts)
        return int(count)

    def _query(self, statement: LiteralString, **parts: sql.Composable) -> list[tuple[Any, ...]]:
        return self.session.query(self._filled(statement, **parts, staged=self.typed))

    def _make(self, statement: LiteralString, **parts: sql.Composable) -> None:
        """A temporary table of ours from others of ours."""
        self.connection.execute(self._filled(statement, **parts, staged=self.table))

    def _filled(self, statement: LiteralString, **parts: sql.Composable) -> sql.Composed:
        target = self.pair.target
        tables = {name: temporary(name) for name in _TEMPORARY}
        return sql.SQL(statement).format(
            **tables,
            **{"staged": self.typed, **parts},
            target=from_table(target.name, is_partitioned=target.is_partitioned),
            table=sql.Identifier(target.name.schema, target.name.name),
        )

    def _analyze(self, *tables: str) -> None:
        for table in tables:
            self.connection.execute(sql.SQL("analyze {}").format(temporary(table)))


_WANTED_TABLE: Final = temporary("wanted")
