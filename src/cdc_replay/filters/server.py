"""Filters that only PostgreSQL can answer exactly: rows go through a temporary table on the publisher.

On the executors, for each Arrow batch and each check: the values that the check reads, of the rows that it is
asked about, are copied into a typed temporary table through PostgreSQL's own input functions, the filter is
selected over it, and the answers come back in the order of the rows. That is one round trip per batch and
check, and none per row.

    batch ── rows of its routes and kinds ──▶ COPY FROM STDIN ──▶ pg_temp.check_N (row, typed columns)
    batch ◀── array<boolean>, element N ───── COPY (SELECT filter ORDER BY row) TO STDOUT ◀──┘

The table's columns have the published column's type and collation, so that comparisons mean the same (R3.16).
A generated column is generated again, because the wire omits it (R3.13). A task holds one connection, opened
for the first row that needs it and closed with the task; its tables are temporary, so a task that dies leaves
nothing behind.

An error of the filter (a division by zero) stops a native subscription too. It is raised for a row only where
PostgreSQL would have evaluated the filter for it: the routes and kinds of a check say which.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from psycopg import sql
from pyspark.sql.types import ArrayType, BooleanType, StructField, StructType

from cdc_replay.errors import InvalidFilter
from cdc_replay.filters.compile import ServerFilter
from cdc_replay.model.change import ChangeKind
from cdc_replay.model.publication import Generated, TableColumn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, connect, translated_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROW_KINDS: Final = frozenset({ChangeKind.INSERT, ChangeKind.UPDATE, ChangeKind.DELETE})
"""The kinds of change that have rows to filter."""

_NULL: Final = -1
_ANSWERS: Final = {ord("t"): 1, ord("f"): 0, ord("n"): _NULL}


@dataclass(frozen=True, slots=True)
class ServerCheck:
    """A filter to ask PostgreSQL about, and which rows to ask it about.

    Its answer is element `number` of the answers. It is asked about rows whose `route` is in `routes` and
    whose `kind` is in `kinds`. `columns` says where in a row's value array each column is; None where the row
    does not have it, as for a generated column, which is computed, or one that the relation got later, which
    is NULL.
    """

    number: int
    routes: frozenset[int]
    sql: str
    columns: tuple[tuple[TableColumn, int | None], ...]
    table: QualifiedName
    kinds: frozenset[ChangeKind] = ROW_KINDS

    @classmethod
    def of(
        cls,
        compiled: ServerFilter,
        held: Sequence[str],
        *,
        number: int,
        routes: Iterable[int],
        kinds: Iterable[ChangeKind] = ROW_KINDS,
    ) -> Self:
        """The check of a compiled filter, over rows whose value arrays hold the columns `held` in order."""
        at = {name: position for position, name in enumerate(held)}
        columns = tuple(_source(column, at.get(column.name)) for column in compiled.columns)
        return cls(number, frozenset(routes), compiled.sql, columns, compiled.table, frozenset(kinds))


def _source(column: TableColumn, position: int | None) -> tuple[TableColumn, int | None]:
    """A generated column whose value was sent (R6.9) is a column like any other."""
    if position is not None and column.generated is not Generated.NO:
        return dataclasses.replace(column, generated=Generated.NO, generation_sql=None), position
    return column, position


def evaluate_on_server(
    frame: DataFrame, checks: Sequence[ServerCheck], dsn: str, *, rows: Mapping[str, str]
) -> DataFrame:
    """`frame` with the answers of PostgreSQL, evaluated lazily on the executors.

    Args:
        frame: has `route int`, `kind string` and the arrays that `rows` names.
        checks: each with its own number; numbers are positions in the answers.
        dsn: where to evaluate: the publisher, whose role must be allowed to create temporary tables.
        rows: column of values (`array<string>`: PostgreSQL's text, NULL for NULL and for what was not sent) →
            the column `array<boolean>` to add. Element `number` is the check's answer: TRUE, FALSE, or NULL
            where the filter is NULL, the check is not asked about that row, or the row has no values.

    Raises (in the action that evaluates the frame, as text inside Spark's own exception):
        InvalidFilter: if evaluating a filter fails.
        ServerUnavailable, MissingPrivilege: if the server cannot be asked.
    """
    schema = StructType(list(frame.schema.fields))
    for answers in rows.values():
        schema.add(StructField(answers, ArrayType(BooleanType())))
    work = functools.partial(_with_answers, checks=tuple(checks), dsn=dsn, rows=dict(rows))
    return frame.mapInArrow(work, schema)


def _with_answers(
    batches: Iterator[pa.RecordBatch], *, checks: tuple[ServerCheck, ...], dsn: str, rows: dict[str, str]
) -> Iterator[pa.RecordBatch]:
    with contextlib.closing(_Server(dsn)) as server:
        for batch in batches:
            yield _answered(batch, checks, server, rows)


def _answered(
    batch: pa.RecordBatch, checks: tuple[ServerCheck, ...], server: _Server, rows: dict[str, str]
) -> pa.RecordBatch:
    width = max((check.number + 1 for check in checks), default=0)
    answers = {source: np.full((batch.num_rows, width), _NULL, np.int8) for source in rows}
    for check in checks:
        asked = {source: _asked(batch, check, source) for source in rows}
        tables = [_values(batch.column(source), indices, check) for source, indices in asked.items()]
        # One chunk: write_csv (Arrow 26) writes rubbish where the first chunk of a table is empty.
        table = pa.concat_tables(tables).combine_chunks()
        if table.num_rows == 0:
            continue
        found = server.answers(check, table)
        for source, indices in asked.items():
            answers[source][indices, check.number], found = found[: len(indices)], found[len(indices) :]
    return pa.RecordBatch.from_arrays(
        [*batch.columns, *(_boolean_lists(each) for each in answers.values())],
        names=[*batch.schema.names, *rows.values()],
    )


def _asked(
    batch: pa.RecordBatch, check: ServerCheck, source: str
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The rows of the batch whose values in `source` the check is asked about."""
    mask = pc.and_(_is_in(batch, "route", check.routes), pc.is_valid(batch.column(source)))
    if check.kinds != ROW_KINDS:
        mask = pc.and_(mask, _is_in(batch, "kind", {kind.value for kind in check.kinds}))
    indices: np.ndarray[tuple[int], np.dtype[np.uint64]] = pc.indices_nonzero(mask).to_numpy()
    return indices


def _is_in(batch: pa.RecordBatch, name: str, wanted: Iterable[int] | Iterable[str]) -> pa.Array:
    column = batch.column(name)
    return pc.is_in(column, value_set=pa.array(list(wanted), type=column.type))


def _values(
    source: pa.Array, indices: np.ndarray[tuple[int], np.dtype[np.uint64]], check: ServerCheck
) -> pa.Table:
    """The values that the check reads, one string column each; a generated column is not among them."""
    taken = source.take(pa.array(indices))
    none = pa.nulls(len(indices), pa.string())
    sent = [position for column, position in check.columns if column.generated is Generated.NO]
    columns = [none if position is None else pc.list_element(taken, position) for position in sent]
    # The first column keeps the count of rows where a filter reads no column at all.
    numbers = pa.nulls(len(indices), pa.int64())
    return pa.Table.from_arrays([numbers, *columns], names=[str(index) for index in range(len(columns) + 1)])


def _boolean_lists(answers: np.ndarray[tuple[int, int], np.dtype[np.int8]]) -> pa.Array:
    count, width = answers.shape
    flat = answers.reshape(-1)
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width)
    return pa.ListArray.from_arrays(offsets, pa.array(flat == 1, mask=flat == _NULL))


class _Server:
    """The task's connection, and the temporary tables on it."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: Connection | None = None
        self._tables: set[int] = set()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()

    def answers(self, check: ServerCheck, table: pa.Table) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
        """1, 0 or -1 (TRUE, FALSE, NULL) per row of `table`, in its order.

        Raises:
            InvalidFilter: if the filter cannot be evaluated.
            ServerUnavailable, MissingPrivilege: if the server cannot be asked.
        """
        try:
            with translated_errors(f'cannot evaluate a row filter of table "{check.table}"'):
                return self._ask(check, table)
        except psycopg.Error as error:
            said = error.diag.message_primary or str(error)
            raise InvalidFilter(
                f'cannot evaluate a row filter of table "{check.table}": {said}',
                detail=f"The filter is {check.sql}.",
                hint="PostgreSQL stops at this change too. Change the filter so that it holds for every row.",
                rule="R3.1",
            ) from error

    def _ask(self, check: ServerCheck, table: pa.Table) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
        if self._connection is None:
            self._connection = connect(self._dsn, purpose="row filters")
        statements = _Statements.of(check)
        with self._connection.transaction(), self._connection.cursor() as cursor:
            # Not ON COMMIT DELETE ROWS, which empties the tables of all checks at every commit.
            cursor.execute(statements.empty if check.number in self._tables else statements.create)
            self._tables.add(check.number)
            with cursor.copy(statements.fill) as copy:
                copy.write(_csv(table))
            with cursor.copy(statements.select) as copy:
                found = np.frombuffer(b"".join(copy), np.uint8)
        # Each line is one of t, f, n and a line feed.
        letters = found[::2]
        return np.select([letters == letter for letter in _ANSWERS], list(_ANSWERS.values())).astype(np.int8)


def _csv(table: pa.Table) -> memoryview:
    """The rows in COPY's CSV: a number for their order, then the values; NULL is empty, text quoted."""
    numbers = pa.array(np.arange(table.num_rows))
    sink = io.BytesIO()
    options = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")
    pyarrow.csv.write_csv(table.set_column(0, "0", numbers), sink, options)
    return sink.getbuffer()


@dataclass(frozen=True, slots=True)
class _Statements:
    """What is executed for a check."""

    create: sql.Composed
    empty: sql.Composed
    fill: sql.Composed
    select: sql.Composed

    @classmethod
    def of(cls, check: ServerCheck) -> Self:
        table = sql.Identifier("pg_temp", f"cdc_replay_check_{check.number}")
        columns = [column for column, _ in check.columns]
        row = sql.Identifier(_unused_name(columns))
        sent = [sql.Identifier(column.name) for column in columns if column.generated is Generated.NO]
        return cls(
            create=sql.SQL("create temporary table {} ({})").format(
                sql.Identifier(f"cdc_replay_check_{check.number}"),
                sql.SQL(", ").join([sql.SQL("{} bigint").format(row), *map(_definition, columns)]),
            ),
            empty=sql.SQL("truncate {}").format(table),
            fill=sql.SQL("copy {} ({}) from stdin (format csv)").format(
                table, sql.SQL(", ").join([row, *sent])
            ),
            select=sql.SQL("copy (select {} from {} order by {}) to stdout (null 'n')").format(
                _as_printed(f"({check.sql})"), table, row
            ),
        )


def _unused_name(columns: Sequence[TableColumn]) -> str:
    name = "row"
    while name in {column.name for column in columns}:
        name += "_"
    return name


def _definition(column: TableColumn) -> sql.Composable:
    parts: list[sql.Composable] = [sql.Identifier(column.name), _as_printed(column.type_sql)]
    if column.collation_sql:
        parts += [sql.SQL("collate"), _as_printed(column.collation_sql)]
    if column.generation_sql:
        kind = sql.SQL("virtual" if column.generated is Generated.VIRTUAL else "stored")
        parts += [sql.SQL("generated always as"), _as_printed(f"({column.generation_sql})"), kind]
    return sql.SQL(" ").join(parts)


def _as_printed(text: str) -> sql.SQL:
    """SQL that the publisher has printed itself (`pg_get_expr`, `format_type`), and that goes back to it."""
    return sql.SQL(text)
