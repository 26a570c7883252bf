"""COPY out of one server into another: bytes to bytes, values never become Python objects.

COPY's text format needs no conversion for any type or version: one server's `copy … from stdin` reads exactly
what another's `copy … to stdout` writes (R7.7). Both sessions are pinned to UTF8.

libpq returns one row at a time. Received rows are joined into blocks, because waiting for the socket and
sending cost much more than a row.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import errors as pg
from psycopg import pq, sql

from cdc_replay.errors import (
    ApplyConflict,
    CdcReplayError,
    ServerUnavailable,
    SubscriberNotReady,
    SubscriberNotWritable,
)
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import READ_ONLY_REMEDY, Connection, translated_errors
from cdc_replay.postgres.identifiers import column_list
from cdc_replay.postgres.planned_tables import publisher_read_errors

BLOCK_BYTES: Final = 128 * 1024
"""The size at which a block of rows is sent."""

_MAY_WRITE: Final = (
    "On the subscriber, grant the role SELECT and INSERT on the table, UPDATE and DELETE where rows are"
    " replaced, and USAGE on its schema."
)

Progress = Callable[[int], None]
"""Called with the size of every block that was sent."""


class RateLimiter:
    """Limits a copy to an average number of bytes per second since it began.

    The sender waits, so the server that is read from waits too and nothing is buffered in between.
    """

    def __init__(
        self,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._clock, self._wait = clock, wait
        self._began = clock()
        self._sent = 0

    def __call__(self, size: int) -> None:
        """Wait until `size` more bytes are within the rate."""
        self._sent += size
        ahead = self._sent / self._rate - (self._clock() - self._began)
        if ahead > 0:
            self._wait(ahead)


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Where rows go: `relation` receives them, errors name `table`, which it is or stands for.

    `is_new`: this transaction created the relation, so that its rows can be frozen.
    """

    relation: sql.Composable
    table: QualifiedName
    columns: tuple[str, ...]
    is_new: bool = False

    @property
    def statement(self) -> sql.Composed:
        """The `copy … from stdin` that receives the rows."""
        options = sql.SQL(" with (freeze)" if self.is_new else "")
        return sql.SQL("copy {}{} from stdin{}").format(self.relation, column_list(self.columns), options)


@dataclass(frozen=True, slots=True)
class WholeTable:
    """A plain table that COPY reads without its inheritance children.

    COPY of a table needs no plan; planning would evaluate constant parts of index and statistics expressions,
    which may call functions of the table's owner.
    """

    relation: sql.Identifier
    columns: tuple[str, ...]


Source: TypeAlias = sql.Composable | WholeTable
"""A query, or a table that is read whole."""


@dataclass(frozen=True, slots=True)
class CopyCounts:
    """How much a copy moved; `bytes` in COPY's text format."""

    rows: int
    bytes: int


def copy_across(
    source: Connection,
    sources: Iterable[Source],
    destination: Connection,
    target: CopyTarget,
    progress: Progress | None = None,
) -> CopyCounts:
    """Copy the rows of `sources`, one after another, into `target` with a single COPY.

    Both connections stay in the caller's transaction; nothing is committed. The columns of every source match
    those of the target by position.

    Raises:
        MissingPrivilege: if a role may not read or write the table; it names the table and the side.
        InvalidFilter: if a query fails on a value, which only a row filter can cause.
        PublisherNotReady: if the source does not exist any more, or the query fails for another reason.
        ApplyConflict: if the target rejects a row: a duplicate key, a constraint, a value that its type does
            not accept (R8.5).
        SubscriberNotReady: if the target does not exist any more, or rejects the row in another way.
        SubscriberNotWritable: if the subscriber is read-only or full.
        ServerUnavailable: if a connection is lost.
    """
    size = 0
    with subscriber_write_errors(target.table), destination.cursor() as cursor:
        with cursor.copy(target.statement) as into:
            for rows in sources:
                for block in _read(source, rows, target.table):
                    into.write(block)
                    size += len(block)
                    if progress is not None:
                        progress(len(block))
        return CopyCounts(cursor.rowcount, size)


def _read(source: Connection, rows: Source, table: QualifiedName) -> Iterator[bytearray]:
    """Blocks of whole rows in COPY's text format."""
    blocks = _blocks(source, sql.SQL("copy {} to stdout").format(_as_copied(rows)))
    while True:
        with publisher_read_errors(table):
            block = next(blocks, None)
        if block is None:
            return
        yield block


def _as_copied(rows: Source) -> sql.Composed:
    if isinstance(rows, WholeTable):
        return sql.SQL("{}{}").format(rows.relation, column_list(rows.columns))
    return sql.SQL("({})").format(rows)


def _blocks(source: Connection, statement: sql.Composed) -> Iterator[bytearray]:
    with source.cursor() as cursor, cursor.copy(statement) as out:
        received = source.pgconn.get_copy_data
        while first := out.read():  # waits
            block, size = bytearray(first), 1
            while size > 0 and len(block) < BLOCK_BYTES:
                size, row = received(1)  # 0: nothing more has arrived, -1: the end
                block += row
            yield block
            if size < 0:
                _finish(source)
                return


def _finish(source: Connection) -> None:
    results: list[Any] = []
    while (result := source.pgconn.get_result()) is not None:
        results.append(result)
    if results[0].status != pq.ExecStatus.COMMAND_OK:
        raise pg.error_from_result(results[0])


@contextlib.contextmanager
def subscriber_write_errors(table: QualifiedName) -> Iterator[None]:
    """Raise the subscriber's errors about rows of `table` as errors that name it.

    Raises:
        ApplyConflict, SubscriberNotReady, SubscriberNotWritable, MissingPrivilege, ServerUnavailable: see
            `copy_across`.
    """
    action = f'cannot write table "{table}" of the subscriber'
    try:
        with translated_errors(action, grant=_MAY_WRITE):
            yield
    except psycopg.Error as error:
        kind, hint, rule = _reason(error)
        message = f"{action}: {error.diag.message_primary}"
        raise kind(message, detail=error.diag.message_detail, hint=hint, rule=rule) from error


def _reason(error: psycopg.Error) -> tuple[type[CdcReplayError], str | None, str | None]:
    """The error's class, remedy and rule."""
    kind: type[CdcReplayError] = SubscriberNotReady
    hint: str | None = "Remove the cause of the error on the subscriber, then run the command again."
    rule: str | None = None
    match error:
        case pg.UniqueViolation() | pg.ExclusionViolation():
            kind, rule = ApplyConflict, "R8.5"
            hint = "Delete the subscriber's rows, or the publisher's rows that have the same key."
        case pg.IntegrityError() | pg.DataError():
            kind, rule = ApplyConflict, "R8.5"
            hint = (
                "Change the constraint or the type of the subscriber's column so that it accepts the value."
            )
        case pg.UndefinedTable() | pg.UndefinedColumn() | pg.InvalidSchemaName():
            rule = "R8.1"
            hint = (
                "Create the table on the subscriber with the published columns, then run the command again."
            )
        case pg.ReadOnlySqlTransaction():
            kind = SubscriberNotWritable
            hint = READ_ONLY_REMEDY
        case pg.DiskFull():
            kind = SubscriberNotWritable
            hint = "Free space on the subscriber's disk, then run the command again to resume."
        case psycopg.OperationalError():
            kind, hint = ServerUnavailable, None
        case _:
            pass
    return kind, hint, rule
