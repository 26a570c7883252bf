"""Make the target's rows of some buckets the staged ones, in the caller's transaction.

Rows are compared one by one: the staged rows with those that the target holds under the lock, both as the
target's types print them. Equal rows cancel out, each as often as it occurs, and are not touched. Remaining
rows of the target are surplus, remaining staged rows are missing. A surplus and a missing row of one key
become an update, all others are deleted and inserted.

    deletes, then updates in place, then inserts    a unique constraint sees the final rows as far as possible
    rows that exchange unique values, or columns    are deleted and inserted again with all columns: the
    that UPDATE must not set                        subscriber's own columns keep their values
    surplus rows claimed by another feed            stay: it may have inserted them

`merge_values` only updates rows of both sides, and counts the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, LiteralString

from psycopg import errors as pg
from psycopg import sql

from cdc_replay.compare.digest import LONGEST_KEY, from_clause, hash_of
from cdc_replay.compare.staging import StagedRows, TablePair, comparison_errors, names, temporary
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

_PAIRS: Final = """
    create temporary table {pairs} as
    select surplus.relation, surplus.row_id, missing.row_id as staged_row_id
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
    delete from {target} as target using {surplus} as surplus
    where target.tableoid = surplus.relation and target.ctid = surplus.row_id and {is_deleted}
"""

_UPDATE: Final = """
    update {target} as target set {assignments}
    from {pairs} as pairs join {staged} as staged on staged.ctid = pairs.staged_row_id
    where target.tableoid = pairs.relation and target.ctid = pairs.row_id
"""

_SELECT_DETACHED: Final = """
    {into}
    select {values}
    from {target} as target, {pairs} as pairs join {staged} as staged on staged.ctid = pairs.staged_row_id
    where target.tableoid = pairs.relation and target.ctid = pairs.row_id
"""

_DETACH: Final = """
    delete from {target} as target using {pairs} as pairs
    where target.tableoid = pairs.relation and target.ctid = pairs.row_id
"""

_REINSERT: Final = """
    insert into {table} ({columns}) overriding system value select {columns} from {detached}
"""

_INSERT: Final = """
    insert into {table} {columns} overriding system value
    select {values}
    from {missing} as missing join {staged} as staged on staged.ctid = missing.row_id
    where {is_inserted}
"""

_DELETED_ROWS: Final = """
    from {target} as rows join {surplus} as surplus
        on rows.tableoid = surplus.relation and rows.ctid = surplus.row_id
    where {is_deleted}
"""

_UPDATED_ROWS: Final = "from {pairs} as pairs join {staged} as rows on rows.ctid = pairs.staged_row_id"

_INSERTED_ROWS: Final = """
    from {missing} as missing join {staged} as rows on rows.ctid = missing.row_id where {is_inserted}
"""

_FIRST_KEYS: Final = """
    select count(*) over (), {shown} {rows} order by {order} limit {limit}
"""

KEYS_SHOWN: Final = 5
"""First keys of a table's rows that would be deleted, updated and inserted."""

_PAIRS_OF_UNIQUE_KEYS: Final = """
    create temporary table {pairs} as
    select surplus.relation, surplus.row_id, missing.row_id as staged_row_id
    from {surplus} as surplus join {missing} as missing using (key_hash)
    where not exists (
        select from {surplus} as duplicate where duplicate.key_hash = surplus.key_hash and duplicate.of_key >
        1
    ) and not exists (
        select from {missing} as duplicate where duplicate.key_hash = missing.key_hash and duplicate.of_key >
        1
    )
"""
"""Rows of a key that occurs more than once on a side cannot be paired."""

_COUNT_MISSING: Final = """
    select count(*) from {missing} as missing
    where not exists (select from {surplus} as surplus where surplus.key_hash = missing.key_hash)
"""

_COUNT_SURPLUS: Final = """
    select count(*) from {surplus} as surplus
    where not exists (select from {missing} as missing where missing.key_hash = surplus.key_hash)
"""

_COUNT_UNPUBLISHED: Final = """
    select count(*)
    from {surplus} as surplus
    join (select {key_hash}::uuid as key_hash from {unpublished} as staged group by 1) as unpublished
        using (key_hash)
    join (
        select target.tableoid as relation, target.ctid as row_id from {target} as target
        where not ({outside})
    ) as inside using (relation, row_id)
    where not exists (select from {missing} as missing where missing.key_hash = surplus.key_hash)
"""
"""A row that is outside the filter by its values here was not replicated by this subscription."""

_TEMPORARY: Final = ("present", "expected", "surplus", "missing", "pairs", "detached")


@dataclass(frozen=True, slots=True)
class Merged:
    """Numbers of changed rows of the target."""

    insert: int = 0
    update: int = 0
    delete: int = 0


@dataclass(frozen=True, slots=True)
class PreviewedRows:
    """The number of rows that a merge would change in one way, and the first keys."""

    rows: int = 0
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Preview:
    """Rows that a merge would change."""

    insert: PreviewedRows = PreviewedRows()
    update: PreviewedRows = PreviewedRows()
    delete: PreviewedRows = PreviewedRows()


def merge(connection: Connection, session: TargetSession, staged: StagedRows) -> Merged:
    """Make the target's rows of the buckets equal the staged ones; the caller has locked out other writers.

    Raises:
        ApplyConflict: if a constraint of the target does not allow a row.
        MissingPrivilege, SubscriberNotReady, ServerUnavailable: as `subscriber_write_errors`.
    """
    if staged.table is None:
        return Merged()
    with (
        subscriber_write_errors(staged.pair.name),
        _open_merge(connection, session, staged, staged.table) as open_merge,
    ):
        return open_merge.run()


def preview(connection: Connection, staged: StagedRows) -> Preview:
    """What `merge` would change; writes only temporary tables, in a separate transaction.

    Raises:
        As `comparison_errors`.
    """
    if staged.table is None:
        return Preview()
    target = staged.pair.target
    with (
        comparison_errors(staged.pair.name),
        connection.transaction(force_rollback=True),
        act_on(connection, [target], only_reads=True) as sessions,
        _open_merge(connection, sessions.session_for(target), staged, staged.table) as open_merge,
    ):
        return open_merge.preview()


@dataclass(frozen=True, slots=True)
class MergedValues:
    """Rows compared by key.

    `different` rows are on both sides with different values; `update` of them got the publisher's. `missing`
    rows are published, but not on the subscriber. `unpublished_rows` are on both sides, but not published.
    `subscriber_only` rows are not on the publisher.
    """

    update: int = 0
    different: int = 0
    missing: int = 0
    unpublished_rows: int = 0
    subscriber_only: int = 0

    @property
    def may_have_other_keys(self) -> bool:
        """Whether the rewrite may have changed keys: then equal keys need not mean the same row."""
        return bool(self.missing and self.subscriber_only)


def merge_values(
    connection: Connection,
    session: TargetSession,
    staged: StagedRows,
    unpublished: sql.Identifier | None,
    *,
    update_rows: bool,
) -> MergedValues:
    """Update rows of both sides to the staged values, if `update_rows`; insert and delete none.

    `unpublished` has the keys of the publisher's unpublished rows in the same buckets.

    Raises:
        ApplyConflict, MissingPrivilege, SubscriberNotReady, ServerUnavailable: as `merge`.
    """
    if staged.table is None or not staged.buckets.ids:
        return MergedValues()
    with (
        subscriber_write_errors(staged.pair.name),
        _open_merge(connection, session, staged, staged.table) as open_merge,
    ):
        return open_merge.run_values(unpublished, update_rows=update_rows)


@contextlib.contextmanager
def _open_merge(
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
    """The staged rows with the target's types."""

    @property
    def pair(self) -> TablePair:
        return self.staged.pair

    def run(self) -> Merged:
        with pinned_text_formats(self.connection):
            self._compare(self.pair.outside or sql.SQL("false"), _PAIRS)
        deleted = self._run(_DELETE, is_deleted=self._format(_IS_DELETED))
        updated = self._update()
        inserted = self._insert()
        self._drop()
        return Merged(inserted, updated, deleted)

    def preview(self) -> Preview:
        with pinned_text_formats(self.connection):
            self._compare(self.pair.outside or sql.SQL("false"), _PAIRS)
            return Preview(
                *(self._preview_rows(rows) for rows in (_INSERTED_ROWS, _UPDATED_ROWS, _DELETED_ROWS))
            )

    def _preview_rows(self, rows: LiteralString) -> PreviewedRows:
        key = self.pair.key
        of_key = [sql.Identifier("rows", name) for name in key]
        texts = sql.SQL(", ").join(sql.SQL("format('%s', {})").format(column) for column in of_key)
        whole = sql.SQL("left(row({})::text, {})").format(
            names(self.pair.columns, "rows"), sql.Literal(LONGEST_KEY)
        )
        is_ordered = key and all(self.pair.target.column(name).less for name in key)
        rows_found = self._query(
            _FIRST_KEYS,
            shown=texts if key else whole,
            rows=self._format(
                rows, is_deleted=self._format(_IS_DELETED), is_inserted=self._format(_IS_INSERTED)
            ),
            order=sql.SQL(", ").join(of_key) if is_ordered else texts if key else whole,
            limit=sql.Literal(KEYS_SHOWN),
        )
        return PreviewedRows(
            rows_found[0][0] if rows_found else 0,
            tuple(
                f"({', '.join(key)})=({', '.join(shown)})" if key else shown[0] for _, *shown in rows_found
            ),
        )

    def run_values(self, unpublished: sql.Identifier | None, *, update_rows: bool) -> MergedValues:
        """Update rows of both sides, if `update_rows`, and count those of one side."""
        with pinned_text_formats(self.connection):
            self._compare(sql.SQL("false"), _PAIRS_OF_UNIQUE_KEYS)
            surplus = self._count(_COUNT_SURPLUS)
            unpublished_rows = 0 if unpublished is None else self._count_unpublished(unpublished)
        merged = MergedValues(
            different=self._count("select count(*) from {pairs}"),
            missing=self._count(_COUNT_MISSING),
            unpublished_rows=unpublished_rows,
            subscriber_only=surplus - unpublished_rows,
        )
        if update_rows and merged.different and not merged.may_have_other_keys:
            merged = dataclasses.replace(merged, update=self._update())
        self._drop()
        return merged

    def _count_unpublished(self, unpublished: sql.Identifier) -> int:
        key = hash_of(names(self.pair.hashed_key, "staged"))
        self.session.share(unpublished)
        outside = self.pair.outside or sql.SQL("false")
        return self._count(_COUNT_UNPUBLISHED, key_hash=key, unpublished=unpublished, outside=outside)

    def _drop(self) -> None:
        dropped = sql.SQL(", ").join(map(temporary, _TEMPORARY))
        self.connection.execute(sql.SQL("drop table if exists {}").format(dropped))

    def _compare(self, outside: sql.Composable, pairs: LiteralString) -> None:
        """Fill `surplus`, `missing` and `pairs`; rows `outside` the filter count in every bucket."""
        pair = self.pair
        key = hash_of(names(pair.hashed_key, "target"))
        columns = hash_of(names(pair.columns, "target"))
        buckets = self.staged.buckets
        within = buckets.condition(key) if buckets.ids else sql.SQL("false")
        claimed = pair.claimed or sql.SQL("false")
        into = self._into("present", sql.SQL(_PRESENT_COLUMNS))
        hashes = {"key_hash": key, "row_hash": columns}
        self._run(_PRESENT, **hashes, into=into, within=within, outside=outside, claimed=claimed)
        key = hash_of(names(pair.hashed_key, "staged"))
        self._create(_EXPECTED, key_hash=key, row_hash=hash_of(names(pair.columns, "staged")))
        self._analyze("present", "expected")
        expected = temporary("expected")
        self._create(_UNMATCHED, unmatched=temporary("surplus"), side=temporary("present"), opposite=expected)
        self._create(_UNMATCHED, unmatched=temporary("missing"), side=expected, opposite=temporary("present"))
        self._analyze("surplus", "missing")
        self._create(pairs)
        self._analyze("pairs")
        for name in ("surplus", "missing", "pairs"):
            self.session.share(temporary(name))

    def _into(self, name: str, columns: sql.Composable) -> sql.Composed:
        """The start of a statement that fills a temporary table, which the table's owner cannot create."""
        table = temporary(name)
        if not self.session.runs_as_owner:
            return sql.SQL("create temporary table {} as").format(table)
        self.connection.execute(sql.SQL("create temporary table {} ({})").format(table, columns))
        self.session.share(table)
        return sql.SQL("insert into {}").format(table)

    def _update(self) -> int:
        settable = [column for column in self._published() if column.name not in self.pair.key]
        if all(column.identity != _ALWAYS for column in settable) and settable:
            assignments = (
                sql.SQL("{} = {}").format(sql.Identifier(column.name), sql.Identifier("staged", column.name))
                for column in settable
            )
            try:
                with self.connection.transaction():
                    return self._run(_UPDATE, assignments=sql.SQL(", ").join(assignments))
            except (pg.UniqueViolation, pg.ExclusionViolation):
                pass  # rows may exchange unique values: delete all of them first
        return self._detach_and_reinsert()

    def _detach_and_reinsert(self) -> int:
        columns = [column for column in self.pair.target.columns if not column.is_generated]
        written = [column.name for column in columns]
        published = {column.name for column in self._published()}
        values = (sql.Identifier("staged" if name in published else "target", name) for name in written)
        typed = (
            sql.SQL("{} {}{}").format(sql.Identifier(column.name), sql.SQL(column.type_sql), collate(column))
            for column in columns
        )
        into = self._into("detached", sql.SQL(", ").join(typed))
        self._run(_SELECT_DETACHED, into=into, values=sql.SQL(", ").join(values))
        self._run(_DETACH)
        return self._run(_REINSERT, columns=names(written)) if written else 0

    def _insert(self) -> int:
        columns = self.pair.columns
        # A table may have rows without columns.
        listed = sql.SQL("({})").format(names(columns)) if columns else sql.SQL("")
        is_inserted = self._format(_IS_INSERTED)
        return self._run(_INSERT, columns=listed, values=names(columns, "staged"), is_inserted=is_inserted)

    def _published(self) -> Iterable[TargetColumn]:
        return [self.pair.target.column(name) for name in self.pair.columns]

    def _run(self, statement: LiteralString, **parts: sql.Composable) -> int:
        return self.session.execute(self._format(statement, **parts, staged=self.typed))

    def _count(self, statement: LiteralString, **parts: sql.Composable) -> int:
        ((count,),) = self._query(statement, **parts)
        return int(count)

    def _query(self, statement: LiteralString, **parts: sql.Composable) -> list[tuple[Any, ...]]:
        return self.session.query(self._format(statement, **parts, staged=self.typed))

    def _create(self, statement: LiteralString, **parts: sql.Composable) -> None:
        self.connection.execute(self._format(statement, **parts, staged=self.table))

    def _format(self, statement: LiteralString, **parts: sql.Composable) -> sql.Composed:
        target = self.pair.target
        tables = {name: temporary(name) for name in _TEMPORARY}
        return sql.SQL(statement).format(
            **tables,
            **{"staged": self.typed, **parts},
            target=from_clause(target.name, is_partitioned=target.is_partitioned),
            table=sql.Identifier(target.name.schema, target.name.name),
        )

    def _analyze(self, *tables: str) -> None:
        for table in tables:
            self.connection.execute(sql.SQL("analyze {}").format(temporary(table)))
