"""A connection that evaluates filters: rows in by COPY, one string of answers out.

    values ── COPY FROM STDIN ──▶ pg_temp.cdc_replay_check_N (row, typed columns)
    "tfn…" ◀── string_agg of the filter, in the order of the rows ──┘

The table (`check_table`) has columns of the published types and collations, so that comparisons mean the
same (R3.16), and PostgreSQL's own input functions read the values. The server computes generated columns,
which are not sent (R3.13). The answers are one value: receiving 50,000 rows of one letter takes longer than
evaluating an ordinary filter for them.

The tables are temporary: a process that dies leaves nothing.
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

_SERVER_ERROR_CLASSES: Final = frozenset({"08", "25", "26", "28", "3D", "40", "53", "55", "57", "58"})
"""Classes of SQLSTATE: connections, transactions, resources, operators, the system."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The server's error, and the row that caused it; None if no row did."""

    message: str
    sqlstate: str | None
    row: int | None


class FilterFailed(Exception):
    """Evaluating a filter fails, and would fail again."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class FilterSession:
    """A connection for questions, opened at the first one."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: Connection | None = None
        self._tables: dict[tuple[int, tuple[RowFilter, ...]], CheckTable] = {}
        self._created_ids: set[int] = set()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()

    def answers(self, question: Question, values: pa.Table) -> Answers:
        """The answers for all rows of `values`.

        The first column of `values` is replaced by the row's ordinal; the others, all strings, are the
        question's columns that are not generated.

        Raises:
            FilterFailed: if the filter fails, with the first row for which it does.
            InvalidFilter: if the filter or a generated column has what PostgreSQL accepts in none.
            ServerUnavailable, MissingPrivilege: if the server cannot evaluate filters.
        """
        try:
            return self._ask(question, values)
        except psycopg.Error as error:
            row, cause = self._first_failing_row(question, values, error)
            message = cause.diag.message_primary or str(cause)
            raise FilterFailed(Failure(message, cause.sqlstate, row)) from error

    def _first_failing_row(
        self, question: Question, values: pa.Table, error: psycopg.Error
    ) -> tuple[int | None, psycopg.Error]:
        """By bisection, with its own error; None if the filter fails for no row, or does not fail again."""
        if self._error_of(question, values.slice(0, 0)) is not None:
            return None, error
        start, count = 0, values.num_rows
        while count > 1:
            half = count // 2
            if self._error_of(question, values.slice(start, half)) is not None:
                count = half
            else:
                start, count = start + half, count - half
        row_error = self._error_of(question, values.slice(start, count))
        return (None, error) if row_error is None else (start, row_error)

    def _error_of(self, question: Question, values: pa.Table) -> psycopg.Error | None:
        try:
            self._ask(question, values)
        except psycopg.Error as error:
            return error
        return None

    def _ask(self, question: Question, values: pa.Table) -> Answers:
        error_prefix = f'cannot evaluate a row filter of table "{question.table}"'
        with translated_errors(error_prefix):
            try:
                return self._exchange(question, values)
            except psycopg.Error as error:
                if error.sqlstate is not None and error.sqlstate[:2] in _SERVER_ERROR_CLASSES:
                    raise ServerUnavailable(
                        f"{error_prefix}: {error.diag.message_primary} (SQLSTATE {error.sqlstate})",
                        hint="Run the command again when the publisher has recovered.",
                    ) from error
                raise

    def _exchange(self, question: Question, values: pa.Table) -> Answers:
        if self._connection is None:
            self._connection = connect(self._dsn, purpose="row filters")
        table = self._check_table(question, self._connection)
        is_new = question.check_id not in self._created_ids
        with self._connection.transaction(), self._connection.cursor() as cursor:
            # Not ON COMMIT DELETE ROWS, which empties the tables of all questions at every commit.
            if is_new:
                table.create(self._connection)
            else:
                cursor.execute(table.empty)
            with cursor.copy(table.fill) as copy:
                copy.write(_csv(values))
            (letters,) = cursor.execute(table.select).fetchone() or (None,)
        self._created_ids.add(question.check_id)
        octets = np.frombuffer((letters or "").encode(), np.uint8)
        return np.select([octets == letter for letter in _LETTERS], list(_LETTERS.values()), NULL).astype(
            np.int8
        )

    def _check_table(self, question: Question, connection: Connection) -> CheckTable:
        # A question with a part of the filters has another expression over the same table.
        key = (question.check_id, question.filters)
        if key not in self._tables:
            self._tables[key] = CheckTable.for_question(question, connection)
        return self._tables[key]


def _csv(values: pa.Table) -> memoryview:
    """The rows in COPY's CSV: an ordinal, then the values; NULL is empty, text quoted."""
    row_numbers = pa.array(np.arange(values.num_rows))
    sink = io.BytesIO()
    options = pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed")
    # One chunk: write_csv (Arrow 26) writes garbage where the first chunk of a table is empty.
    pyarrow.csv.write_csv(values.set_column(0, "0", row_numbers).combine_chunks(), sink, options)
    return sink.getbuffer()
