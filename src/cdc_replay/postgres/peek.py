"""Read the contents of a logical slot without advancing it.

A peek is one `COPY` of the slot function's result in binary format. The server holds the whole result
(R1.32), the client one batch of messages at a time; no Python object is created per value.
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
from psycopg import sql

from cdc_replay.arrow.arrays import Bools, Bytes, Int64s, elements_at
from cdc_replay.arrow.byte_slices import ByteSlices
from cdc_replay.errors import InvalidMessage, PublicationMissing
from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.slot import RESYNCHRONIZE, slot_errors

logger = logging.getLogger(__name__)

Buffer: TypeAlias = bytes | bytearray | memoryview

# Enough to make the cost per batch negligible; five times as many cost 60 MB and save no time.
BATCH_ROWS: Final = 10_000
BATCH_BYTES: Final = 16 << 20

OUR_PREFIXES: Final = b"cdc_replay."
"""The start of the prefixes of all our logical messages."""

MAX_MESSAGE_BYTES: Final = 32 << 20
"""A longer logical message is not ours: the catalog of 50,000 tables is smaller."""

# Any role can write logical messages (77 is M) of any size: only the first bytes of foreign ones are sent,
# which identify them as such. With streaming, an xid precedes flags, LSN and prefix.
PEEK: Final = sql.SQL(
    "copy (select lsn, xid, case when pg_catalog.get_byte(data, 0) <> 77"
    " or pg_catalog.length(data) <= {most_bytes} and {prefix} in"
    " (pg_catalog.substr(data, 11, {prefix_bytes}), pg_catalog.substr(data, 15, {prefix_bytes}))"
    " then data else pg_catalog.substr(data, 1, 32) end"
    " from pg_catalog.pg_logical_slot_peek_binary_changes("
    "{slot}, {upto_lsn}, {upto_nchanges}, variadic {options})) to stdout (format binary)"
)

HAS_CHANGES: Final = sql.SQL(
    "select exists (select from pg_catalog.pg_logical_slot_peek_binary_changes("
    "{slot}, {upto_lsn}, 1, variadic {options}))"
)

DECODING_MEMORY: Final = "256MB"
"""Of a session that peeks, while it decodes; PostgreSQL's default is 64 MB."""

_USE_DECODING_MEMORY: Final = """
    select pg_catalog.set_config(name, %s, false) from pg_catalog.pg_settings
    where name = 'logical_decoding_work_mem' and source = 'default'
"""

# COPY BINARY: a header before the first row, then per row the number of fields and length and value of each.
_COPY_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
_COPY_HEADER_BYTES: Final = 19
_COPY_TRAILER: Final = b"\xff\xff"
_COPY_TRAILER_BYTES: Final = len(_COPY_TRAILER)
_BEFORE_DATA: Final = np.dtype(
    [
        ("fields", ">i2"),
        ("lsn_bytes", ">i4"),
        ("lsn", ">i8"),
        ("xid_bytes", ">i4"),
        ("xid", ">u4"),
        ("data_bytes", ">i4"),
    ]
)
"""A row up to its message."""
_FIELDS: Final = 3
_LSN_BYTES: Final = 8
_XID_BYTES: Final = 4
_WITHOUT_WAITING: Final = 1
# Its warnings concern synchronized_standby_slots (R1.32), not changes. They have the SQLSTATE of a missing
# publication, and their text may be in any language.
_WAITS_FOR_STANDBYS: Final = "StandbySlotsHaveCaughtup"


@dataclass(frozen=True, slots=True)
class PeekOptions:
    """The options for pgoutput; never two_phase itself: even a peek with it would change the slot (R1.25)."""

    slot: str
    publications: tuple[str, ...]
    streaming: bool = False
    two_phase: bool = False
    """The slot's property; streamed transactions can then be prepared, which requires protocol 3."""
    messages: bool = True
    """Include messages of `pg_logical_emit_message`."""
    origin_none: bool = False
    """Exclude changes and transactions that have an origin (R8.19); from PostgreSQL 16 on."""

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
    """Consecutive messages in the stream's order (R1.22); `lsn` and `xid` are the slot function's columns."""

    lsn: Int64s
    xid: Int64s
    data: ByteSlices


def use_decoding_memory(connection: Connection) -> None:
    """Let the session decode larger transactions in memory, unless an administrator has set the limit.

    The server writes a transaction that exceeds `logical_decoding_work_mem` to files, change by change.
    """
    connection.execute(_USE_DECODING_MEMORY, (DECODING_MEMORY,))


def identifier_list(names: Sequence[str]) -> str:
    """Names as a list of quoted identifiers, so that case is preserved (R1.18)."""
    return ",".join('"' + name.replace('"', '""') + '"' for name in names)


def peek(
    connection: Connection, options: PeekOptions, *, upto_lsn: Lsn, upto_nchanges: int | None
) -> Generator[RawMessages]:
    """The messages of unconfirmed transactions that commit before `upto_lsn`.

    The server begins when the first ones are asked for, and decodes all before it sends any (R1.32). Ends
    early, after a whole transaction, once `upto_nchanges` messages were sent; with streaming perhaps inside
    one (R1.23, R1.24). None: no such limit. Batches are limited in messages and bytes; one message may exceed
    them. Use it in `contextlib.closing`: until it is exhausted or closed, the session can do nothing else.

    Raises:
        SlotMissing, SlotActive, SlotLost, PublicationMissing, MissingPrivilege: as `slot` describes.
        InvalidMessage: if the server sends something else.
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
        _warnings_as_errors(connection),
        _form_errors(options.slot),
        connection.cursor() as cursor,
        cursor.copy(statement) as copy,
    ):
        yield from _batches(copy)


def has_changes(connection: Connection, options: PeekOptions, *, upto_lsn: Lsn) -> bool:
    """Whether a peek up to `upto_lsn` would have a message; no message is sent.

    The server decodes up to the end of the first transaction that has one.

    Raises:
        SlotMissing, SlotActive, SlotLost, PublicationMissing, MissingPrivilege: as `peek`.
    """
    statement = HAS_CHANGES.format(
        slot=sql.Literal(options.slot),
        upto_lsn=sql.Literal(str(upto_lsn)),
        options=sql.Literal(list(options.arguments)),
    )
    with (
        slot_errors(f'cannot read replication slot "{options.slot}"'),
        _warnings_as_errors(connection),
    ):
        row = connection.execute(statement).fetchone()
    return row is not None and bool(row[0])


def _batches(copy: psycopg.Copy) -> Iterator[RawMessages]:
    """The rows of a COPY BINARY, in batches.

    psycopg's own loop costs more than the rest of a capture. So rows that have arrived are read from libpq
    directly; psycopg waits for more, and handles the end. Each row is copied at once: while its buffer is
    referenced, libpq must allocate another one.
    """
    libpq = copy.connection.pgconn
    take = libpq.get_copy_data
    row: Buffer = copy.read()
    if bytes(row[: len(_COPY_SIGNATURE)]) != _COPY_SIGNATURE:
        raise _OtherForm("it has no header")
    row = row[_COPY_HEADER_BYTES:]
    size = len(row)
    # Kept for all batches: memory that the system has just given is far slower to write to.
    rows = io.BytesIO()
    while size > _COPY_TRAILER_BYTES:
        sizes, free = list[int](), BATCH_BYTES
        rows.seek(0)
        while size > _COPY_TRAILER_BYTES and free > 0 and len(sizes) < BATCH_ROWS:
            rows.write(row)
            sizes.append(size)
            free -= size
            size, row = take(_WITHOUT_WAITING)
            if size == 0:
                row = copy.read()
                size = len(row)
        if size < 0:
            raise _ended_early(libpq)
        yield _raw_messages(np.frombuffer(rows.getbuffer(), np.uint8, rows.tell()).copy(), sizes)
    if bytes(row) != _COPY_TRAILER or copy.read():
        raise _OtherForm("it does not end as it should")


class _OtherForm(Exception):
    """What the server sends is no result of `PEEK`; the text says why."""


@contextlib.contextmanager
def _form_errors(slot: str) -> Iterator[None]:
    """Raise `InvalidMessage` for a result of another form, also if it is no COPY."""
    try:
        yield
    except (_OtherForm, psycopg.ProgrammingError) as error:
        if isinstance(error, psycopg.Error) and error.sqlstate is not None:
            raise
        raise InvalidMessage(
            f'the publisher does not answer with changes of replication slot "{slot}"', detail=str(error)
        ) from error


def _ended_early(libpq: psycopg.pq.abc.PGconn) -> psycopg.Error:
    """The server's error in place of the trailer; ends the COPY of the session."""
    result = libpq.get_result()
    while libpq.get_result() is not None:
        continue
    if result is None:
        return psycopg.OperationalError(libpq.get_error_message())
    if result.status == psycopg.pq.ExecStatus.COMMAND_OK:
        raise _OtherForm("it does not end as it should")
    return psycopg.errors.error_from_result(result)


def _raw_messages(content: Bytes, sizes: Sequence[int]) -> RawMessages:
    """Consecutive rows of COPY BINARY, as columns."""
    row_bytes = np.array(sizes, dtype=np.int64)
    starts, message_bytes = np.cumsum(row_bytes) - row_bytes, row_bytes - _BEFORE_DATA.itemsize
    if np.any(message_bytes < 0):
        raise _OtherForm("a row is too short")
    before = _before_data(content, starts)
    if not _has_fields(before, message_bytes).all():
        raise _OtherForm("a row has other fields")
    return RawMessages(
        lsn=before["lsn"].astype(np.int64),
        xid=before["xid"].astype(np.int64),
        data=ByteSlices(content, starts + _BEFORE_DATA.itemsize, message_bytes),
    )


def _before_data(content: Bytes, starts: Int64s) -> npt.NDArray[np.void]:
    """What precedes the messages of the rows at `starts` (`_BEFORE_DATA`)."""
    # One copy for each row, as bytes without fields: numpy copies fields one by one.
    whole = np.dtype((np.void, _BEFORE_DATA.itemsize))
    return elements_at(content, starts, whole).view(_BEFORE_DATA)


def _has_fields(before: npt.NDArray[np.void], message_bytes: Int64s) -> Bools:
    """Whether each row has an LSN, an xid, and a message up to its end."""
    is_right: Bools = (
        (before["fields"] == _FIELDS)
        & (before["lsn_bytes"] == _LSN_BYTES)
        & (before["xid_bytes"] == _XID_BYTES)
        & (before["data_bytes"] == message_bytes)
    )
    return is_right


@contextlib.contextmanager
def _warnings_as_errors(connection: Connection) -> Iterator[None]:
    """Raise the server's warnings: PostgreSQL 18 skips a missing publication with a warning only (R1.19)."""
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
            "the server skipped changes while decoding",
            detail="The server warned: " + "; ".join(dict.fromkeys(warnings)),
            hint="A capture publication was dropped while its slot was in use. " + RESYNCHRONIZE,
            rule="R1.19",
        )
