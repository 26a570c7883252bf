"""Names, columns and conditions that the statements of a merge have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.model.frames import NetKind
from cdc_replay.postgres.identifiers import commas
from cdc_replay.replay.apply.conflicts import KEYS_SHOWN
from cdc_replay.replay.apply.staging import StagedTable
from cdc_replay.subscriber.target_statements import equal, target_reference
from cdc_replay.subscriber.target_tables import Operator, TargetColumn, TargetTable

_EQUALS: Final = Operator("pg_catalog", "=")

_PAIR_MATCH: Final = (
    "pairs.staged_ctid = staged.ctid and target.tableoid = pairs.relation and target.ctid = pairs.target_ctid"
)

ANY: Final = sql.SQL("true")


@dataclass(frozen=True, slots=True)
class TargetSql:
    """The SQL of one target and its staged changes.

    Aliases in every statement: `staged` is a row of the staging table, `target` a row of the target,
    `detached` a row that was moved from the target to a temporary table, `pairs` a pair of a staged and a
    target row.
    """

    target: TargetTable
    staged: StagedTable
    has_view: bool = False
    """Statements read the staging table through its view."""

    @property
    def stage(self) -> sql.Identifier:
        """The staging table, or its view, as statements on the target read it."""
        return self.staged.table.view if self.has_view else self.staged.table.identifier

    @property
    def published(self) -> tuple[TargetColumn, ...]:
        """The target's columns that have staged values, in staging order."""
        return self.staged.table.values

    def staged_rows(self, *kinds: NetKind, condition: sql.SQL = ANY) -> sql.Composed:
        """`staged` is of one of the kinds, fulfils `condition`, and its task attempt counts."""
        return sql.SQL(
            "staged.attempt = any ({}::bigint[]) and staged.kind = any ({}::text[]) and {}"
        ).format(sql.Literal(self.staged.attempts), sql.Literal([kind.value for kind in kinds]), condition)

    @property
    def key_match(self) -> sql.Composed:
        """`target` is the row that `staged` changes."""
        if not self.staged.table.is_keyed:
            return sql.SQL(_PAIR_MATCH).format()
        return self._same_key(qualified("staged", name) for name in self._base_names)

    @property
    def _base_key(self) -> sql.Composed:
        """The base key of `staged` as shown in conflicts; NULL in a table without a key."""
        if not self.staged.table.is_keyed:
            return sql.SQL("array[null]::text[]").format()
        return texts(self._base_names)

    @property
    def _base_names(self) -> list[str]:
        return [f"b{index}" for index in range(len(self.staged.table.keys))]

    def _settable(self) -> list[tuple[int, TargetColumn]]:
        return [(index, column) for index, column in enumerate(self.published) if column.is_settable]

    def _same_key(self, key_values: Iterable[sql.Composable]) -> sql.Composed:
        return all_of(
            equal(column.equality or _EQUALS, qualified("target", column.name), other)
            for column, other in zip(self.staged.table.keys, key_values, strict=True)
        )

    @property
    def occupies_inserted_key(self) -> sql.Composed:
        """`target` has the key that `staged` inserts."""
        return self._same_key(qualified("staged", f"v{index}") for index in self.staged.table.key_positions)

    def _value_or_current(self, index: int, column: TargetColumn, may_be_unsent: bool) -> sql.Composed:
        value = qualified("staged", f"v{index}")
        if not may_be_unsent:
            return sql.SQL("{}").format(value)
        current = qualified("target", column.name)
        chosen = sql.SQL("case when substr(staged.kinds, {}, 1) not in ('n', 't') then {} else {} end")
        return chosen.format(sql.Literal(index + 1), current, value)

    def _as_in_index(self, key: Iterable[str]) -> list[sql.Composed]:
        """ORDER BY items for the key columns of `staged`, as far as the index has an order."""
        return [
            sql.SQL("{} using operator({}.{})").format(
                qualified("staged", name), sql.Identifier(column.less.schema), sql.SQL(column.less.name)
            )
            for name, column in zip(key, self.staged.table.keys, strict=True)
            if column.less is not None
        ]

    def _exists(self, same: sql.Composable, *, expected: bool) -> sql.Composed:
        word = sql.SQL("exists" if expected else "not exists")
        return self._fill("{word} (select from {target} as target where {same})", word=word, same=same)

    @property
    def pair_name(self) -> sql.Identifier:
        """The temporary table of pairs."""
        return sql.Identifier("pg_temp", f"pairs_{self.staged.table.name}")

    def _fill(self, template: str, **parts: sql.Composable) -> sql.Composed:
        """The statement; `limit` is that of listed keys."""
        pairs: sql.Composable = sql.SQL("")
        if not self.staged.table.is_keyed:
            pairs = sql.SQL(", {} as pairs").format(self.pair_name)
        return sql.SQL(template).format(
            target=target_reference(self.target),
            stage=self.stage,
            pairs=pairs,
            key_match=self.key_match,
            limit=sql.Literal(KEYS_SHOWN),
            **parts,
        )

    @property
    def _matched_rows(self) -> sql.Composed:
        if self.staged.table.is_keyed:
            return self._fill("{target} as target where {key_match}")
        return sql.SQL("{} as pairs where pairs.staged_ctid = staged.ctid").format(self.pair_name)


def qualified(alias: str, name: str) -> sql.Identifier:
    """`alias.name`."""
    return sql.Identifier(alias, name)


def texts(columns: Iterable[str]) -> sql.Composed:
    """Columns of `staged` as an array of texts."""
    values = commas(sql.SQL("{}::text").format(qualified("staged", column)) for column in columns)
    return sql.SQL("array[{}]::text[]").format(values)


def all_of(parts: Iterable[sql.Composable]) -> sql.Composed:
    """The parts, joined by AND."""
    return sql.SQL(" and ").join(parts)
