"""The reference reader of pgoutput messages, one function per message type (R1.2).

Every item is checked before it is used, and nothing may be left at the end. Errors name the offset of the
faulty item.

The layout of some messages depends on being inside a streamed block (R1.9) or on the option `streaming =
parallel` (R1.3), which the bytes do not show: the caller of `decode` passes it; `decode_stream` tracks the
blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Never, TypeAlias, TypeVar

from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName, Relation, RelationColumn, RelationId, ReplicaIdentity
from cdc_replay.pgoutput import messages as m

POSTGRES_EPOCH_MICROSECONDS: Final = 946_684_800_000_000
"""PostgreSQL's epoch, 2000-01-01 00:00:00 UTC, in microseconds since 1970 (R1.1)."""

_LAST_TIME: Final = 2**63 - 1

_TYPES: Final = {ord(kind.value): kind for kind in m.MessageType}
_IDENTITIES: Final = {ord(identity.value): identity for identity in ReplicaIdentity}
_OLD_TUPLES: Final = {ord(kind.value): kind for kind in m.OldTuple}
_TUPLE_KINDS: Final = {ord(kind.value): kind for kind in m.TupleKind}
_NEW_TUPLE: Final = ord("N")
_KEY_COLUMN: Final = 1
_TRANSACTIONAL: Final = 1
_FIRST_SEGMENT: Final = 1

_Value = TypeVar("_Value")


def decode(data: bytes, *, in_stream: bool = False, streaming_parallel: bool = False) -> m.Message:
    """Decode one row of a slot function.

    `in_stream`: the message is inside a streamed block. `streaming_parallel`: the stream was read with the
    option `streaming = parallel`.

    Raises:
        InvalidMessage: if `data` is not one well-formed message. The text names the offset.
    """
    cursor = _Cursor(data)
    kind = cursor.lookup(_TYPES, "message type")
    xid = cursor.uint32() if in_stream and kind in m.IN_STREAM else None
    readers = _PARALLEL_READERS if streaming_parallel else _READERS
    message = readers[kind](cursor, xid)
    cursor.finish()
    return message


def decode_stream(stream: Iterable[bytes], *, streaming_parallel: bool = False) -> Iterator[m.Message]:
    """Decode all rows of one call of a slot function; blocks never span calls (R1.9).

    Raises:
        InvalidMessage: as `decode`.
    """
    in_stream = False
    for data in stream:
        message = decode(data, in_stream=in_stream, streaming_parallel=streaming_parallel)
        if isinstance(message, m.StreamStart | m.StreamStop):
            in_stream = isinstance(message, m.StreamStart)
        yield message


def split_stream_xid(data: bytes) -> tuple[int, bytes]:
    """Split a message of a streamed block into its transaction id and the message without it (R1.9).

    Raises:
        InvalidMessage: if messages of this type carry no transaction id.
    """
    cursor = _Cursor(data)
    if cursor.lookup(_TYPES, "message type") not in m.IN_STREAM:
        cursor.refuse("message without transaction id", 0)
    return cursor.uint32(), data[:1] + data[5:]


def relation_version(data: bytes) -> int:
    """`Relation.version` of a Relation message (without a streamed message's transaction id).

    It is a signed 64-bit hash of the bytes: equal descriptions have the same version in every pull.
    """
    return int.from_bytes(hashlib.blake2b(data).digest()[:8], "big", signed=True)


def parse_relation(data: bytes) -> Relation:
    """Parse a Relation message (without a streamed message's transaction id).

    Raises:
        InvalidMessage: if `data` is not a well-formed Relation message.
    """
    message = decode(data)
    if not isinstance(message, m.RelationMessage):
        raise _invalid(data, "not a Relation message", 0)
    return Relation(
        id=message.relation,
        version=relation_version(data),
        name=message.name,
        replica_identity=message.replica_identity,
        columns=message.columns,
    )


class _Cursor:
    """A position in a message. Each method reads one item and advances, or rejects the message."""

    __slots__ = ("data", "position")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def refuse(self, problem: str, offset: int) -> Never:
        raise _invalid(self.data, problem, offset)

    def take(self, length: int) -> bytes:
        start, end = self.position, self.position + length
        if end > len(self.data):
            self.refuse("message ends too early", start)
        self.position = end
        return self.data[start:end]

    def uint8(self) -> int:
        return self.take(1)[0]

    def int16(self) -> int:
        return int.from_bytes(self.take(2), "big", signed=True)

    def int32(self) -> int:
        return int.from_bytes(self.take(4), "big", signed=True)

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "big")

    def lsn(self) -> Lsn:
        return Lsn(int.from_bytes(self.take(8), "big"))

    def time(self) -> int:
        start = self.position
        time = int.from_bytes(self.take(8), "big", signed=True) + POSTGRES_EPOCH_MICROSECONDS
        if time > _LAST_TIME:
            self.refuse("time out of range", start)
        return time

    def relation(self) -> RelationId:
        return RelationId(self.uint32())

    def string(self) -> str:
        start = self.position
        end = self.data.find(0, start)
        if end < 0:
            self.refuse("string without end", start)
        self.position = end + 1
        try:
            return self.data[start:end].decode()
        except UnicodeDecodeError as error:
            raise _invalid(self.data, "string is not UTF-8", start) from error

    def qualified_name(self) -> QualifiedName:
        schema = self.string()
        return QualifiedName(schema or "pg_catalog", self.string())

    def count(self, count: int, start: int) -> range:
        if count < 0:
            self.refuse(f"negative count {count}", start)
        return range(count)

    def counted_bytes(self) -> bytes:
        start = self.position
        length = self.int32()
        if length < 0:
            self.refuse(f"negative length {length}", start)
        return self.take(length)

    def lookup(self, values: dict[int, _Value], label: str) -> _Value:
        start = self.position
        byte = self.uint8()
        if byte not in values:
            self.refuse(f'unknown {label} "{_printed(byte)}"', start)
        return values[byte]

    def flags(self, allowed: int) -> int:
        start = self.position
        flags = self.uint8()
        if flags & ~allowed:
            self.refuse(f"unknown flags {flags:#04x}", start)
        return flags

    def finish(self) -> None:
        if self.position != len(self.data):
            self.refuse("bytes after the end of the message", self.position)


def _invalid(data: bytes, problem: str, offset: int) -> InvalidMessage:
    name = f'"{_printed(data[0])}"' if data else "without bytes"
    return InvalidMessage(
        f"invalid pgoutput message {name}: {problem} at offset {offset}",
        detail=f"The message has {len(data)} bytes.",
        rule="R1.2",
    )


def _printed(byte: int) -> str:
    return ascii(chr(byte))[1:-1]


def _begin(cursor: _Cursor, _xid: int | None) -> m.Message:
    return m.Begin(cursor.lsn(), cursor.time(), cursor.uint32())


def _commit(cursor: _Cursor, _xid: int | None) -> m.Message:
    cursor.flags(0)
    return m.Commit(cursor.lsn(), cursor.lsn(), cursor.time())


def _origin(cursor: _Cursor, _xid: int | None) -> m.Message:
    return m.Origin(cursor.lsn(), cursor.string())


def _relation(cursor: _Cursor, xid: int | None) -> m.Message:
    relation = cursor.relation()
    name = cursor.qualified_name()
    identity = cursor.lookup(_IDENTITIES, "replica identity")
    start = cursor.position
    columns = tuple(_relation_column(cursor) for _ in cursor.count(cursor.int16(), start))
    return m.RelationMessage(xid, relation, name, identity, columns)


def _relation_column(cursor: _Cursor) -> RelationColumn:
    is_key = cursor.flags(_KEY_COLUMN) != 0
    name = cursor.string()
    return RelationColumn(name, type_oid=cursor.uint32(), typmod=cursor.int32(), is_key=is_key)


def _type(cursor: _Cursor, xid: int | None) -> m.Message:
    return m.TypeMessage(xid, cursor.uint32(), cursor.qualified_name())


def _insert(cursor: _Cursor, xid: int | None) -> m.Message:
    relation = cursor.relation()
    cursor.lookup({_NEW_TUPLE: None}, "tuple")
    return m.Insert(xid, relation, _tuple_data(cursor))


def _update(cursor: _Cursor, xid: int | None) -> m.Message:
    relation = cursor.relation()
    old = None
    old_kind = cursor.lookup({_NEW_TUPLE: None, **_OLD_TUPLES}, "tuple")
    if old_kind is not None:
        old = _tuple_data(cursor)
        cursor.lookup({_NEW_TUPLE: None}, "tuple")
    return m.Update(xid, relation, old_kind, old, _tuple_data(cursor))


def _delete(cursor: _Cursor, xid: int | None) -> m.Message:
    relation = cursor.relation()
    old_kind = cursor.lookup(_OLD_TUPLES, "tuple")
    return m.Delete(xid, relation, old_kind, _tuple_data(cursor))


def _tuple_data(cursor: _Cursor) -> m.TupleData:
    start = cursor.position
    columns = [_value(cursor) for _ in cursor.count(cursor.int16(), start)]
    return m.TupleData(tuple(kind for kind, _ in columns), tuple(value for _, value in columns))


def _value(cursor: _Cursor) -> tuple[m.TupleKind, bytes | None]:
    kind = cursor.lookup(_TUPLE_KINDS, "kind of value")
    return kind, cursor.counted_bytes() if kind in {m.TupleKind.TEXT, m.TupleKind.BINARY} else None


def _truncate(cursor: _Cursor, xid: int | None) -> m.Message:
    start = cursor.position
    relations = cursor.count(cursor.int32(), start)
    flags = m.TruncateFlag(cursor.flags(sum(m.TruncateFlag)))
    return m.Truncate(xid, flags, tuple(cursor.relation() for _ in relations))


def _logical_message(cursor: _Cursor, xid: int | None) -> m.Message:
    is_transactional = cursor.flags(_TRANSACTIONAL) != 0
    return m.LogicalMessage(xid, is_transactional, cursor.lsn(), cursor.string(), cursor.counted_bytes())


def _stream_start(cursor: _Cursor, _xid: int | None) -> m.Message:
    return m.StreamStart(cursor.uint32(), is_first=cursor.flags(_FIRST_SEGMENT) != 0)


def _stream_stop(_cursor: _Cursor, _xid: int | None) -> m.Message:
    return m.StreamStop()


def _stream_commit(cursor: _Cursor, _xid: int | None) -> m.Message:
    xid = cursor.uint32()
    cursor.flags(0)
    return m.StreamCommit(xid, cursor.lsn(), cursor.lsn(), cursor.time())


def _stream_abort(cursor: _Cursor, _xid: int | None) -> m.Message:
    return m.StreamAbort(cursor.uint32(), cursor.uint32(), None, None)


def _parallel_stream_abort(cursor: _Cursor, _xid: int | None) -> m.Message:
    return m.StreamAbort(cursor.uint32(), cursor.uint32(), cursor.lsn(), cursor.time())


def _begin_prepare(cursor: _Cursor, _xid: int | None) -> m.Message:
    return m.BeginPrepare(cursor.lsn(), cursor.lsn(), cursor.time(), cursor.uint32(), cursor.string())


def _prepare(cursor: _Cursor, _xid: int | None) -> m.Message:
    cursor.flags(0)
    return m.Prepare(cursor.lsn(), cursor.lsn(), cursor.time(), cursor.uint32(), cursor.string())


def _commit_prepared(cursor: _Cursor, _xid: int | None) -> m.Message:
    cursor.flags(0)
    return m.CommitPrepared(cursor.lsn(), cursor.lsn(), cursor.time(), cursor.uint32(), cursor.string())


def _rollback_prepared(cursor: _Cursor, _xid: int | None) -> m.Message:
    cursor.flags(0)
    return m.RollbackPrepared(
        cursor.lsn(), cursor.lsn(), cursor.time(), cursor.time(), cursor.uint32(), cursor.string()
    )


def _stream_prepare(cursor: _Cursor, _xid: int | None) -> m.Message:
    cursor.flags(0)
    return m.StreamPrepare(cursor.lsn(), cursor.lsn(), cursor.time(), cursor.uint32(), cursor.string())


_Reader: TypeAlias = Callable[[_Cursor, int | None], m.Message]

_READERS: Final[dict[m.MessageType, _Reader]] = {
    m.MessageType.BEGIN: _begin,
    m.MessageType.COMMIT: _commit,
    m.MessageType.ORIGIN: _origin,
    m.MessageType.RELATION: _relation,
    m.MessageType.TYPE: _type,
    m.MessageType.INSERT: _insert,
    m.MessageType.UPDATE: _update,
    m.MessageType.DELETE: _delete,
    m.MessageType.TRUNCATE: _truncate,
    m.MessageType.MESSAGE: _logical_message,
    m.MessageType.STREAM_START: _stream_start,
    m.MessageType.STREAM_STOP: _stream_stop,
    m.MessageType.STREAM_COMMIT: _stream_commit,
    m.MessageType.STREAM_ABORT: _stream_abort,
    m.MessageType.BEGIN_PREPARE: _begin_prepare,
    m.MessageType.PREPARE: _prepare,
    m.MessageType.COMMIT_PREPARED: _commit_prepared,
    m.MessageType.ROLLBACK_PREPARED: _rollback_prepared,
    m.MessageType.STREAM_PREPARE: _stream_prepare,
}
_PARALLEL_READERS: Final = {**_READERS, m.MessageType.STREAM_ABORT: _parallel_stream_abort}
