"""Hand-written streams of a slot: messages as bytes, and the log rows made from them."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from cdc_replay.arrow.byte_slices import ByteSlices
from cdc_replay.capture.ddl.message_code import MessageFilter, message_code
from cdc_replay.capture.transactions import TransactionAssembler
from cdc_replay.changelog.prepared_transactions import PreparedTransactions
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.pgoutput.reader import relation_version
from cdc_replay.postgres.peek import RawMessages

TABLE = 5
SECRET = b"known to the event triggers"
ORDINALS = itertools.count(1)


def relation(*columns: str) -> bytes:
    """R of the table, with integer columns."""
    column_fields = b"".join(
        struct.pack(">B", 0) + name.encode() + b"\0" + struct.pack(">Ii", 23, -1) for name in columns
    )
    return b"R" + struct.pack(">I", TABLE) + b"s\0t\0d" + struct.pack(">h", len(columns)) + column_fields


RELATION = relation("id")
WIDER = relation("id", "a")
VERSIONS = {shape: relation_version(shape) for shape in (RELATION, WIDER)}


def begin(end_lsn: int, xid: int = 7) -> bytes:
    return b"B" + struct.pack(">qqI", end_lsn - 8, 0, xid)


def commit(end_lsn: int, time: int = 0) -> bytes:
    return b"C" + struct.pack(">Bqqq", 0, end_lsn - 8, end_lsn, time)


def origin(name: str) -> bytes:
    return b"O" + struct.pack(">q", 0) + name.encode() + b"\0"


def type_name() -> bytes:
    return b"Y" + struct.pack(">I", 20000) + b"s\0mood\0"


def insert(value: str, table: int = TABLE) -> bytes:
    return b"I" + struct.pack(">IchcI", table, b"N", 1, b"t", len(value)) + value.encode()


def logical_message(content: str, *, transactional: bool = True, prefix: str = "p") -> bytes:
    return (
        b"M"
        + struct.pack(">Bq", transactional, 0)
        + prefix.encode()
        + b"\0"
        + struct.pack(">I", len(content))
        + content.encode()
    )


def signed_message(content: str, *, transactional: bool = True, prefix: str = "cdc_replay.test") -> bytes:
    """A message of the event triggers, in the transaction with the xid of `raw`."""
    ordinal = next(ORDINALS)
    code = message_code(SECRET, prefix, 0, ordinal, content.encode())
    return logical_message(f"{ordinal} {code}\n{content}", transactional=transactional, prefix=prefix)


def open_assembler(prepared: PreparedTransactions, after: Lsn = ZERO) -> TransactionAssembler:
    """An assembler that accepts messages of `signed_message`."""
    return TransactionAssembler(after, prepared, messages=MessageFilter(SECRET))


def in_stream(message: bytes, xid: int) -> bytes:
    """R1.9: the transaction id follows the kind."""
    return message[:1] + struct.pack(">I", xid) + message[1:]


def stream_start(xid: int, *, first: bool) -> bytes:
    return b"S" + struct.pack(">IB", xid, first)


STREAM_STOP = b"E"


def stream_commit(xid: int, end_lsn: int, time: int = 0) -> bytes:
    return b"c" + struct.pack(">IBqqq", xid, 0, end_lsn - 8, end_lsn, time)


def stream_abort(xid: int, subxid: int, *, parallel: bool = False) -> bytes:
    """StreamAbort, in its longer form if `parallel` (R1.3)."""
    return b"A" + struct.pack(">II", xid, subxid) + (struct.pack(">qq", 0, 0) if parallel else b"")


def begin_prepare(xid: int, end_lsn: int) -> bytes:
    return b"b" + struct.pack(">qqqI", end_lsn - 8, end_lsn, 0, xid) + b"gid\0"


def prepare(xid: int, end_lsn: int, *, streamed: bool = False) -> bytes:
    return (b"p" if streamed else b"P") + struct.pack(">BqqqI", 0, end_lsn - 8, end_lsn, 0, xid) + b"gid\0"


def commit_prepared(xid: int, end_lsn: int, time: int = 0) -> bytes:
    return b"K" + struct.pack(">BqqqI", 0, end_lsn - 8, end_lsn, time, xid) + b"gid\0"


def rollback_prepared(xid: int, prepare_end_lsn: int, end_lsn: int) -> bytes:
    return b"r" + struct.pack(">BqqqqI", 0, prepare_end_lsn, end_lsn, 0, 0, xid) + b"gid\0"


def raw(messages: Sequence[bytes], lsns: Sequence[int] | None = None) -> RawMessages:
    """A batch of the peek; `lsn` counts from 0 by default, `xid` is 0."""
    lsn = np.array(range(len(messages)) if lsns is None else lsns, dtype=np.int64)
    return RawMessages(lsn, np.zeros(len(messages), dtype=np.int64), ByteSlices.from_values(messages))


def assemble_rows(
    prepared: PreparedTransactions, *batches: RawMessages, after: Lsn = ZERO
) -> list[dict[str, Any]]:
    """The log rows made from the batches of one peek."""
    with open_assembler(prepared, after) as assembler:
        return [row for batch in batches for rows in assembler.feed(batch) for row in rows.to_pylist()]
