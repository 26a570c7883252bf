"""The messages of pgoutput, protocol versions 1 to 4, as values (R1.2).

Times are microseconds since 1970-01-01 UTC (signed 64 bits); oids and transaction ids are unsigned. In a
streamed block `xid` is the (sub)transaction of the change (of a logical message: the top-level one); it is
None outside of a block (R1.9).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName, RelationColumn, RelationId, ReplicaIdentity


class MessageType(enum.Enum):
    """The kinds of messages; the value is the first byte on the wire."""

    BEGIN = "B"
    COMMIT = "C"
    ORIGIN = "O"
    RELATION = "R"
    TYPE = "Y"
    INSERT = "I"
    UPDATE = "U"
    DELETE = "D"
    TRUNCATE = "T"
    MESSAGE = "M"
    STREAM_START = "S"
    STREAM_STOP = "E"
    STREAM_COMMIT = "c"
    STREAM_ABORT = "A"
    BEGIN_PREPARE = "b"
    PREPARE = "P"
    COMMIT_PREPARED = "K"
    ROLLBACK_PREPARED = "r"
    STREAM_PREPARE = "p"


IN_STREAM: Final = frozenset(
    {
        MessageType.RELATION,
        MessageType.TYPE,
        MessageType.INSERT,
        MessageType.UPDATE,
        MessageType.DELETE,
        MessageType.TRUNCATE,
        MessageType.MESSAGE,
    }
)
"""The messages that start with a transaction id inside a streamed block (R1.9)."""


class TupleKind(enum.Enum):
    """How a column's value is sent; the value is the byte on the wire (R1.4)."""

    NULL = "n"
    UNCHANGED = "u"
    """Stored out of line, not changed, not sent."""
    TEXT = "t"
    BINARY = "b"
    """The type's binary send format; only with the option `binary`."""


class OldTuple(enum.Enum):
    """Which old values a change carries; the value is the byte on the wire (R1.5)."""

    KEY = "K"
    """The columns of the replica identity's key; all others are sent as NULL."""
    FULL = "O"
    """The whole old row."""


class TruncateFlag(enum.IntFlag):
    """The options of a TRUNCATE, as bits on the wire."""

    CASCADE = 1
    RESTART_IDENTITY = 2


@dataclass(frozen=True, slots=True)
class TupleData:
    """One row; `values` holds the bytes of TEXT and BINARY columns and None for the others (R1.4)."""

    kinds: tuple[TupleKind, ...]
    values: tuple[bytes | None, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction starts; `commit_lsn` is the start of its commit record."""

    type: ClassVar = MessageType.BEGIN
    commit_lsn: Lsn
    commit_time: int
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The transaction that the last Begin started is complete."""

    type: ClassVar = MessageType.COMMIT
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The transaction was replicated to the publisher from `name`; `commit_lsn` is 0 if unknown (R1.12)."""

    type: ClassVar = MessageType.ORIGIN
    commit_lsn: Lsn
    name: str


@dataclass(frozen=True, slots=True)
class RelationMessage:
    """Describes `relation` for the following changes."""

    type: ClassVar = MessageType.RELATION
    xid: int | None
    relation: RelationId
    name: QualifiedName
    replica_identity: ReplicaIdentity
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class TypeMessage:
    """The name of a type that is not built in, or of a domain's base type (R1.10)."""

    type: ClassVar = MessageType.TYPE
    xid: int | None
    type_oid: int
    name: QualifiedName


@dataclass(frozen=True, slots=True)
class Insert:
    """A row was inserted."""

    type: ClassVar = MessageType.INSERT
    xid: int | None
    relation: RelationId
    new: TupleData


@dataclass(frozen=True, slots=True)
class Update:
    """A row was updated; both `old_kind` and `old` are None when no old tuple was sent (R1.6)."""

    type: ClassVar = MessageType.UPDATE
    xid: int | None
    relation: RelationId
    old_kind: OldTuple | None
    old: TupleData | None
    new: TupleData


@dataclass(frozen=True, slots=True)
class Delete:
    """A row was deleted."""

    type: ClassVar = MessageType.DELETE
    xid: int | None
    relation: RelationId
    old_kind: OldTuple
    old: TupleData


@dataclass(frozen=True, slots=True)
class Truncate:
    """One TRUNCATE statement emptied all of `relations`."""

    type: ClassVar = MessageType.TRUNCATE
    xid: int | None
    flags: TruncateFlag
    relations: tuple[RelationId, ...]


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """What `pg_logical_emit_message` wrote (R9.13)."""

    type: ClassVar = MessageType.MESSAGE
    xid: int | None
    is_transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class StreamStart:
    """A block of changes of the transaction `xid`, which is still in progress, starts."""

    type: ClassVar = MessageType.STREAM_START
    xid: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class StreamStop:
    """The block ends."""

    type: ClassVar = MessageType.STREAM_STOP


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """The streamed transaction `xid` is complete."""

    type: ClassVar = MessageType.STREAM_COMMIT
    xid: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """`subxid` of the streamed transaction `xid` is rolled back; all of it if the two are equal (R9.5).

    `abort_lsn` and `abort_time` are sent with the option `streaming = parallel` only (R1.3).
    """

    type: ClassVar = MessageType.STREAM_ABORT
    xid: int
    subxid: int
    abort_lsn: Lsn | None
    abort_time: int | None


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    """A transaction starts that is prepared at `prepare_lsn`."""

    type: ClassVar = MessageType.BEGIN_PREPARE
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """The transaction that the last BeginPrepare started is prepared; its outcome comes later (R9.8)."""

    type: ClassVar = MessageType.PREPARE
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """A prepared transaction is committed."""

    type: ClassVar = MessageType.COMMIT_PREPARED
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """A prepared transaction, known by `prepare_end_lsn` and `prepare_time`, is rolled back (R9.8)."""

    type: ClassVar = MessageType.ROLLBACK_PREPARED
    prepare_end_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    rollback_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class StreamPrepare:
    """The streamed transaction `xid` is prepared."""

    type: ClassVar = MessageType.STREAM_PREPARE
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    xid: int
    gid: str


StreamedMessage: TypeAlias = (
    RelationMessage | TypeMessage | Insert | Update | Delete | Truncate | LogicalMessage
)
"""The messages of the types `IN_STREAM`."""

Message: TypeAlias = (
    Begin
    | Commit
    | Origin
    | StreamedMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)
