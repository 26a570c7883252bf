"""One message of each type: its bytes, in the layout of R1.2, and its value."""

from __future__ import annotations

import dataclasses

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName, RelationColumn, RelationId, ReplicaIdentity
from cdc_replay.pgoutput import messages as m

ONE_SECOND_AFTER_EPOCH = 946_684_801_000_000

EXAMPLES: dict[m.MessageType, tuple[str, m.Message]] = {
    m.MessageType.BEGIN: (
        "42 0000000016b37480 00000000000f4240 000002bc",
        m.Begin(Lsn(0x16B37480), ONE_SECOND_AFTER_EPOCH, 700),
    ),
    m.MessageType.COMMIT: (
        "43 00 0000000000000001 0000000000000002 00000000000f4240",
        m.Commit(Lsn(1), Lsn(2), ONE_SECOND_AFTER_EPOCH),
    ),
    m.MessageType.ORIGIN: ("4f 0000000000000000 70675f3100", m.Origin(Lsn(0), "pg_1")),
    m.MessageType.RELATION: (
        # schema "" is pg_catalog; replica identity d; one key column "id" of type int4
        "52 00004000 00 7400 64 0001 01 696400 00000017 ffffffff",
        m.RelationMessage(
            None,
            RelationId(16384),
            QualifiedName("pg_catalog", "t"),
            ReplicaIdentity.DEFAULT,
            (RelationColumn("id", 23, -1, is_key=True),),
        ),
    ),
    m.MessageType.TYPE: (
        "59 00004001 7300 636f6c6f7200",
        m.TypeMessage(None, 16385, QualifiedName("s", "color")),
    ),
    m.MessageType.INSERT: (
        "49 00004000 4e 0003 74 00000002 3432 6e 74 00000000",
        m.Insert(
            None,
            RelationId(16384),
            m.TupleData((m.TupleKind.TEXT, m.TupleKind.NULL, m.TupleKind.TEXT), (b"42", None, b"")),
        ),
    ),
    m.MessageType.UPDATE: (
        "55 00004000 4b 0001 74 00000001 31 4e 0001 75",
        m.Update(
            None,
            RelationId(16384),
            m.OldTuple.KEY,
            m.TupleData((m.TupleKind.TEXT,), (b"1",)),
            m.TupleData((m.TupleKind.UNCHANGED,), (None,)),
        ),
    ),
    m.MessageType.DELETE: (
        "44 00004000 4f 0001 62 00000001 ff",
        m.Delete(None, RelationId(16384), m.OldTuple.FULL, m.TupleData((m.TupleKind.BINARY,), (b"\xff",))),
    ),
    m.MessageType.TRUNCATE: (
        "54 00000002 03 00004000 00004001",
        m.Truncate(
            None,
            m.TruncateFlag.CASCADE | m.TruncateFlag.RESTART_IDENTITY,
            (RelationId(16384), RelationId(16385)),
        ),
    ),
    m.MessageType.MESSAGE: (
        "4d 01 0000000000000009 7000 00000002 00ff",
        m.LogicalMessage(None, is_transactional=True, lsn=Lsn(9), prefix="p", content=b"\x00\xff"),
    ),
    m.MessageType.STREAM_START: ("53 000002bc 01", m.StreamStart(700, is_first=True)),
    m.MessageType.STREAM_STOP: ("45", m.StreamStop()),
    m.MessageType.STREAM_COMMIT: (
        "63 000002bc 00 0000000000000001 0000000000000002 00000000000f4240",
        m.StreamCommit(700, Lsn(1), Lsn(2), ONE_SECOND_AFTER_EPOCH),
    ),
    m.MessageType.STREAM_ABORT: ("41 000002bc 000002bd", m.StreamAbort(700, 701, None, None)),
    m.MessageType.BEGIN_PREPARE: (
        "62 0000000000000001 0000000000000002 00000000000f4240 000002bc 6700",
        m.BeginPrepare(Lsn(1), Lsn(2), ONE_SECOND_AFTER_EPOCH, 700, "g"),
    ),
    m.MessageType.PREPARE: (
        "50 00 0000000000000001 0000000000000002 00000000000f4240 000002bc 6700",
        m.Prepare(Lsn(1), Lsn(2), ONE_SECOND_AFTER_EPOCH, 700, "g"),
    ),
    m.MessageType.COMMIT_PREPARED: (
        "4b 00 0000000000000001 0000000000000002 00000000000f4240 000002bc 6700",
        m.CommitPrepared(Lsn(1), Lsn(2), ONE_SECOND_AFTER_EPOCH, 700, "g"),
    ),
    m.MessageType.ROLLBACK_PREPARED: (
        "72 00 0000000000000001 0000000000000002 00000000000f4240 00000000000f4240 000002bc 6700",
        m.RollbackPrepared(Lsn(1), Lsn(2), ONE_SECOND_AFTER_EPOCH, ONE_SECOND_AFTER_EPOCH, 700, "g"),
    ),
    m.MessageType.STREAM_PREPARE: (
        "70 00 0000000000000001 0000000000000002 00000000000f4240 000002bc 6700",
        m.StreamPrepare(Lsn(1), Lsn(2), ONE_SECOND_AFTER_EPOCH, 700, "g"),
    ),
}


def messages(*, in_stream: bool, parallel: bool) -> list[m.Message]:
    """The examples in the form of a streamed block (R1.9), and of `streaming = parallel` (R1.3)."""
    return [_in_form(message, in_stream=in_stream, parallel=parallel) for _, message in EXAMPLES.values()]


def _in_form(message: m.Message, *, in_stream: bool, parallel: bool) -> m.Message:
    if in_stream and isinstance(message, m.StreamedMessage):
        return dataclasses.replace(message, xid=701)
    if parallel and isinstance(message, m.StreamAbort):
        return dataclasses.replace(message, abort_lsn=Lsn(9), abort_time=ONE_SECOND_AFTER_EPOCH)
    return message
