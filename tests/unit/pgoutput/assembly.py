"""Reference for capture's assembler: messages of one slot call → committed transactions, one at a time.

Capture works on columns of messages; this works message by message, with the reference reader, and tests
compare the two. Protocol violations are rejected (R9.1, R9.5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Never, TypeAlias

from cdc_replay.errors import InvalidMessage
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.relation import Relation
from cdc_replay.pgoutput import messages as m
from cdc_replay.pgoutput.reader import decode, parse_relation, split_stream_xid
from unit.pgoutput.wire import log_batch, log_row

if TYPE_CHECKING:
    import pyarrow as pa

Row: TypeAlias = tuple[int, int, bytes]
"""What a slot function returns: lsn, xid, message."""

Data: TypeAlias = m.Insert | m.Update | m.Delete | m.Truncate | m.LogicalMessage
RowChange: TypeAlias = m.Insert | m.Update | m.Delete


@dataclass(frozen=True, slots=True)
class Change:
    """A message of a transaction, without xid of streamed blocks; `version` is None if not a row change."""

    lsn: int
    subxid: int | None
    data: bytes
    version: int | None


@dataclass(slots=True)
class Transaction:
    """A transaction; `end_lsn` and `commit_time` are known at its end."""

    xid: int
    versions: dict[int, int] = field(repr=False)
    """The current version of each described relation."""
    origin: str | None = None
    changes: list[Change] = field(default_factory=list)
    rolled_back: set[int] = field(default_factory=set)
    """Subtransactions; the server sends nothing of them afterwards."""
    end_lsn: Lsn = ZERO
    commit_time: int | None = None


_OPENS: Final = {
    m.Begin: m.MessageType.COMMIT,
    m.BeginPrepare: m.MessageType.PREPARE,
    m.StreamStart: m.MessageType.STREAM_STOP,
}
"""The message that ends what the key starts."""


class Assembly:
    """Assembles rows; `committed` are the transactions in commit order.

    `messages` are all decoded messages, `relations` all relations by version. Logical messages are changes,
    unless `keeps_messages` is false (R9.13).
    """

    def __init__(self, *, parallel: bool = False, keeps_messages: bool = True) -> None:
        self.committed: list[Transaction] = []
        self.relations: dict[int, Relation] = {}
        self.messages: list[m.Message] = []
        self._parallel = parallel
        self._keeps_messages = keeps_messages
        self._versions: dict[int, int] = {}
        self._open: Transaction | None = None
        self._ends_with: m.MessageType | None = None
        self._streams: dict[int, Transaction] = {}
        self._prepared: dict[int, Transaction] = {}
        self._last_end = ZERO

    @classmethod
    def of(cls, rows: Iterable[Row], *, parallel: bool = False) -> Assembly:
        """Assemble the rows of a whole call."""
        assembly = cls(parallel=parallel)
        assembly.feed(rows)
        return assembly

    def feed(self, rows: Iterable[Row]) -> None:
        """Add the next rows.

        Raises:
            InvalidMessage: if they violate the protocol.
        """
        for lsn, xid, data in rows:
            in_stream = self._ends_with is m.MessageType.STREAM_STOP
            message = decode(data, in_stream=in_stream, streaming_parallel=self._parallel)
            self.messages.append(message)
            subxid = None
            if in_stream and isinstance(message, m.StreamedMessage):
                subxid, data = split_stream_xid(data)  # noqa: PLW2901 - as it is outside of the block
            self._handle(message, lsn, xid, Change(lsn, subxid, data, None))

    def log(self) -> pa.RecordBatch:
        """The committed transactions as log rows."""
        return log_batch(
            [
                log_row(
                    change.data,
                    commit_lsn=transaction.end_lsn.value, commit_time=transaction.commit_time,
                    xid=transaction.xid, origin=transaction.origin,
                    seq=seq, lsn=change.lsn, relation_version=change.version,
                    relation_id=None if change.version is None else self.relations[change.version].id,
                )
                for transaction in self.committed
                for seq, change in enumerate(transaction.changes)
            ]
        )  # fmt: skip

    def _handle(self, message: m.Message, lsn: int, xid: int, change: Change) -> None:
        if isinstance(message, m.Begin | m.BeginPrepare | m.StreamStart):
            self._start(message)
        elif isinstance(message, m.StreamedMessage):
            self._add_message(message, lsn, xid, change)
        elif isinstance(message, m.Origin):
            self._open_transaction().origin = message.name
        elif isinstance(message, m.Commit | m.Prepare | m.StreamStop):
            self._end(message)
        else:
            self._outcome(message)

    def _start(self, message: m.Begin | m.BeginPrepare | m.StreamStart) -> None:
        if self._open is not None:
            self._refuse("starts inside another")
        self._ends_with = _OPENS[type(message)]
        if not isinstance(message, m.StreamStart):
            self._open = Transaction(message.xid, dict(self._versions))
            return
        if message.is_first:
            self._streams[message.xid] = Transaction(message.xid, {})
        self._open = self._stream_of(message.xid)

    def _add_message(self, message: m.StreamedMessage, lsn: int, xid: int, change: Change) -> None:
        if isinstance(message, m.RelationMessage):
            self._describe(message, change.data)
        elif isinstance(message, RowChange):
            version = self._open_transaction().versions.get(message.relation)
            change_of_row = Change(lsn, change.subxid, change.data, version)
            self._open_transaction().changes.append(change_of_row)
        elif isinstance(message, m.LogicalMessage) and not self._keeps_messages:
            return
        elif isinstance(message, m.LogicalMessage) and self._open is None:
            self._complete(Transaction(xid, {}, changes=[change]), Lsn(lsn), None)
        elif not isinstance(message, m.TypeMessage):
            self._open_transaction().changes.append(change)

    def _describe(self, message: m.RelationMessage, data: bytes) -> None:
        relation = parse_relation(data)
        self.relations[relation.version] = relation
        if self._open is not None:
            self._open.versions[message.relation] = relation.version
        if self._ends_with is not m.MessageType.STREAM_STOP:
            self._versions[message.relation] = relation.version

    def _end(self, message: m.Commit | m.Prepare | m.StreamStop) -> None:
        transaction = self._open_transaction()
        if message.type is not self._ends_with:
            self._refuse("ends as another began")
        self._open = self._ends_with = None
        if isinstance(message, m.Commit):
            self._complete(transaction, message.end_lsn, message.commit_time)
        elif isinstance(message, m.Prepare):
            self._prepare(transaction, message.end_lsn)

    def _outcome(
        self,
        message: m.StreamCommit | m.StreamPrepare | m.StreamAbort | m.CommitPrepared | m.RollbackPrepared,
    ) -> None:
        if self._open is not None:
            self._refuse("ends inside another")
        match message:
            case m.StreamCommit(xid, _, end_lsn, commit_time):
                transaction = self._stream_of(xid)
                # From here on the server regards its relations as sent to all transactions (R1.16).
                self._versions |= self._streams.pop(xid).versions
                self._complete(transaction, end_lsn, commit_time)
            case m.StreamPrepare(_, end_lsn, _, xid):
                self._prepare(self._stream_of(xid), end_lsn)
                del self._streams[xid]
            case m.StreamAbort(xid, subxid):
                self._abort(xid, subxid)
            case m.CommitPrepared(_, end_lsn, commit_time, xid):
                prepared = self._prepared.pop(xid, None)
                if prepared is None:
                    self._advance(end_lsn)
                else:
                    self._complete(prepared, end_lsn, commit_time)
            case m.RollbackPrepared():
                self._advance(message.end_lsn)
                self._prepared.pop(message.xid, None)

    def _abort(self, xid: int, subxid: int) -> None:
        if xid == subxid:
            self._streams.pop(xid, None)
        elif (transaction := self._streams.get(xid)) is not None:
            transaction.rolled_back.add(subxid)
            transaction.versions.clear()  # the server describes all of them again (R1.16)

    def _open_transaction(self) -> Transaction:
        if self._open is None:
            self._refuse("is outside of any transaction")
        return self._open

    def _stream_of(self, xid: int) -> Transaction:
        if xid not in self._streams:
            self._refuse(f"streamed transaction {xid} did not start")
        return self._streams[xid]

    def _prepare(self, transaction: Transaction, end_lsn: Lsn) -> None:
        # Sent with its COMMIT PREPARED if two_phase was enabled later: then at an old position (R9.9).
        self._check_position(end_lsn)
        self._last_end = max(self._last_end, end_lsn)
        self._drop_rolled_back(transaction)
        self._prepared[transaction.xid] = transaction

    def _complete(self, transaction: Transaction, end_lsn: Lsn, commit_time: int | None) -> None:
        self._advance(end_lsn)
        self._drop_rolled_back(transaction)
        transaction.end_lsn, transaction.commit_time = end_lsn, commit_time
        self.committed.append(transaction)

    def _drop_rolled_back(self, transaction: Transaction) -> None:
        """Drop rolled-back changes (R9.5); the others' relations must have been described (R1.13)."""
        transaction.changes = [
            change for change in transaction.changes if change.subxid not in transaction.rolled_back
        ]
        if any(
            change.version is None and change.data[:1] in {b"I", b"U", b"D"} for change in transaction.changes
        ):
            self._refuse("is of a change whose relation was not described")

    def _advance(self, end_lsn: Lsn) -> None:
        self._check_position(end_lsn)
        if end_lsn <= self._last_end:
            self._refuse("ends before the previous one")
        self._last_end = end_lsn

    def _check_position(self, end_lsn: Lsn) -> None:
        if end_lsn.value >= 2**63:
            self._refuse("ends beyond the largest WAL position")

    def _refuse(self, problem: str) -> Never:
        raise InvalidMessage(f"{self.messages[-1].type.name} {problem}", rule="R9.1")
