"""The peek: what a logical slot holds, read without moving it.

A peek is one `COPY` of the slot function's result in binary format. The server holds the result (R1.32), the
client holds one batch of messages at a time and makes no Python object per value.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from cdc_replay.errors import PublicationMissing
from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.slot import RESYNCHRONIZE, slot_errors

logger = logging.getLogger(__name__)

Buffer: TypeAlias = bytes | bytearray | memoryview

# As many as make the cost per batch negligible; five times as many cost 60 MB more and no less time.
BATCH_ROWS: Final = 10_000
BATCH_BYTES: Final = 16 << 20

OUR_PREFIXES: Final = b"cdc_replay."
"""How the prefixes of all logical messages of this software begin."""

MAX_MESSAGE_BYTES: Final = 32 << 20
"""A logical message that is longer is not of this software: the catalogs of 50,000 tables take less."""

# Any role can write logical messages (77 is M), as large as it likes: of those that are not wanted only the
# beginning is sent, which says so. With streaming, an xid is before flags, LSN and prefix.
PEEK: Final = sql.SQL(
    "copy (select lsn, xid, case when pg_catalog.get_byte(data, 0) <> 77"
    " or pg_catalog.length(data) <= {most_bytes} and {prefix} in"
    " (pg_catalog.substr(data, 11, {prefix_bytes}), pg_catalog.substr(data, 15, {prefix_bytes}))"
    " then data else pg_catalog.substr(data, 1, 32) end"
    " from pg_catalog.pg_logical_slot_peek_binary_changes("
    "{slot}, {upto_lsn}, {upto_nchanges}, variadic {options})) to stdout (format binary)"
)

# COPY BINARY: a header before the first row, then per row the number of fields and length and value of each.
_COPY_HEADER_BYTES: Final = 19
_COPY_TRAILER_BYTES: Final = 2
_LSN_OFFSET: Final = 2 + 4
_XID_OFFSET: Final = _LSN_OFFSET + 8 + 4
_DATA_OFFSET: Final = _XID_OFFSET + 4 + 4
_WITHOUT_WAITING: Final = 1
# What the server says in it is about synchronized_standby_slots (R1.32), not about changes. Its SQLSTATE is
# that of a missing publication, its text may be in any language.
_WAITS_FOR_STANDBYS: Final = "StandbySlotsHaveCaughtup"
# Arrow computes with `stop`: its default, the largest number there is, overflows there.
_NO_END: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PeekOptions:
    """What pgoutput is asked for; never for two_phase: even a peek with it would change the slot (R1.25)."""

    slot: str
    publications: tuple[str, ...]
    streaming: bool = False
    two_phase: bool = False
    """The slot has the property; streamed transactions can then be prepared, which needs protocol 3."""
    messages: bool = True
    """With what `pg_logical_emit_message` wrote."""
    origin_none: bool = False
    """Without changes and transactions that carry an origin (R8.19); from PostgreSQL 16 on."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names and values of the plugin's options, alternating (R1.18)."""
        version = (3 if self.two_phase else 2) if self.streaming else 1
        streaming = ("streaming", "on") if self.streaming else ()
        origin = ("origin", "none") if self.origin_none else ()
        return (
            "proto_version", str(version), "publication_names", identifier_list(self.publications),
            "messages", str(self.messages).lower(), *streaming, *origin,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RawMessages:
    """Consecutive messages as the server sent them: equal lengths, in the stream's order (R1.22).

    `data` is an Arrow array of type binary; `lsn` and `xid` are what the slot function says beside it.
    """

    lsn: npt.NDArray[np.int64]
    xid: npt.NDArray[np.int64]
    data: pa.BinaryArray


def identifier_list(names: Sequence[str]) -> str:
    """Names as a list of quoted identifiers, so that none is folded to lower case (R1.18)."""
    return ",".join('"' + name.replace('"', '""') + '"' for name in names)


def peek(
    connection: Connection, options: PeekOptions, *, upto_lsn: Lsn, upto_nchanges: int | None
) -> Generator[RawMessages]:
    """The messages of the transactions that commit before `upto_lsn` and that the slot has not confirmed.

    Ends early, after a whole transaction, once `upto_nchanges` messages are out; with streaming perhaps
    inside one (R1.23, R1.24); None sets no such bound. Batches are bounded in messages and bytes, one message
    may exceed them. Use it in `contextlib.closing`: until it is read to its end or closed, the session can do
    nothing else.

    Raises:
        SlotMissing, SlotActive, SlotLost, PublicationMissing, MissingPrivilege: as `replication` says.
    """
    statement = PEEK.format(
        slot=sql.Literal(options.slot),
        upto_lsn=sql.Literal(str(upto_lsn)),
        upto_nchanges=sql.Literal(upto_nchanges),
        options=sql.Literal(list(options.arguments)),
        most_bytes=sql.Literal(MAX_MESSAGE_BYTES),
        prefix=sql.Literal(OUR_PREFIXES),
        prefix_bytes=sql.Literal(len(OUR_PREFIXES)),
    )
    with (
        slot_errors(f'cannot read replication slot "{options.slot}"'),
        _warnings_refused(connection),
        connection.cursor() as cursor,
        cursor.copy(statement) as copy,
    ):
        yield from _batches(copy)


def _batches(copy: psycopg.Copy) -> Iterator[RawMessages]:
    """The rows of a COPY BINARY, many at a time.

    psycopg's own loop costs more than all else that a capture does with a row. So what has arrived is taken
    from libpq, and psycopg waits for more, and has the end. Each row is copied at once: while its buffer is
    held, libpq has to allocate another for the next.
    """
    libpq = copy.connection.pgconn
    take = libpq.get_copy_data
    row: Buffer = copy.read()[_COPY_HEADER_BYTES:]
    size = len(row)
    while size > _COPY_TRAILER_BYTES:
        held, sizes, free = io.BytesIO(), list[int](), BATCH_BYTES
        while size > _COPY_TRAILER_BYTES and free > 0 and len(sizes) < BATCH_ROWS:
            held.write(row)
            sizes.append(size)
            free -= size
            size, row = take(_WITHOUT_WAITING)
            if size == 0:
                row = copy.read()
                size = len(row)
        if size < 0:
            raise _ended_early(libpq)
        yield _raw_messages(held.getvalue(), sizes)
    copy.read()


def _ended_early(libpq: psycopg.pq.abc.PGconn) -> psycopg.Error:
    """What the server has said instead of the trailer; the session is done with the COPY then."""
    result = libpq.get_result()
    while libpq.get_result() is not None:
        continue
    if result is None:
        return psycopg.OperationalError(libpq.get_error_message())
    return psycopg.errors.error_from_result(result)


def _raw_messages(rows: bytes, sizes: Sequence[int]) -> RawMessages:
    """Rows of COPY BINARY, one after another, as columns."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])
    content = np.frombuffer(rows, dtype=np.uint8)
    whole = pa.BinaryArray.from_buffers(
        pa.binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(rows)]
    )
    starts = offsets[:-1]
    return RawMessages(
        lsn=_big_endian(content, starts + _LSN_OFFSET, 8),
        xid=_big_endian(content, starts + _XID_OFFSET, 4),
        data=pc.binary_slice(whole, start=_DATA_OFFSET, stop=_NO_END),
    )


def _big_endian(
    content: npt.NDArray[np.uint8], positions: npt.NDArray[np.int32], width: int
) -> npt.NDArray[np.int64]:
    """The unsigned integers of `width` bytes that start at `positions`."""
    numbers = np.zeros(len(positions), dtype=np.int64)
    for byte in range(width):
        numbers = numbers << 8 | content[positions + byte]
    return numbers


@contextlib.contextmanager
def _warnings_refused(connection: Connection) -> Iterator[None]:
    """PostgreSQL 18 skips a missing publication with a warning only: changes would pass unseen (R1.19)."""
    warnings: list[str] = []

    def keep(diagnostic: psycopg.errors.Diagnostic) -> None:
        if diagnostic.severity_nonlocalized != "WARNING":
            return
        if diagnostic.source_function == _WAITS_FOR_STANDBYS:
            logger.warning("the server waits for a standby: %s", diagnostic.message_primary)
        else:
            warnings.append(diagnostic.message_primary or "")

    connection.add_notice_handler(keep)
    try:
        yield
    finally:
        connection.remove_notice_handler(keep)
    if warnings:
        raise PublicationMissing(
            "the server left changes out while it decoded",
            detail="It said: " + "; ".join(dict.fromkeys(warnings)),
            hint="A capture publication was dropped while its slot was in use. " + RESYNCHRONIZE,
            rule="R1.19",
        )
