"""The SQL by which staged net changes reach one target; composed here, run by `replay.apply.merge`.

In every statement `s` is a row of the staging table, `t` a row of the target, `m` a row that was taken out
of the target. How `t` is found for `s` is said once, in `match`. A keyed target is joined by its identity,
with the operators of its own index. In one without a key, equal rows are numbered on both sides and each
change takes the row with its number (R8.10), by ctid: only published columns are compared, NULL equals NULL
(R8.8), and a column of the subscriber's own does not hide a row (R8.9). One that is found by the key of the
publisher's leaves is joined as a keyed one, after a look whether a key has two rows (R8.12).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, LiteralString

from psycopg import sql

from cdc_replay.model.frames import NetKind
from cdc_replay.replay.apply.staging import StagedTable
from cdc_replay.subscriber.staged_columns import collate
from cdc_replay.subscriber.target_tables import Leaf, Operator, TargetColumn, TargetTable

_EQUALS: Final = Operator("pg_catalog", "=")
_ALWAYS: Final = "a"
"""`pg_attribute.attidentity` of GENERATED ALWAYS AS IDENTITY."""

MOVED: Final = sql.SQL("s.moved")
STAYING: Final = sql.SQL("s.moved is not true")
ANY: Final = sql.SQL("true")

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

_PAIR_COLUMNS: Final = "staged tid, relation oid, place tid"

# `leaf` is the one that the row belongs to, if that has a key.
_PAIR: Final = """
    {into}
    with wanted as materialized (
        select {columns} from {stage} as s where {mine}
    )
    select * from ({pairs_of}) as pairs
"""

_SAME_KEYS: Final = """
    with wanted as materialized (
        select {columns} from {stage} as s where {mine}
    )
    select number, leaf, dense_rank() over (order by {key}) from wanted where leaf = any ({oids}::oid[])
"""

# Equal rows are numbered on both sides. Comparing whole records uses each type's own equality.
_PAIRS_BY_ROW: Final = """
    (
        with numbered as materialized (
            select staged, row({columns}) as content,
                row_number() over (partition by row({columns})) as number
            from wanted
            where leaf is null
        ),
        present as (
            select t.relation, t.place, t.content, row_number() over (partition by t.content) as number
            from (
                select t.tableoid as relation, t.ctid as place, row({target_row}) as content
                from {target} as t
                -- What has no equality is compared only if it must be.
                where {elsewhere} and (select count(*) from numbered) > 0
            ) as t
            where exists (select from numbered where numbered.content operator(pg_catalog.=) t.content)
        )
        select numbered.staged, present.relation, present.place
        from numbered
        join present on present.content operator(pg_catalog.=) numbered.content
            and present.number = numbered.number
    )
"""

_PAIRS_BY_LEAF_KEY: Final = """
    (
        select {once} wanted.staged, t.tableoid as relation, t.ctid as place
        from wanted join {target} as t on t.tableoid operator(pg_catalog.=) wanted.leaf and {same}
        where wanted.leaf = any ({oids}::oid[])
        {in_order}
    )
"""

_LACKS: Final = """
    select exists (
        select from {stage} as s
        where {mine} and not exists (select from {found})
    )
"""

_FOUND: Final = "select s.update_missing from {stage} as s, {found} and {mine}"

_AMBIGUOUS: Final = """
    select count(*) over (), {columns} from {target} as t, {stage} as s where {mine} and {match}
    group by s.ctid, {columns} having count(*) > 1 limit {limit}
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
class Statements:
    """The statements for one target and what is staged for it."""

    target: TargetTable
    staged: StagedTable
    has_view: bool = False
    """Statements read what is staged through its view."""

    # --- what is written how

    @property
    def published(self) -> tuple[TargetColumn, ...]:
        """The target's columns that values are staged for, in staging order."""
        return self.staged.table.values

    @property
    def cannot_update_in_place(self) -> bool:
        """UPDATE could not set a published column (GENERATED ALWAYS AS IDENTITY), or would set none."""
        keys = {column.name for column in self.staged.table.keys} if self.staged.table.is_keyed else set()
        settable = self._settable()
        blocked = [
            column for column in self.published if column.identity == _ALWAYS and column.name not in keys
        ]
        return bool(blocked) or not settable

    @property
    def cannot_move_in_place(self) -> bool:
        """UPDATE could not set a column of the key (GENERATED ALWAYS AS IDENTITY)."""
        return any(column.identity == _ALWAYS for column in self.staged.table.keys)

    @property
    def can_tell_order(self) -> bool:
        """The target is one heap, and its index has an order."""
        keys = self.staged.table.keys
        is_ordered = self.staged.table.has_own_key and all(column.less is not None for column in keys)
        # What is read through a view cannot be sampled.
        return is_ordered and not self.target.is_partitioned and not self.has_view

    @property
    def stage(self) -> sql.Identifier:
        """What statements on the target read as staged."""
        return self.staged.table.view if self.has_view else self.staged.table.identifier

    # --- statements

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
        columns = _commas(sql.Identifier(name) for name in ("attempt", "kind", *places))
        return sql.SQL("analyze {} ({})").format(stage.identifier, columns)

    def greatest(self) -> sql.Composed:
        """The greatest key of the target, which has one column; NULL of an empty one."""
        [key] = self.staged.table.keys
        return self._fill("select max({key}) from {target} as t", key=_column("t", key.name))

    def copy_gone(self) -> sql.Composed:
        """Stage keys of rows that came and went, as rows of CSV: attempt, kind, key."""
        return sql.SQL("copy {} (attempt, kind, b0) from stdin (format csv)").format(
            self.staged.table.identifier
        )

    def copy_probes(self) -> sql.Composed:
        """Stage keys of which rows are looked for, as rows of CSV: attempt, kind, number, key."""
        names = ("attempt", "kind", "update_missing", *self._base_names)
        return sql.SQL("copy {} ({}) from stdin (format csv)").format(
            self.staged.table.identifier, _commas(sql.Identifier(name) for name in names)
        )

    def pair_table(self) -> sql.Composed:
        """DDL for what `pair` fills, where its owner could not make that (`has_view`)."""
        return _temporary_table(self.pair_name, [sql.SQL(_PAIR_COLUMNS)])

    def pair(self, *, shared: bool = False) -> list[sql.Composed]:
        """For a target without a key: lock it and pair staged UPDATEs and DELETEs with rows.

        A row that is found by its leaf's key is paired with all that want it if `shared`, else with one.
        Rows are then found by their place, which a concurrent writer could change: hence the lock.
        """
        lock = sql.SQL("lock table {} in share row exclusive mode").format(self.name)
        keyed = self._leaves_with_key
        pairs = [self._pairs_by_leaf_key(leaves, shared=shared) for leaves in _alike(keyed)]
        if len(keyed) < len(self.target.leaves.leaves) or not keyed:
            pairs.append(self._pairs_by_row(keyed))
        pairing = self._fill(
            _PAIR,
            into=self._into(self.pair_name),
            columns=self._wanted("s.ctid as staged", keyed),
            mine=self.mine(NetKind.UPDATE, NetKind.DELETE),
            pairs_of=sql.SQL(" union all ").join(pairs),
        )
        return [lock, pairing]

    def analyze_pairs(self) -> sql.Composed:
        """Statistics of what `pair` has found."""
        return sql.SQL("analyze {}").format(self.pair_name)

    def same_keys(self) -> list[sql.Composed]:
        """(`update_missing`, leaf, number) of staged DELETEs: with one number in a leaf they have one key."""
        keyed, names = self._leaves_with_key, self._names_of_base
        return [
            self._fill(
                _SAME_KEYS,
                columns=self._wanted("s.update_missing as number", keyed),
                mine=self.mine(NetKind.DELETE),
                key=_commas(
                    _column("wanted", name) for name in ("leaf", *(names[each] for each in leaves[0].key))
                ),
                oids=sql.Literal([leaf.oid for leaf in leaves]),
            )
            for leaves in _alike(keyed)
        ]

    @property
    def _names_of_base(self) -> dict[str, str]:
        """What staging calls the columns of the base key."""
        columns = self.staged.table.keys
        return {column.name: name for column, name in zip(columns, self._base_names, strict=True)}

    @property
    def _base_names(self) -> list[str]:
        return [f"b{number}" for number in range(len(self.staged.table.keys))]

    @property
    def _leaves_with_key(self) -> list[Leaf]:
        table = self.staged.table
        return self.target.leaves.with_key(column.name for column in table.keys) if table.is_by_leaf else []

    def _wanted(self, first: LiteralString, leaves: Sequence[Leaf]) -> sql.Composed:
        """What has to be known of `s` to find its row: what is `first`, its base key, and its leaf."""
        base = [_column("s", name) for name in self._base_names]
        return _commas([sql.SQL(first), *base, sql.SQL("{} as leaf").format(self._leaf_of_base(leaves))])

    def _leaf_of_base(self, leaves: Sequence[Leaf]) -> sql.Composable:
        """Which of `leaves` the row that `s` has as its base belongs to; NULL: none."""
        if not leaves:
            return sql.SQL("null::oid")
        named = _commas(
            sql.SQL("{} as {}").format(_column("s", name), sql.Identifier(column.name))
            for name, column in zip(self._base_names, self.staged.table.keys, strict=True)
        )
        cases = sql.SQL(" ").join(
            # The server has made the text of the constraint, for this session's search path.
            sql.SQL("when {} then {}::oid").format(sql.SQL(leaf.constraint_sql), leaf.oid)
            for leaf in leaves
        )
        return sql.SQL("(select case {} end from (select {}) as base)").format(cases, named)

    def _pairs_by_leaf_key(self, leaves: Sequence[Leaf], *, shared: bool) -> sql.Composed:
        """Of leaves that have keys of the same columns; by the table, as the role may read that alone."""
        names = self._names_of_base
        return self._fill(
            _PAIRS_BY_LEAF_KEY,
            oids=sql.Literal([leaf.oid for leaf in leaves]),
            same=_and(
                _equal(equality, _column("t", column), _column("wanted", names[column]))
                for column, equality in leaves[0].key.items()
            ),
            once=sql.SQL("" if shared else "distinct on (t.tableoid, t.ctid)"),
            in_order=sql.SQL("" if shared else "order by t.tableoid, t.ctid, wanted.staged"),
        )

    def _pairs_by_row(self, leaves_with_key: Sequence[Leaf]) -> sql.Composed:
        target_row = [
            sql.SQL("{}::{}").format(_column("t", column.name), sql.SQL(column.base_type_sql))
            for column in self.staged.table.keys
        ]
        elsewhere = sql.SQL("t.tableoid <> all ({}::oid[])").format([leaf.oid for leaf in leaves_with_key])
        return self._fill(
            _PAIRS_BY_ROW,
            columns=_commas(_column("wanted", name) for name in self._base_names),
            target_row=_commas(target_row),
            elsewhere=elsewhere if leaves_with_key else sql.SQL("true"),
        )

    def forget_pairs(self) -> sql.Composed:
        """Drop what `pair` has made."""
        return sql.SQL("drop table {}").format(self.pair_name)

    def lacks_rows(self) -> sql.Composed:
        """Whether a staged UPDATE or DELETE has no row; of a target without a key, after `pair`."""
        return self._fill(_LACKS, mine=self.mine(NetKind.UPDATE, NetKind.DELETE), found=self._found)

    def found_rows(self) -> sql.Composed:
        """`update_missing` of staged DELETEs, once for each row that they have."""
        return self._fill(_FOUND, mine=self.mine(NetKind.DELETE), found=self._found)

    @property
    def _found(self) -> sql.Composed:
        """The rows that `s` has, behind FROM."""
        if self.staged.table.is_keyed:
            return self._fill("{target} as t where {match}")
        return sql.SQL("{} as p where p.staged = s.ctid").format(self.pair_name)

    def ambiguous(self, limit: int) -> sql.Composed:
        """(number of all, key…) of staged UPDATEs and DELETEs that match several rows, some of them."""
        columns = _commas(_column("s", f"b{number}") for number in range(len(self.staged.table.keys)))
        mine = self.mine(NetKind.UPDATE, NetKind.DELETE)
        return self._fill(_AMBIGUOUS, columns=columns, mine=mine, limit=sql.Literal(limit))

    def order(self, kind: NetKind, rows: int) -> sql.Composed:
        """1 if rows lie in the order of their keys, -1 if in the reverse one, about 0 if in none.

        Of about so many `rows` that staged changes of `kind` find: how many lie behind the one with the next
        smaller key, less those before it, as a share. A table of two runs, such as one of which some rows
        have been updated before, comes to 0.5 at least.
        """
        percent = min(100.0, 100.0 * rows / self.staged.count(kind))
        key = self._as_in_index(f"b{number}" for number in range(len(self.staged.table.keys)))
        return self._fill(_ORDER, percent=sql.Literal(percent), mine=self.mine(kind), key=_commas(key))

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
            key=_column("t", column.name),
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
        return _temporary_table(taken, [sql.SQL("staged tid"), *columns])

    def take(self, taken: sql.Identifier, which: sql.SQL, *, keep_originals: bool) -> list[sql.Composed]:
        """Move UPDATEd rows to a temporary table: `c0`… as they will be, `o0`… as they were."""
        columns = [
            sql.SQL("{} as {}").format(self._overlaid(column), sql.Identifier(f"c{number}"))
            for number, column in enumerate(self._writable())
        ]
        if keep_originals:
            columns += [
                sql.SQL("{} as {}").format(_column("t", column.name), sql.Identifier(f"o{number}"))
                for number, column in enumerate(self._writable())
            ]
        mine = self.mine(NetKind.UPDATE, which=which)
        return [
            self._fill(_TAKE, into=self._into(taken), columns=_commas(columns), mine=mine),
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
            assignments=_commas(assignments),
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
            assignments=_commas(assignments),
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
        names = _commas(sql.Identifier(column.name) for _, column in columns)
        return statement.format(
            table=self.name,
            # A table may have no column at all, and its rows are counted all the same.
            names=sql.SQL(" ({})").format(names) if columns else sql.SQL(""),
            values=_commas(_column("s", f"v{number}") for number, _ in columns),
            stage=self.stage,
            where=_and(conditions),
            ordered=_AS_BORN if self.staged.table.inserts_in_log_order else self._ordered_by_key(),
        )

    def unsure(self, limit: int) -> sql.Composed:
        """(update_missing, keys) of staged INSERTs whose row is not there."""
        free = self._exists(self.same_as_inserted, expected=False)
        mine = self.mine(NetKind.INSERT)
        key = _texts(f"v{number}" for number in self.staged.table.key_positions)
        return self._fill(_UNMATCHED, free=free, mine=mine, key=key, limit=sql.Literal(limit))

    def standing(self, rows: sql.Composable, same: sql.Composable, limit: int) -> sql.Composed:
        """(number of all, key…) of rows of the target that stand in the way of `rows`, some of them."""
        key = _commas(
            sql.SQL("{}::text").format(_column("t", column.name)) for column in self.staged.table.keys
        )
        return self._fill(_STANDING, key=key, rows=rows, same=same, limit=sql.Literal(limit))

    def delete_standing(self, taken: sql.Identifier) -> sql.Composed:
        """Delete rows of the target that stand where rows taken out go."""
        return self._fill(
            "delete from {target} as t using {taken} as m where {same}", taken=taken, same=self.same_as_taken
        )

    # --- conditions

    @property
    def name(self) -> sql.Identifier:
        """The target's qualified name."""
        return sql.Identifier(self.target.name.schema, self.target.name.name)

    def mine(self, *kinds: NetKind, which: sql.SQL = ANY) -> sql.Composed:
        """`s` is of one of the kinds, and of a task attempt that counts."""
        return sql.SQL("s.attempt = any ({}::bigint[]) and s.kind = any ({}::text[]) and {}").format(
            sql.Literal(self.staged.attempts), sql.Literal([kind.value for kind in kinds]), which
        )

    @property
    def _base_key(self) -> sql.Composed:
        """The key by which `s` finds its row; of a table without one nothing is to be shown."""
        if not self.staged.table.is_keyed:
            return sql.SQL("array[null]::text[]").format()
        return _texts(f"b{number}" for number in range(len(self.staged.table.keys)))

    @property
    def match(self) -> sql.Composed:
        """`t` is the row that `s` changes."""
        if not self.staged.table.is_keyed:
            return sql.SQL("p.staged = s.ctid and t.tableoid = p.relation and t.ctid = p.place").format()
        return self._same_key(_column("s", f"b{number}") for number in range(len(self.staged.table.keys)))

    @property
    def same_as_inserted(self) -> sql.Composed:
        """`t` has the key that `s` inserts."""
        return self._same_key(_column("s", f"v{number}") for number in self.staged.table.key_positions)

    @property
    def same_as_passed(self) -> sql.Composed:
        """`t` has a key that `s` has passed through, and is no row that the window updates itself.

        That one may have passed through a key that is equal to its own but written in another way.
        """
        others = self._fill(
            "not exists (select from {stage} as s where {updated} and {match})",
            updated=self.mine(NetKind.UPDATE),
        )
        return _and([self.mine(NetKind.PASSED), self.match, others])

    @property
    def same_as_taken(self) -> sql.Composed:
        """`t` has the key that `m` moves to."""
        numbers = {column.name: number for number, column in enumerate(self._writable())}
        return self._same_key(_column("m", f"c{numbers[column.name]}") for column in self.staged.table.keys)

    def _same_key(self, others: Iterable[sql.Composable]) -> sql.Composed:
        return _and(
            _equal(column.equality or _EQUALS, _column("t", column.name), other)
            for column, other in zip(self.staged.table.keys, others, strict=True)
        )

    def _ordered_by_key(self) -> sql.Composable:
        """ORDER BY of staged INSERTs, as the target's index has them; nothing where no index is known."""
        by = self._as_in_index(f"v{number}" for number in self.staged.table.key_positions)
        return sql.SQL(" order by {}").format(_commas(by)) if by else sql.SQL("")

    def _as_in_index(self, key: Iterable[str]) -> list[sql.Composed]:
        """The columns of `s` that are a key, as ORDER BY wants them; those that the index has an order of."""
        return [
            sql.SQL("{} using operator({}.{})").format(
                _column("s", name), sql.Identifier(column.less.schema), sql.SQL(column.less.name)
            )
            for name, column in zip(key, self.staged.table.keys, strict=True)
            if column.less is not None
        ]

    def _missing(self, template: str, kind: NetKind, limit: int, **parts: sql.Composable) -> sql.Composed:
        expected = sql.SQL(_EXPECTED).format(limit=sql.Literal(limit))
        return self._fill(template, mine=self.mine(kind), key=self._base_key, expected=expected, **parts)

    def _exists(self, same: sql.Composable, *, expected: bool) -> sql.Composed:
        """Whether `same` holds for some `t`."""
        word = sql.SQL("exists" if expected else "not exists")
        return self._fill("{word} (select from {target} as t where {same})", word=word, same=same)

    # --- columns

    def _insert_all(self, rows: sql.Composable, letter: str) -> sql.Composed:
        columns = self._writable()
        statement = sql.SQL("insert into {} ({}) overriding system value select {} from {}")
        names = _commas(sql.Identifier(column.name) for column in columns)
        values = _commas(_column("m", f"{letter}{number}") for number in range(len(columns)))
        return statement.format(self.name, names, values, rows)

    def _writable(self) -> list[TargetColumn]:
        return [column for column in self.target.columns if not column.is_generated]

    def _settable(self) -> list[tuple[int, TargetColumn]]:
        return [
            (number, column) for number, column in enumerate(self.published) if column.identity != _ALWAYS
        ]

    def _sent(self, number: int, column: TargetColumn, is_ever_unsent: bool) -> sql.Composed:
        """The value sent for the column, else what the row has."""
        value = _column("s", f"v{number}")
        if not is_ever_unsent:
            return sql.SQL("{}").format(value)
        kept = _column("t", column.name)
        chosen = sql.SQL("case when substr(s.kinds, {}, 1) not in ('n', 't') then {} else {} end")
        return chosen.format(sql.Literal(number + 1), kept, value)

    def _overlaid(self, column: TargetColumn) -> sql.Composed:
        """The column of a taken row, of the column's own type (a domain's value may be NULL in staging)."""
        for number, published in enumerate(self.published):
            if published.name == column.name:
                sent = self._sent(number, column, number in self.staged.unsent)
                return sql.SQL("({})::{}").format(sent, sql.SQL(column.type_sql))
        return sql.SQL("{}").format(_column("t", column.name))

    @property
    def pair_name(self) -> sql.Identifier:
        """The temporary table of pairs."""
        return sql.Identifier("pg_temp", f"pairs_{self.staged.table.name}")

    def _into(self, table: sql.Identifier) -> sql.Composed:
        """What puts the rows of a query into a temporary table; statements of an owner cannot make one."""
        template = "insert into {}" if self.has_view else "create temporary table {} on commit drop as"
        return sql.SQL(template).format(table)

    def _fill(self, template: str, **parts: sql.Composable) -> sql.Composed:
        pairs: sql.Composable = sql.SQL("")
        if not self.staged.table.is_keyed:
            pairs = sql.SQL(", {} as p").format(self.pair_name)
        only = sql.SQL("" if self.target.is_partitioned else "only ")
        return sql.SQL(template).format(
            target=sql.SQL("{}{}").format(only, self.name),
            stage=self.stage,
            pairs=pairs,
            match=self.match,
            **parts,
        )


def _temporary_table(name: sql.Identifier, columns: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL("create temporary table {} ({}) on commit drop").format(name, _commas(columns))


def _column(alias: str, name: str) -> sql.Identifier:
    return sql.Identifier(alias, name)


def _alike(leaves: Iterable[Leaf]) -> list[list[Leaf]]:
    """The leaves, those together whose keys have the same columns, with the same equality."""
    found: dict[frozenset[tuple[str, Operator]], list[Leaf]] = {}
    for leaf in leaves:
        found.setdefault(frozenset(leaf.key.items()), []).append(leaf)
    return [*found.values()]


def _equal(equality: Operator, one: sql.Composable, other: sql.Composable) -> sql.Composed:
    operator = sql.SQL("operator({}.{})").format(sql.Identifier(equality.schema), sql.SQL(equality.name))
    return sql.SQL("{} {} {}").format(one, operator, other)


def _commas(parts: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)


def _texts(columns: Iterable[str]) -> sql.Composed:
    values = _commas(sql.SQL("{}::text").format(_column("s", column)) for column in columns)
    return sql.SQL("array[{}]::text[]").format(values)


def _and(parts: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(" and ").join(parts)
