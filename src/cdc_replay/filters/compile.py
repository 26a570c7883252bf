"""A stored row filter → where it is evaluated: in Spark where that is exact, else by PostgreSQL.

| the filter                   | becomes                                                             |
|------------------------------|---------------------------------------------------------------------|
| every part has an exact rule | `SparkFilter`: the expression                                       |
| some part has none           | `ServerFilter`: its SQL, the columns that it needs, and the reason  |
| reads a generated column     | `ServerFilter`: the wire omits it, so it is generated again (R3.13) |

No filter that PostgreSQL has stored is refused (R5.2), and none is approximated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.expression import Bool, BoolOp, Constant, Expression, Type, attnums_read, walk
from cdc_replay.filters.node_tree import parse
from cdc_replay.filters.rules import reason_for_server
from cdc_replay.model.publication import Generated, RowFilter, Table, TableColumn
from cdc_replay.model.relation import QualifiedName


@dataclass(frozen=True, slots=True)
class SparkFilter:
    """Spark answers as PostgreSQL does; `columns` are those that the expression reads, by attnum."""

    expression: Expression
    columns: tuple[TableColumn, ...]


@dataclass(frozen=True, slots=True)
class ServerFilter:
    """PostgreSQL evaluates `sql` over `columns`; `because` says why.

    `columns` are in the order of their attribute numbers and hold, with each generated column, every column
    that its generation expression may read.
    """

    sql: str
    columns: tuple[TableColumn, ...]
    because: str
    table: QualifiedName


CompiledFilter: TypeAlias = SparkFilter | ServerFilter


def compile_filter(row_filter: RowFilter, table: Table) -> CompiledFilter:
    """How to evaluate a filter that is stored for `table`, exactly.

    Raises:
        InvalidFilter: if the stored tree is not one, or reads a column that the table does not have.
    """
    return compile_any((row_filter,), table)


def compile_any(row_filters: Sequence[RowFilter], table: Table) -> CompiledFilter:
    """How to evaluate the OR of the filters that several publications have for `table` (R3.5).

    PostgreSQL evaluates them from left to right and stops at the first that is TRUE, so that an error in a
    later one stays hidden (R3.8). If it has to evaluate one of them, it evaluates them all, in one
    expression.

    Raises:
        InvalidFilter: as `compile_filter`.
    """
    expressions = tuple(parse(each.node_tree) for each in row_filters)
    expression = expressions[0] if len(expressions) == 1 else Bool(BoolOp.OR, expressions)
    columns = _columns_read(expression, table)
    sql = " or ".join(f"({each.sql})" for each in row_filters)
    because = _reason(expression, columns, sql)
    if because is None:
        return SparkFilter(expression, columns)
    return ServerFilter(sql, _with_generation(columns, table), because, table.name)


def _columns_read(expression: Expression, table: Table) -> tuple[TableColumn, ...]:
    wanted = attnums_read(expression)
    columns = tuple(column for column in table.columns if column.attnum in wanted)
    if missing := sorted(wanted - {column.attnum for column in columns}):
        numbers = ", ".join(str(number) for number in missing)
        raise InvalidFilter(
            f'row filter of table "{table.name}" reads columns that the table does not have',
            detail=f"Attribute numbers without a column: {numbers}.",
            hint="Run `cdc-replay refresh` so that the publisher's catalog is read again.",
            rule="R5.3",
        )
    return columns


def _reason(expression: Expression, columns: tuple[TableColumn, ...], sql: str) -> str | None:
    generated = [column.name for column in columns if column.generated is not Generated.NO]
    if generated:
        return f'column "{generated[0]}" is generated: its value is not sent, but computed again'
    if not all(_is_printed(node, sql) for node in walk(expression)):
        return "constants are stored in another byte order than this software reads"
    return reason_for_server(expression)


def _is_printed(node: Expression, sql: str) -> bool:
    # An int8 uses all eight bytes of its datum, so only the printed filter can tell their order.
    match node:
        case Constant(Type.INT8, int(value)):
            return str(abs(value)) in sql
        case _:
            return True


def _with_generation(columns: tuple[TableColumn, ...], table: Table) -> tuple[TableColumn, ...]:
    """The columns, and those whose names occur in the generation expressions of the generated ones."""
    expressions = [column.generation_sql or "" for column in columns]

    def may_be_read(column: TableColumn) -> bool:
        name = column.name.replace('"', '""')
        is_plain = column.generated is Generated.NO
        return is_plain and any(name in expression for expression in expressions)

    return tuple(column for column in table.columns if column in columns or may_be_read(column))
