"""A connection that evaluates filters: rows in by COPY, one text of answers out.

    values ── COPY FROM STDIN ──▶ pg_temp.cdc_replay_check_N (row, typed columns)
    "tfn…" ◀── string_agg of the filter, in the order of the rows ──┘

The table (`check_table`) has columns of the published types and collations, so that comparisons mean the
same (R3.16), and values pass PostgreSQL's own input functions. A generated column is generated again, because
the wire omits it (R3.13). The answers come as one value: a client takes longer to receive 50,000 rows of one
letter than the server needs to evaluate an ordinary filter for them.

The tables are temporary: a process that dies leaves nothing behind.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.csv

from cdc_replay.errors import ServerUnavailable
from cdc_replay.filters.check_table import CheckTable, Question
from cdc_replay.model.publication import RowFilter
from cdc_replay.postgres.connection import Connection, connect, translated_errors

Answers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int8]]
"""1, 0 or -1 (TRUE, FALSE, NULL) per row."""

NULL: Final = -1
_LETTERS: Final = {ord("t"): 1, ord("f"): 0}

_NOT_THE_FILTERS_FAULT: Final = frozenset({"08", "25", "26", "28", "3D", "40", "53", "55", "57", "58"})
"""Classes of SQLSTATE: connections, transactions, resources, operators, the system."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What the server said, and about which row of those that it was asked about; None if about none."""

    said: str
    sqlstate: str | None
    row: int | None


class FilterFailed(Exception):
    """A filter cannot be evaluated, whatever is tried."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.said)
        self.failure = failure


class FilterSession:
    """Opens a connection with the first question, and keeps it."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: Connection | None = None
        self._tables: dict[tuple[int, tuple[RowFilter, ...]], CheckTable] = {}
        self._made: set[int] = set()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()

    def answers(self, question: Question, values: pa.Table) -> Answers:
        """The answers for all rows of `values`.

        The first column of `values` is replaced by the row's number; of the others, all strings, there is one
        for each column of the question that is not generated.

        Raises:
            FilterFailed: if the filter fails, with the first row that makes it fail.
            InvalidFilter: if it has what PostgreSQL accepts in no filter, or its generated columns have.
            ServerUnavailable, MissingPrivilege: if the server cannot be asked.
        """
        try:
            return self._ask(question, values)
        except psycopg.Error as error:
            row, cause = self._first_failing_row(question, values, error)
            said = cause.diag.message_primary or str(cause)
            raise FilterFailed(Failure(said, cause.sqlstate, row)) from error

    def _first_failing_row(
        self, question: Question, values: pa.Table, error: psycopg.Error
    ) -> tuple[int | None, psycopg.Error]:
        """By halves, with its own error; none if the filter fails without any row, or does not fail again."""
        if self._error_of(question, values.slice(0, 0)) is not None:
            return None, error
        start, count = 0, values.num_rows
        while count > 1:
            half = count // 2
            if self._error_of(question, values.slice(start, half)) is not None:
                count = half
            else:
                start, count = start + half, count - half
        found = self._error_of(question, values.slice(start, count))
        return (None, error) if found is None else (start, found)

    def _error_of(self, question: Question, values: pa.Table) -> psycopg.Error | None:
        try:
            self._ask(question, values)
        except psycopg.Error as error:
            return error
        return None

    def _ask(self, question: Question, values: pa.Table) -> Answers:
        what = f'cannot evaluate a row filter of table "{question.table}"'
        with translated_errors(what):
            try:
                return self._exchange(question, values)
            except psycopg.Error as error:
                if error.sqlstate is not None and error.sqlstate[:2] in _NOT_THE_FILTERS_FAULT:
                    raise ServerUnavailable(
                        f"{what}: {error.diag.message_primary} (SQLSTATE {error.sqlstate})",
                        hint="Run the command again when the publisher has recovered.",
                    ) from error
                raise

    def _exchange(self, question: Question, values: pa.Table) -> Answers:
        if self._connection is None:
            self._connection = connect(self._dsn, purpose="row filters")
        table = self._check_table(question, self._connection)
        is_new = question.number not in self._made
        with self._connection.transaction(), self._connection.cursor() as cursor:
            # Not ON COMMIT DELETE ROWS, which empties the tables of all questions at every commit.
            if is_new:
                table.create(self._connection)
            else:
                cursor.execute(table.empty)
            with cursor.copy(table.fill) as copy:
                copy.write(_csv(values))
            (letters,) = cursor.execute(table.select).fetchone() or (None,)
        self._made.add(question.number)
        found = np.frombuffer((letters or "").encode(), np.uint8)
        return np.select([found == letter for letter in _LETTERS], list(_LETTERS.values()), NULL).astype(
            np.int8
        )

    def _check_table(self, question: Question, connection: Connection) -> CheckTable:
        # Of some of the filters alone another expression is asked for, over the same table.
        key = (question.number, question.filters)
        if key not in self._tables:
            self._tables[key] = CheckTable.of(question, connection)
        return self._tables[key]


def _csv(values: pa.Table) -> memoryview:
    """The rows in COPY's CSV: a number for their order, then the values; NULL is empty, text quoted."""
    numbers = pa.array(np.arange(values.num_rows))
    sink = io.BytesIO()
    options = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")
    # One chunk: write_csv (Arrow 26) writes rubbish where the first chunk of a table is empty.
    pyarrow.csv.write_csv(values.set_column(0, "0", numbers).combine_chunks(), sink, options)
    return sink.getbuffer()
