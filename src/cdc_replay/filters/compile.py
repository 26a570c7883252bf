"""A stored row filter → where it is evaluated: in Arrow where that is exact, else by PostgreSQL.

| the filter                   | becomes                                                                  |
|------------------------------|--------------------------------------------------------------------------|
| every part has an exact rule | `ArrowFilter`: the expression                                            |
| some part has none           | `ServerFilter`: the columns that it needs, and the reason                |
| reads a generated column     | `ServerFilter`: the value is not sent, so PostgreSQL computes it (R3.13) |

No filter that PostgreSQL has stored is refused (R5.2), and none is approximated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.constant_folding import LENGTH_CASTS, fold_constants
from cdc_replay.filters.datum import PrintedFilter
from cdc_replay.filters.expression import (
    Bool,
    BoolOp,
    Constant,
    Expression,
    Function,
    attnums_read,
    children,
)
from cdc_replay.filters.node_text import attnums_in, read_node
from cdc_replay.filters.node_tree import parse
from cdc_replay.filters.unsupported import unsupported_reason
from cdc_replay.model.publication import Generated, RowFilter, Table, TableColumn
from cdc_replay.model.relation import QualifiedName


@dataclass(frozen=True, slots=True)
class ArrowFilter:
    """Arrow answers as PostgreSQL does, from column values alone.

    `columns` are those that the expression reads, by attnum.
    """

    expression: Expression
    columns: tuple[TableColumn, ...]


@dataclass(frozen=True, slots=True)
class ServerFilter:
    """PostgreSQL evaluates the OR of `filters` over `columns`; `because` says why.

    `columns` are in the order of their attribute numbers and hold, with each generated column, every column
    that its generation expression may read. `key` names the columns by which an error identifies its row.

    `only_in_key` are generated columns of the replica identity whose source columns are not in it. Unless
    such a value is sent (R6.9), an old row has nothing to compute it from.
    """

    filters: tuple[RowFilter, ...]
    columns: tuple[TableColumn, ...]
    because: str
    table: QualifiedName
    key: tuple[str, ...] = ()
    only_in_key: tuple[str, ...] = ()


CompiledFilter: TypeAlias = ArrowFilter | ServerFilter


def compile_filter(row_filter: RowFilter, table: Table) -> CompiledFilter:
    """How to evaluate a filter that is stored for `table`, exactly.

    Raises:
        InvalidFilter: if the stored tree is not one, or reads a column that the table does not have.
    """
    return compile_or((row_filter,), table)


def compile_or(row_filters: Sequence[RowFilter], table: Table) -> CompiledFilter:
    """How to evaluate the OR of the filters that several publications have for `table` (R3.5).

    PostgreSQL evaluates them from left to right and stops at the first that is TRUE, so that an error in a
    later one stays hidden (R3.8). If it has to evaluate one of them, it evaluates them all, in one
    expression.

    Raises:
        InvalidFilter: as `compile_filter`.
    """
    expressions = tuple(parse(row_filter.node_tree) for row_filter in row_filters)
    expression = expressions[0] if len(expressions) == 1 else Bool(BoolOp.OR, expressions)
    columns = _columns_read(expression, table)
    because = _reason(expression, columns, filters_sql(row_filters))
    if because is None:
        return ArrowFilter(fold_constants(expression), columns)
    return ServerFilter(
        filters=tuple(row_filters),
        columns=_with_generation(columns, table),
        because=because,
        table=table.name,
        key=table.key_columns or table.primary_key,
        only_in_key=tuple(
            column.name
            for column in columns
            if column.name in table.key_columns and not _sources(column, table) <= set(table.key_columns)
        ),
    )


def filters_sql(row_filters: Iterable[RowFilter]) -> str:
    """The OR of filters, as SQL for messages."""
    return " or ".join(f"({row_filter.sql})" for row_filter in row_filters)


def _columns_read(expression: Expression, table: Table) -> tuple[TableColumn, ...]:
    attnums = attnums_read(expression)
    columns = tuple(column for column in table.columns if column.attnum in attnums)
    if missing := sorted(attnums - {column.attnum for column in columns}):
        listed = ", ".join(str(attnum) for attnum in missing)
        raise InvalidFilter(
            f'row filter of table "{table.name}" reads columns that the table does not have',
            detail=f"Attribute numbers without a column: {listed}.",
            hint="Run `cdc-replay refresh` so that the publisher's catalog is read again.",
            rule="R5.3",
        )
    return columns


def _reason(stored: Expression, columns: tuple[TableColumn, ...], printed: str) -> str | None:
    generated = [column.name for column in columns if column.generated is not Generated.NO]
    if generated:
        return f'column "{generated[0]}" is generated: its value is not sent, but computed again'
    if not all(map(PrintedFilter(printed).holds, _written_constants(stored))):
        return "constants are stored in a form that this software does not read"
    return unsupported_reason(fold_constants(stored))


def _written_constants(expression: Expression) -> Iterator[Constant]:
    """The constants that are printed as they are stored; the length of a char(5) is not."""
    if isinstance(expression, Constant):
        yield expression
    is_cast = isinstance(expression, Function) and expression.function in LENGTH_CASTS
    for child in children(expression)[: 1 if is_cast else None]:
        yield from _written_constants(child)


def _with_generation(columns: tuple[TableColumn, ...], table: Table) -> tuple[TableColumn, ...]:
    """The columns, and those that the generation expressions of the generated ones read."""
    names = {column.name for column in columns}.union(*(_sources(column, table) for column in columns))
    return tuple(column for column in table.columns if column.name in names)


def _sources(column: TableColumn, table: Table) -> set[str]:
    """The columns that the column's generation expression reads; none of a plain column."""
    plain = [source for source in table.columns if source.generated is Generated.NO]
    if column.generation_tree is None:
        # At least those whose names occur in its text.
        words = {word.strip('"').replace('""', '"') for word in _NAMES.findall(column.generation_sql or "")}
        return words & {source.name for source in plain}
    read = attnums_in(read_node(column.generation_tree))
    return {source.name for source in plain if source.attnum in read}


_NAMES: Final = re.compile(r'"(?:[^"]|"")+"|[^\W\d][\w$]*')
