"""Names, columns and conditions that the statements of a merge have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.model.frames import NetKind
from cdc_replay.replay.apply.staging import StagedTable
from cdc_replay.subscriber.tables import Operator, TargetColumn, TargetTable

_EQUALS: Final = Operator("pg_catalog", "=")

ALWAYS: Final = "a"
"""`pg_attribute.attidentity` of GENERATED ALWAYS AS IDENTITY."""

ANY: Final = sql.SQL("true")


@dataclass(frozen=True, slots=True)
class TargetSql:
    """The SQL of one target and what is staged for it."""

    target: TargetTable
    staged: StagedTable
    has_view: bool = False
    """Statements read what is staged through its view."""

    @property
    def stage(self) -> sql.Identifier:
        """What statements on the target read as staged."""
        return self.staged.table.view if self.has_view else self.staged.table.identifier

    @property
    def name(self) -> sql.Identifier:
        """The target's qualified name."""
        return sql.Identifier(self.target.name.schema, self.target.name.name)

    @property
    def published(self) -> tuple[TargetColumn, ...]:
        """The target's columns that values are staged for, in staging order."""
        return self.staged.table.values

    def mine(self, *kinds: NetKind, which: sql.SQL = ANY) -> sql.Composed:
        """`s` is of one of the kinds, and of a task attempt that counts."""
        return sql.SQL("s.attempt = any ({}::bigint[]) and s.kind = any ({}::text[]) and {}").format(
            sql.Literal(self.staged.attempts), sql.Literal([kind.value for kind in kinds]), which
        )

    @property
    def match(self) -> sql.Composed:
        """`t` is the row that `s` changes."""
        if not self.staged.table.is_keyed:
            return sql.SQL("p.staged = s.ctid and t.tableoid = p.relation and t.ctid = p.place").format()
        return self._same_key(qualified("s", f"b{number}") for number in range(len(self.staged.table.keys)))

    @property
    def _base_key(self) -> sql.Composed:
        """The key by which `s` finds its row; of a table without one nothing is to be shown."""
        if not self.staged.table.is_keyed:
            return sql.SQL("array[null]::text[]").format()
        return texts(f"b{number}" for number in range(len(self.staged.table.keys)))

    @property
    def _base_names(self) -> list[str]:
        return [f"b{number}" for number in range(len(self.staged.table.keys))]

    def _writable(self) -> list[TargetColumn]:
        return [column for column in self.target.columns if not column.is_generated]

    def _settable(self) -> list[tuple[int, TargetColumn]]:
        return [(number, column) for number, column in enumerate(self.published) if column.identity != ALWAYS]

    def _same_key(self, others: Iterable[sql.Composable]) -> sql.Composed:
        return all_of(
            equal(column.equality or _EQUALS, qualified("t", column.name), other)
            for column, other in zip(self.staged.table.keys, others, strict=True)
        )

    @property
    def same_as_inserted(self) -> sql.Composed:
        """`t` has the key that `s` inserts."""
        return self._same_key(qualified("s", f"v{number}") for number in self.staged.table.key_positions)

    def _sent(self, number: int, column: TargetColumn, is_ever_unsent: bool) -> sql.Composed:
        """The value sent for the column, else what the row has."""
        value = qualified("s", f"v{number}")
        if not is_ever_unsent:
            return sql.SQL("{}").format(value)
        kept = qualified("t", column.name)
        chosen = sql.SQL("case when substr(s.kinds, {}, 1) not in ('n', 't') then {} else {} end")
        return chosen.format(sql.Literal(number + 1), kept, value)

    def _as_in_index(self, key: Iterable[str]) -> list[sql.Composed]:
        """The columns of `s` that are a key, as ORDER BY wants them; those that the index has an order of."""
        return [
            sql.SQL("{} using operator({}.{})").format(
                qualified("s", name), sql.Identifier(column.less.schema), sql.SQL(column.less.name)
            )
            for name, column in zip(key, self.staged.table.keys, strict=True)
            if column.less is not None
        ]

    def _exists(self, same: sql.Composable, *, expected: bool) -> sql.Composed:
        """Whether `same` holds for some `t`."""
        word = sql.SQL("exists" if expected else "not exists")
        return self._fill("{word} (select from {target} as t where {same})", word=word, same=same)

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

    @property
    def _found(self) -> sql.Composed:
        """The rows that `s` has, behind FROM."""
        if self.staged.table.is_keyed:
            return self._fill("{target} as t where {match}")
        return sql.SQL("{} as p where p.staged = s.ctid").format(self.pair_name)


def temporary_table(name: sql.Identifier, columns: Iterable[sql.Composable]) -> sql.Composed:
    """DDL for a temporary table that ends with the transaction."""
    return sql.SQL("create temporary table {} ({}) on commit drop").format(name, commas(columns))


def qualified(alias: str, name: str) -> sql.Identifier:
    """`alias.name`."""
    return sql.Identifier(alias, name)


def equal(equality: Operator, one: sql.Composable, other: sql.Composable) -> sql.Composed:
    """`one` and `other` compared with the given equality operator."""
    operator = sql.SQL("operator({}.{})").format(sql.Identifier(equality.schema), sql.SQL(equality.name))
    return sql.SQL("{} {} {}").format(one, operator, other)


def commas(parts: Iterable[sql.Composable]) -> sql.Composed:
    """The parts, separated by commas."""
    return sql.SQL(", ").join(parts)


def texts(columns: Iterable[str]) -> sql.Composed:
    """Columns of `s` as an array of texts."""
    values = commas(sql.SQL("{}::text").format(qualified("s", column)) for column in columns)
    return sql.SQL("array[{}]::text[]").format(values)


def all_of(parts: Iterable[sql.Composable]) -> sql.Composed:
    """The parts, joined by AND."""
    return sql.SQL(" and ").join(parts)
