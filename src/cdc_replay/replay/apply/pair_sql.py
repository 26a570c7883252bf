"""The SQL that finds rows of a target by other means than its own key.

| target                                   | rows are found                                                  |
|------------------------------------------|-----------------------------------------------------------------|
| without a key (R8.10)                    | by ctid: equal rows are numbered and paired by number           |
| whose leaves have keys (R8.12)           | in their leaf, by its key, else as above                        |
| found by the key of the publisher's leaf | by that key, after a check that no key has two rows             |

Whole rows are compared in their published columns only, and NULL equals NULL (R8.8): a column of the
subscriber's own does not prevent a match (R8.9).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, LiteralString

from psycopg import sql

from cdc_replay.model.frames import NetKind
from cdc_replay.postgres.identifiers import commas
from cdc_replay.replay.apply.target_sql import TargetSql, all_of, qualified
from cdc_replay.subscriber.target_statements import equal
from cdc_replay.subscriber.target_tables import Leaf, Operator, TargetColumn

PAIR_COLUMNS: Final = "staged_ctid tid, relation oid, target_ctid tid"

# `leaf` is the one that the row belongs to, if that has a key.
_PAIR: Final = """
    {into}
    with wanted as materialized (
        select {columns} from {stage} as staged where {staged_rows}
    )
    select * from ({pairs_of}) as pairs
"""

_GROUP_BY_LEAF_KEY: Final = """
    with wanted as materialized (
        select {columns} from {stage} as staged where {staged_rows}
    )
    select number, leaf, dense_rank() over (order by {key}) from wanted where leaf = any ({oids}::oid[])
"""

# Equal rows are numbered on both sides. Comparing whole records uses each type's own equality, and sorting
# them its order; types without one are compared as texts.
_PAIRS_BY_ROW: Final = """
    (
        with numbered as materialized (
            select staged_ctid, row({columns}) as content,
                row_number() over (partition by row({columns})) as number
            from wanted
            where leaf is null
        ),
        present as (
            select target.relation, target.target_ctid, target.content,
                row_number() over (partition by target.content) as number
            from (
                select target.tableoid as relation, target.ctid as target_ctid, row({target_row}) as content
                from {target} as target
                -- Arrays of types without equality fail only if there is a row to compare.
                where {elsewhere} and (select count(*) from numbered) > 0
            ) as target
            where exists (select from numbered where numbered.content operator(pg_catalog.=) target.content)
        )
        select numbered.staged_ctid, present.relation, present.target_ctid
        from numbered
        join present on present.content operator(pg_catalog.=) numbered.content
            and present.number = numbered.number
    )
"""

# What the type prints: a cast to text may be code of the type's owner.
_AS_TEXT: Final = "case when pg_catalog.num_nulls({0}) = 0 then pg_catalog.format('%s', {0}) end"

_PAIRS_BY_LEAF_KEY: Final = """
    (
        select {once} wanted.staged_ctid, target.tableoid as relation, target.ctid as target_ctid
        from wanted join {target} as target on target.tableoid operator(pg_catalog.=) wanted.leaf and {same}
        where wanted.leaf = any ({oids}::oid[])
        {in_order}
    )
"""

_HAS_UNMATCHED: Final = """
    select exists (
        select from {stage} as staged
        where {staged_rows} and not exists (select from {matched})
    )
"""

_MATCHED_DELETES: Final = "select staged.update_missing from {stage} as staged, {matched} and {staged_rows}"

_AMBIGUOUS: Final = """
    select count(*) over (), {columns} from {target} as target, {stage} as staged
    where {staged_rows} and {key_match}
    group by staged.ctid, {columns} having count(*) > 1 limit {limit}
"""


@dataclass(frozen=True, slots=True)
class PairStatements(TargetSql):
    """Statements for targets without a key, or with keys in their leaves only (R8.10, R8.12)."""

    def pair_equal_rows(self, into: sql.Composable, *, shared: bool = False) -> sql.Composed:
        """For a target without a key: pair staged UPDATEs and DELETEs with rows, `into` `pair_name`.

        If `shared`, a row found by its leaf's key is paired with every change that matches it, else with one.
        """
        keyed = self._leaves_with_key
        pairs = [self._pairs_by_leaf_key(leaves, shared=shared) for leaves in _group_by_key(keyed)]
        if len(keyed) < len(self.target.leaves.leaves) or not keyed:
            pairs.append(self._pairs_by_row(keyed))
        return self._fill(
            _PAIR,
            into=into,
            columns=self._search_columns("staged.ctid as staged_ctid", keyed),
            staged_rows=self.staged_rows(NetKind.UPDATE, NetKind.DELETE),
            pairs_of=sql.SQL(" union all ").join(pairs),
        )

    def analyze_pairs(self) -> sql.Composed:
        """ANALYZE the table of pairs."""
        return sql.SQL("analyze {}").format(self.pair_name)

    def group_by_leaf_key(self) -> list[sql.Composed]:
        """(`update_missing`, leaf, group) of staged DELETEs; a group has one key in its leaf."""
        keyed, names = self._leaves_with_key, self._base_name_by_column
        return [
            self._fill(
                _GROUP_BY_LEAF_KEY,
                columns=self._search_columns("staged.update_missing as number", keyed),
                staged_rows=self.staged_rows(NetKind.DELETE),
                key=commas(
                    qualified("wanted", name) for name in ("leaf", *(names[name] for name in leaves[0].key))
                ),
                oids=sql.Literal([leaf.oid for leaf in leaves]),
            )
            for leaves in _group_by_key(keyed)
        ]

    @property
    def _base_name_by_column(self) -> dict[str, str]:
        columns = self.staged.table.keys
        return {column.name: name for column, name in zip(columns, self._base_names, strict=True)}

    @property
    def _leaves_with_key(self) -> list[Leaf]:
        table = self.staged.table
        return self.target.leaves.with_key(column.name for column in table.keys) if table.is_by_leaf else []

    def _search_columns(self, first: LiteralString, leaves: Sequence[Leaf]) -> sql.Composed:
        """Columns of `staged` that its row is found by: `first`, its base key, and its leaf."""
        base = [qualified("staged", name) for name in self._base_names]
        return commas([sql.SQL(first), *base, sql.SQL("{} as leaf").format(self._leaf_of_base(leaves))])

    def _leaf_of_base(self, leaves: Sequence[Leaf]) -> sql.Composable:
        """The one of `leaves` that the base row of `staged` belongs to; NULL: none."""
        if not leaves:
            return sql.SQL("null::oid")
        named = commas(
            sql.SQL("{} as {}").format(qualified("staged", name), sql.Identifier(column.name))
            for name, column in zip(self._base_names, self.staged.table.keys, strict=True)
        )
        cases = sql.SQL(" ").join(
            # The server has printed the constraint, for this session's search path.
            sql.SQL("when {} then {}::oid").format(sql.SQL(leaf.constraint_sql), leaf.oid)
            for leaf in leaves
        )
        return sql.SQL("(select case {} end from (select {}) as base)").format(cases, named)

    def _pairs_by_leaf_key(self, leaves: Sequence[Leaf], *, shared: bool) -> sql.Composed:
        """Pairs in leaves with the same key columns.

        Read from the root table: the role may lack privileges on the leaves.
        """
        names = self._base_name_by_column
        return self._fill(
            _PAIRS_BY_LEAF_KEY,
            oids=sql.Literal([leaf.oid for leaf in leaves]),
            same=all_of(
                equal(equality, qualified("target", column), qualified("wanted", names[column]))
                for column, equality in leaves[0].key.items()
            ),
            once=sql.SQL("" if shared else "distinct on (target.tableoid, target.ctid)"),
            in_order=sql.SQL("" if shared else "order by target.tableoid, target.ctid, wanted.staged_ctid"),
        )

    def _pairs_by_row(self, leaves_with_key: Sequence[Leaf]) -> sql.Composed:
        keys = self.staged.table.keys

        def row(names: Iterable[sql.Composable]) -> sql.Composed:
            return commas(_comparable(name, key) for name, key in zip(names, keys, strict=True))

        elsewhere = sql.SQL("target.tableoid <> all ({}::oid[])").format(
            [leaf.oid for leaf in leaves_with_key]
        )
        return self._fill(
            _PAIRS_BY_ROW,
            columns=row(qualified("wanted", name) for name in self._base_names),
            target_row=row(qualified("target", key.name) for key in keys),
            elsewhere=elsewhere if leaves_with_key else sql.SQL("true"),
        )

    def drop_pairs(self) -> sql.Composed:
        """Drop the table of pairs."""
        return sql.SQL("drop table {}").format(self.pair_name)

    def matched_deletes(self) -> sql.Composed:
        """`update_missing` of staged DELETEs, once for each row that they match."""
        return self._fill(
            _MATCHED_DELETES, staged_rows=self.staged_rows(NetKind.DELETE), matched=self._matched_rows
        )

    def has_unmatched(self) -> sql.Composed:
        """Whether a staged UPDATE or DELETE has no row; without a key, after `pair_equal_rows`."""
        return self._fill(
            _HAS_UNMATCHED,
            staged_rows=self.staged_rows(NetKind.UPDATE, NetKind.DELETE),
            matched=self._matched_rows,
        )

    def copy_probes(self) -> sql.Composed:
        """COPY of keys to look up, as rows of CSV: attempt, kind, index, key."""
        names = ("attempt", "kind", "update_missing", *self._base_names)
        return sql.SQL("copy {} ({}) from stdin (format csv)").format(
            self.staged.table.identifier, commas(sql.Identifier(name) for name in names)
        )

    def ambiguous_rows(self) -> sql.Composed:
        """(total, key…) of staged UPDATEs and DELETEs that match several rows."""
        columns = commas(qualified("staged", name) for name in self._base_names)
        staged_rows = self.staged_rows(NetKind.UPDATE, NetKind.DELETE)
        return self._fill(_AMBIGUOUS, columns=columns, staged_rows=staged_rows)


def _group_by_key(leaves: Iterable[Leaf]) -> list[list[Leaf]]:
    groups: dict[frozenset[tuple[str, Operator]], list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(frozenset(leaf.key.items()), []).append(leaf)
    return [*groups.values()]


def _comparable(value: sql.Composable, column: TargetColumn) -> sql.Composed:
    """The value of a column in a form that can be sorted and compared."""
    if column.has_order:
        return sql.SQL("{}::{}").format(value, sql.SQL(column.base_type_sql))
    return sql.SQL(_AS_TEXT).format(value)
