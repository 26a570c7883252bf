"""The SQL by which staged net changes reach one target; composed here, run by `replay.apply.merge`.

In every statement `s` is a row of the staging table, `t` a row of the target, `m` a row that was taken out
of the target. How `t` is found for `s` is said once, in `match`. A keyed target is joined by its identity,
with the operators of its own index. In one without a key, equal rows are numbered on both sides and each
change takes the row with its number (R8.10), by ctid: only published columns are compared, NULL equals NULL
(R8.8), and a column of the subscriber's own does not hide a row (R8.9). One that is found by the key of the
publisher's leaves is joined as a keyed one, after a look whether a key has two rows (R8.12).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.model.frames import NetKind
from cdc_replay.replay.apply.pair_sql import PairStatements
from cdc_replay.replay.apply.target_sql import ALWAYS, all_of, commas, qualified, temporary_table, texts
from cdc_replay.subscriber.staged_columns import collate
from cdc_replay.subscriber.tables import TargetColumn

MOVED: Final = sql.SQL("s.moved")

STAYING: Final = sql.SQL("s.moved is not true")

# An UPDATE that a backfill makes an INSERT is of a row that was there before (`replay.compact.backfill`).
_AS_BORN: Final = sql.SQL(" order by s.born nulls first")

_DELETE: Final = "delete from {target} as t using {stage} as s{pairs} where {mine} and {match}"

# What staged changes had expected to find, of those in `missing`.
_EXPECTED: Final = """
    (select coalesce(sum(update_missing), 0) from missing),
    array(select key from missing where update_missing > 0 limit {limit}),
    (select coalesce(sum(delete_missing), 0) from missing),
    array(select key from missing where delete_missing > 0 limit {limit})
"""

_REMOVE: Final = """
    with gone as (
        {delete} returning s.ctid as staged
    ),
    missing as (
        select s.update_missing, s.delete_missing, {key} as key
        from {stage} as s left join gone on gone.staged = s.ctid
        where {mine} and gone.staged is null
    )
    select (select count(*) from gone), {expected}
"""

_NOT_FOUND: Final = """
    with missing as (
        select s.update_missing, s.delete_missing, {key} as key
        from {stage} as s where {mine} and (s.update_missing > 0 or s.delete_missing > 0)
    )
    select {expected}
"""

_TAKE: Final = """
    {into}
    select s.ctid as staged, {columns}
    from {target} as t, {stage} as s{pairs} where {mine} and {match}
"""

_UNMATCHED: Final = """
    with missing as (
        select s.update_missing, {key} as key
        from {stage} as s where {mine} and s.update_missing > 0 and {free}
    )
    select coalesce(sum(update_missing), 0), array(select key from missing limit {limit}) from missing
"""

_ORDER: Final = """
    with sampled as materialized (
        select s.* from {stage} as s tablesample system ({percent}) repeatable (0) where {mine}
    ),
    found as (
        select t.ctid as place, lag(t.ctid) over (order by {key}) as before
        from {target} as t, sampled as s where {match}
    )
    select coalesce(avg(case when place > before then 1 else -1 end), 0) from found where before is not null
"""

_NOT_BEFORE: Final = """
    not ({key} operator({less}) (
        select s.b0 from {stage} as s where {mine} order by s.b0 using operator({less}) limit 1
    ))
"""

_STANDING: Final = """
    select count(*) over (), {key} from {target} as t, {rows} where {same} limit {limit}
"""


@dataclass(frozen=True, slots=True)
class Statements(PairStatements):
    """The statements for one target and what is staged for it."""

    @property
    def cannot_update_in_place(self) -> bool:
        """UPDATE could not set a published column (GENERATED ALWAYS AS IDENTITY), or would set none."""
        keys = {column.name for column in self.staged.table.keys} if self.staged.table.is_keyed else set()
        settable = self._settable()
        blocked = [
            column for column in self.published if column.identity == ALWAYS and column.name not in keys
        ]
        return bool(blocked) or not settable

    @property
    def cannot_move_in_place(self) -> bool:
        """UPDATE could not set a column of the key (GENERATED ALWAYS AS IDENTITY)."""
        return any(column.identity == ALWAYS for column in self.staged.table.keys)

    @property
    def can_tell_order(self) -> bool:
        """The target is one heap, and its index has an order."""
        keys = self.staged.table.keys
        is_ordered = self.staged.table.has_own_key and all(column.less is not None for column in keys)
        # What is read through a view cannot be sampled.
        return is_ordered and not self.target.is_partitioned and not self.has_view

    def analyze(self) -> sql.Composed:
        """Without statistics the planner takes a new table for a small one.

        What rows are chosen and joined by is enough, but where all columns are compared.
        """
        stage = self.staged.table
        if not stage.is_keyed:
            return sql.SQL("analyze {}").format(stage.identifier)
        places = (
            *(f"b{number}" for number in range(len(stage.keys))),
            *(f"v{n}" for n in stage.key_positions),
        )
        columns = commas(sql.Identifier(name) for name in ("attempt", "kind", *places))
        return sql.SQL("analyze {} ({})").format(stage.identifier, columns)

    def greatest(self) -> sql.Composed:
        """The greatest key of the target, which has one column; NULL of an empty one."""
        [key] = self.staged.table.keys
        return self._fill("select max({key}) from {target} as t", key=qualified("t", key.name))

    def copy_gone(self) -> sql.Composed:
        """Stage keys of rows that came and went, as rows of CSV: attempt, kind, key."""
        return sql.SQL("copy {} (attempt, kind, b0) from stdin (format csv)").format(
            self.staged.table.identifier
        )

    def order(self, kind: NetKind, rows: int) -> sql.Composed:
        """1 if rows lie in the order of their keys, -1 if in the reverse one, about 0 if in none.

        Of about so many `rows` that staged changes of `kind` find: how many lie behind the one with the next
        smaller key, less those before it, as a share. A table of two runs, such as one of which some rows
        have been updated before, comes to 0.5 at least.
        """
        percent = min(100.0, 100.0 * rows / self.staged.count(kind))
        key = self._as_in_index(f"b{number}" for number in range(len(self.staged.table.keys)))
        return self._fill(_ORDER, percent=sql.Literal(percent), mine=self.mine(kind), key=commas(key))

    def from_first(self, statement: sql.Composed, kind: NetKind) -> sql.Composed:
        """The `statement` that finds rows for staged changes of `kind`, told where the first of them can be.

        What comes before it in the target's index cannot match, but a merge join would read all of that, and
        the rows, to get there.
        """
        column = self.staged.table.keys[0]
        if column.less is None:
            return statement
        first = self._fill(
            _NOT_BEFORE,
            key=qualified("t", column.name),
            less=sql.SQL("{}.{}").format(sql.Identifier(column.less.schema), sql.SQL(column.less.name)),
            mine=self.mine(kind),
        )
        return sql.SQL("{} and {}").format(statement, first)

    def delete(self, kind: NetKind) -> sql.Composed:
        """Delete matched rows."""
        return self._fill(_DELETE, mine=self.mine(kind))

    def delete_passed(self) -> sql.Composed:
        """Delete rows of the target that stand where rows of the window have only passed through."""
        return self._fill(
            "delete from {target} as t using {stage} as s where {passed}", passed=self.same_as_passed
        )

    def remove(self, kind: NetKind, limit: int) -> sql.Composed:
        """Delete matched rows: (deleted, update_missing, keys, delete_missing, keys), `limit` keys each."""
        return self._missing(_REMOVE, kind, limit, delete=self.delete(kind))

    def not_found(self, kind: NetKind, limit: int) -> sql.Composed:
        """(update_missing, keys, delete_missing, keys) of changes whose rows are known not to be there."""
        return self._missing(_NOT_FOUND, kind, limit)

    def take_table(self, taken: sql.Identifier, *, keep_originals: bool) -> sql.Composed:
        """DDL for what `take` fills, where its owner could not make that (`has_view`)."""
        columns = (
            sql.SQL("{} {}{}").format(
                sql.Identifier(f"{letter}{number}"), sql.SQL(column.type_sql), collate(column)
            )
            for letter in ("co" if keep_originals else "c")
            for number, column in enumerate(self._writable())
        )
        return temporary_table(taken, [sql.SQL("staged tid"), *columns])

    def take(self, taken: sql.Identifier, which: sql.SQL, *, keep_originals: bool) -> list[sql.Composed]:
        """Move UPDATEd rows to a temporary table: `c0`… as they will be, `o0`… as they were."""
        columns = [
            sql.SQL("{} as {}").format(self._overlaid(column), sql.Identifier(f"c{number}"))
            for number, column in enumerate(self._writable())
        ]
        if keep_originals:
            columns += [
                sql.SQL("{} as {}").format(qualified("t", column.name), sql.Identifier(f"o{number}"))
                for number, column in enumerate(self._writable())
            ]
        mine = self.mine(NetKind.UPDATE, which=which)
        return [
            self._fill(_TAKE, into=self._into(taken), columns=commas(columns), mine=mine),
            self._fill(_DELETE, mine=mine),
        ]

    def not_taken(self, taken: sql.Identifier, which: sql.SQL, limit: int) -> sql.Composed:
        """(update_missing, keys) of the UPDATEs of `which` whose rows were not there to be taken out."""
        free = sql.SQL("not exists (select from {} as m where m.staged = s.ctid)").format(taken)
        mine = self.mine(NetKind.UPDATE, which=which)
        return self._fill(_UNMATCHED, free=free, mine=mine, key=self._base_key, limit=sql.Literal(limit))

    def put_back(self, taken: sql.Identifier) -> sql.Composed:
        """Insert the rows that were taken out, as they shall be."""
        return self._insert_all(sql.SQL("{} as m").format(taken), "c")

    def return_blocked(self, taken: sql.Identifier) -> sql.Composed:
        """Insert, as they were, the rows taken out whose new key belongs to a row of the target."""
        blocked = sql.SQL("with m as (delete from {} as m where {} returning m.*) ").format(
            taken, self._exists(self.same_as_taken, expected=True)
        )
        return blocked + self._insert_all(sql.SQL("m"), "o")

    def update(self, which: sql.SQL) -> sql.Composed:
        """Overwrite the columns sent in the rows of staged UPDATEs."""
        assignments = [
            sql.SQL("{} = {}").format(
                sql.Identifier(column.name), self._sent(number, column, number in self.staged.unsent)
            )
            for number, column in self._settable()
        ]
        return self._fill(
            "update {target} as t set {assignments} from {stage} as s{pairs} where {mine} and {match}",
            assignments=commas(assignments),
            mine=self.mine(NetKind.UPDATE, which=which),
        )

    def unmatched_updates(self, which: sql.SQL, limit: int) -> sql.Composed:
        """(update_missing, keys) of the UPDATEs of `which` whose rows are not there."""
        # A row that has been updated has another place, but its pair is known still.
        free = sql.SQL("not exists (select from {})").format(self._found)
        mine = self.mine(NetKind.UPDATE, which=which)
        return self._fill(_UNMATCHED, free=free, mine=mine, key=self._base_key, limit=sql.Literal(limit))

    def overwrite_standing(self) -> sql.Composed:
        """Overwrite the columns sent in rows that stand where staged INSERTs want to be."""
        assignments = [
            sql.SQL("{} = {}").format(sql.Identifier(column.name), self._sent(number, column, True))
            for number, column in self._settable()
        ]
        return self._fill(
            "update {target} as t set {assignments} from {stage} as s where {mine} and {same}",
            assignments=commas(assignments),
            mine=self.mine(NetKind.INSERT),
            same=self.same_as_inserted,
        )

    def insert(self, omitted: str, *, only_free: bool) -> sql.Composed:
        """Insert staged INSERTs that leave the columns `omitted` (a pattern) to their defaults.

        Where the target shows it they go in in the order of the log, as in a native worker (R8.2, R8.13), but
        only among those of one pattern: each pattern has a statement of its own. Elsewhere they go in in the
        order of the target's index: tasks stage them in the order of hashes, in which each row would be put
        at another place of it, twice as slow.
        """
        columns = [
            (number, column)
            for number, column in enumerate(self.published)
            if omitted[number : number + 1] != "-"
        ]
        conditions = [self.mine(NetKind.INSERT)]
        if len(self.staged.omitted) > 1:
            pattern = sql.Literal(omitted)
            sent = sql.Literal(" " * len(self.published))
            translated = sql.SQL("coalesce(translate(s.kinds, 'ntu', '   '), {}) = {}")
            conditions.append(translated.format(sent, pattern))
        if only_free:
            conditions.append(self._exists(self.same_as_inserted, expected=False))
        statement = sql.SQL(
            "insert into {table}{names} overriding system value"
            " select {values} from {stage} as s where {where}{ordered}"
        )
        names = commas(sql.Identifier(column.name) for _, column in columns)
        return statement.format(
            table=self.name,
            # A table may have no column at all, and its rows are counted all the same.
            names=sql.SQL(" ({})").format(names) if columns else sql.SQL(""),
            values=commas(qualified("s", f"v{number}") for number, _ in columns),
            stage=self.stage,
            where=all_of(conditions),
            ordered=_AS_BORN if self.staged.table.inserts_in_log_order else self._ordered_by_key(),
        )

    def unsure(self, limit: int) -> sql.Composed:
        """(update_missing, keys) of staged INSERTs whose row is not there."""
        free = self._exists(self.same_as_inserted, expected=False)
        mine = self.mine(NetKind.INSERT)
        key = texts(f"v{number}" for number in self.staged.table.key_positions)
        return self._fill(_UNMATCHED, free=free, mine=mine, key=key, limit=sql.Literal(limit))

    def standing(self, rows: sql.Composable, same: sql.Composable, limit: int) -> sql.Composed:
        """(number of all, key…) of rows of the target that stand in the way of `rows`, some of them."""
        key = commas(
            sql.SQL("{}::text").format(qualified("t", column.name)) for column in self.staged.table.keys
        )
        return self._fill(_STANDING, key=key, rows=rows, same=same, limit=sql.Literal(limit))

    def delete_standing(self, taken: sql.Identifier) -> sql.Composed:
        """Delete rows of the target that stand where rows taken out go."""
        return self._fill(
            "delete from {target} as t using {taken} as m where {same}", taken=taken, same=self.same_as_taken
        )

    @property
    def same_as_passed(self) -> sql.Composed:
        """`t` has a key that `s` has passed through, and is no row that the window updates itself.

        That one may have passed through a key that is equal to its own but written in another way.
        """
        others = self._fill(
            "not exists (select from {stage} as s where {updated} and {match})",
            updated=self.mine(NetKind.UPDATE),
        )
        return all_of([self.mine(NetKind.PASSED), self.match, others])

    @property
    def same_as_taken(self) -> sql.Composed:
        """`t` has the key that `m` moves to."""
        numbers = {column.name: number for number, column in enumerate(self._writable())}
        return self._same_key(qualified("m", f"c{numbers[column.name]}") for column in self.staged.table.keys)

    def _ordered_by_key(self) -> sql.Composable:
        """ORDER BY of staged INSERTs, as the target's index has them; nothing where no index is known."""
        by = self._as_in_index(f"v{number}" for number in self.staged.table.key_positions)
        return sql.SQL(" order by {}").format(commas(by)) if by else sql.SQL("")

    def _missing(self, template: str, kind: NetKind, limit: int, **parts: sql.Composable) -> sql.Composed:
        expected = sql.SQL(_EXPECTED).format(limit=sql.Literal(limit))
        return self._fill(template, mine=self.mine(kind), key=self._base_key, expected=expected, **parts)

    def _insert_all(self, rows: sql.Composable, letter: str) -> sql.Composed:
        columns = self._writable()
        statement = sql.SQL("insert into {} ({}) overriding system value select {} from {}")
        names = commas(sql.Identifier(column.name) for column in columns)
        values = commas(qualified("m", f"{letter}{number}") for number in range(len(columns)))
        return statement.format(self.name, names, values, rows)

    def _overlaid(self, column: TargetColumn) -> sql.Composed:
        """The column of a taken row, of the column's own type (a domain's value may be NULL in staging)."""
        for number, published in enumerate(self.published):
            if published.name == column.name:
                sent = self._sent(number, column, number in self.staged.unsent)
                return sql.SQL("({})::{}").format(sent, sql.SQL(column.type_sql))
        return sql.SQL("{}").format(qualified("t", column.name))
