"""Names of tables and columns in statements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psycopg import sql

from cdc_replay.model.relation import QualifiedName


def commas(parts: Iterable[sql.Composable]) -> sql.Composed:
    """The parts, separated by commas."""
    return sql.SQL(", ").join(parts)


def names(columns: Iterable[str], alias: str = "") -> sql.Composed:
    """The columns separated by commas, qualified by `alias` if given."""
    return commas(sql.Identifier(*((alias, name) if alias else (name,))) for name in columns)


def column_list(columns: Sequence[str]) -> sql.Composable:
    """The names in parentheses; empty for a table without columns, for which the grammar has no list."""
    return sql.SQL(" ({})").format(names(columns)) if columns else sql.SQL("")


def table_reference(name: QualifiedName, *, is_partitioned: bool) -> sql.Composed:
    """The table with its partitions, or without plain inheritance children (R7.6, R8.15)."""
    only = sql.SQL("" if is_partitioned else "only ")
    return sql.SQL("{}{}").format(only, sql.Identifier(name.schema, name.name))
