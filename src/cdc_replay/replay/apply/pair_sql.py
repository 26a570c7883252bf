"""The SQL that finds the rows of targets whose own index does not lead to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, LiteralString

from psycopg import sql

from cdc_replay.model.frames import NetKind
from cdc_replay.replay.apply.target_sql import TargetSql, all_of, commas, equal, qualified, temporary_table
from cdc_replay.subscriber.tables import Leaf, Operator

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


@dataclass(frozen=True, slots=True)
class PairStatements(TargetSql):
    """Statements for targets without a key, or with keys in their leaves only (R8.10, R8.12)."""

    def pair_table(self) -> sql.Composed:
        """DDL for what `pair` fills, where its owner could not make that (`has_view`)."""
        return temporary_table(self.pair_name, [sql.SQL(_PAIR_COLUMNS)])

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
                key=commas(
                    qualified("wanted", name) for name in ("leaf", *(names[each] for each in leaves[0].key))
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
    def _leaves_with_key(self) -> list[Leaf]:
        table = self.staged.table
        return self.target.leaves.with_key(column.name for column in table.keys) if table.is_by_leaf else []

    def _wanted(self, first: LiteralString, leaves: Sequence[Leaf]) -> sql.Composed:
        """What has to be known of `s` to find its row: what is `first`, its base key, and its leaf."""
        base = [qualified("s", name) for name in self._base_names]
        return commas([sql.SQL(first), *base, sql.SQL("{} as leaf").format(self._leaf_of_base(leaves))])

    def _leaf_of_base(self, leaves: Sequence[Leaf]) -> sql.Composable:
        """Which of `leaves` the row that `s` has as its base belongs to; NULL: none."""
        if not leaves:
            return sql.SQL("null::oid")
        named = commas(
            sql.SQL("{} as {}").format(qualified("s", name), sql.Identifier(column.name))
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
            same=all_of(
                equal(equality, qualified("t", column), qualified("wanted", names[column]))
                for column, equality in leaves[0].key.items()
            ),
            once=sql.SQL("" if shared else "distinct on (t.tableoid, t.ctid)"),
            in_order=sql.SQL("" if shared else "order by t.tableoid, t.ctid, wanted.staged"),
        )

    def _pairs_by_row(self, leaves_with_key: Sequence[Leaf]) -> sql.Composed:
        target_row = [
            sql.SQL("{}::{}").format(qualified("t", column.name), sql.SQL(column.base_type_sql))
            for column in self.staged.table.keys
        ]
        elsewhere = sql.SQL("t.tableoid <> all ({}::oid[])").format([leaf.oid for leaf in leaves_with_key])
        return self._fill(
            _PAIRS_BY_ROW,
            columns=commas(qualified("wanted", name) for name in self._base_names),
            target_row=commas(target_row),
            elsewhere=elsewhere if leaves_with_key else sql.SQL("true"),
        )

    def forget_pairs(self) -> sql.Composed:
        """Drop what `pair` has made."""
        return sql.SQL("drop table {}").format(self.pair_name)

    def found_rows(self) -> sql.Composed:
        """`update_missing` of staged DELETEs, once for each row that they have."""
        return self._fill(_FOUND, mine=self.mine(NetKind.DELETE), found=self._found)

    def lacks_rows(self) -> sql.Composed:
        """Whether a staged UPDATE or DELETE has no row; of a target without a key, after `pair`."""
        return self._fill(_LACKS, mine=self.mine(NetKind.UPDATE, NetKind.DELETE), found=self._found)

    def copy_probes(self) -> sql.Composed:
        """Stage keys of which rows are looked for, as rows of CSV: attempt, kind, number, key."""
        names = ("attempt", "kind", "update_missing", *self._base_names)
        return sql.SQL("copy {} ({}) from stdin (format csv)").format(
            self.staged.table.identifier, commas(sql.Identifier(name) for name in names)
        )

    def ambiguous(self, limit: int) -> sql.Composed:
        """(number of all, key…) of staged UPDATEs and DELETEs that match several rows, some of them."""
        columns = commas(qualified("s", f"b{number}") for number in range(len(self.staged.table.keys)))
        mine = self.mine(NetKind.UPDATE, NetKind.DELETE)
        return self._fill(_AMBIGUOUS, columns=columns, mine=mine, limit=sql.Literal(limit))


def _alike(leaves: Iterable[Leaf]) -> list[list[Leaf]]:
    """The leaves, those together whose keys have the same columns, with the same equality."""
    found: dict[frozenset[tuple[str, Operator]], list[Leaf]] = {}
    for leaf in leaves:
        found.setdefault(frozenset(leaf.key.items()), []).append(leaf)
    return [*found.values()]
