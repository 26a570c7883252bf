"""The messages of one call of a slot function → committed transactions: readable, strict, one at a time.

What capture does with columns of messages is done here message by message, with the reference reader: its
tests compare the two. Whatever no server sends is refused (R9.1, R9.5).
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
    """A message of a transaction; `data` is as outside of streamed blocks, `version` None if not of a row."""

    lsn: int
    subxid: int | None
    data: bytes
    version: int | None


@dataclass(slots=True)
class Transaction:
    """A transaction; `end_lsn` and `commit_time` are known at its end."""

    xid: int
    shapes: dict[int, int] = field(repr=False)
    """The version in force of each relation that was described so far."""
    origin: str | None = None
    changes: list[Change] = field(default_factory=list)
    rolled_back: set[int] = field(default_factory=set)
    """Subtransactions; no server sends anything of them afterwards."""
    end_lsn: Lsn = ZERO
    commit_time: int | None = None


_OPENS: Final = {
    m.Begin: m.MessageType.COMMIT,
    m.BeginPrepare: m.MessageType.PREPARE,
    m.StreamStart: m.MessageType.STREAM_STOP,
}
"""Which message ends what another one starts."""


class Assembly:
    """Feed it rows; `committed` has the transactions in the order of their commits.

    `messages` are all messages as they were read, `relations` all shapes by version. Logical messages are
    changes, unless they are not kept, as those of other programs (R9.13).
    """

    def __init__(self, *, parallel: bool = False, keeps_messages: bool = True) -> None:
        self.committed: list[Transaction] = []
        self.relations: dict[int, Relation] = {}
        self.messages: list[m.Message] = []
        self._parallel = parallel
        self._keeps_messages = keeps_messages
        self._shapes: dict[int, int] = {}
        self._open: Transaction | None = None
        self._ends_with: m.MessageType | None = None
        self._streams: dict[int, Transaction] = {}
        self._prepared: dict[int, Transaction] = {}
        self._last = ZERO

    @classmethod
    def of(cls, rows: Iterable[Row], *, parallel: bool = False) -> Assembly:
        """What a whole call returned."""
        assembly = cls(parallel=parallel)
        assembly.feed(rows)
        return assembly

    def feed(self, rows: Iterable[Row]) -> None:
        """Take the next rows.

        Raises:
            InvalidMessage: if they are not what a server sends.
        """
        for lsn, xid, data in rows:
            in_stream = self._ends_with is m.MessageType.STREAM_STOP
            message = decode(data, in_stream=in_stream, streaming_parallel=self._parallel)
            self.messages.append(message)
            subxid = None
            if in_stream and isinstance(message, m.StreamedMessage):
                subxid, data = split_stream_xid(data)  # noqa: PLW2901 - as it is outside of the block
            self._take(message, lsn, xid, Change(lsn, subxid, data, None))

    def log(self) -> pa.RecordBatch:
        """The committed transactions as rows of the log."""
        return log_batch(
            [
                log_row(
                    change.data,
                    commit_lsn=one.end_lsn.value, commit_time=one.commit_time, xid=one.xid, origin=one.origin,
                    seq=seq, lsn=change.lsn, relation_version=change.version,
                    relation_id=None if change.version is None else self.relations[change.version].id,
                )
                for one in self.committed
                for seq, change in enumerate(one.changes)
            ]
        )  # fmt: skip

    def _take(self, message: m.Message, lsn: int, xid: int, change: Change) -> None:
        if isinstance(message, m.Begin | m.BeginPrepare | m.StreamStart):
            self._start(message)
        elif isinstance(message, m.StreamedMessage):
            self._within(message, lsn, xid, change)
        elif isinstance(message, m.Origin):
            self._opened().origin = message.name
        elif isinstance(message, m.Commit | m.Prepare | m.StreamStop):
            self._end(message)
        else:
            self._outcome(message)

    def _start(self, message: m.Begin | m.BeginPrepare | m.StreamStart) -> None:
        if self._open is not None:
            self._refuse("starts inside another")
        self._ends_with = _OPENS[type(message)]
        if not isinstance(message, m.StreamStart):
            self._open = Transaction(message.xid, dict(self._shapes))
            return
        if message.is_first:
            self._streams[message.xid] = Transaction(message.xid, {})
        self._open = self._streamed(message.xid)

    def _within(self, message: m.StreamedMessage, lsn: int, xid: int, change: Change) -> None:
        if isinstance(message, m.RelationMessage):
            self._describe(message, change.data)
        elif isinstance(message, RowChange):
            version = self._opened().shapes.get(message.relation)
            shaped = Change(lsn, change.subxid, change.data, version)
            self._opened().changes.append(shaped)
        elif isinstance(message, m.LogicalMessage) and not self._keeps_messages:
            return
        elif isinstance(message, m.LogicalMessage) and self._open is None:
            self._complete(Transaction(xid, {}, changes=[change]), Lsn(lsn), None)
        elif not isinstance(message, m.TypeMessage):
            self._opened().changes.append(change)

    def _describe(self, message: m.RelationMessage, data: bytes) -> None:
        relation = parse_relation(data)
        self.relations[relation.version] = relation
        if self._open is not None:
            self._open.shapes[message.relation] = relation.version
        if self._ends_with is not m.MessageType.STREAM_STOP:
            self._shapes[message.relation] = relation.version

    def _end(self, message: m.Commit | m.Prepare | m.StreamStop) -> None:
        one = self._opened()
        if message.type is not self._ends_with:
            self._refuse("ends as another began")
        self._open = self._ends_with = None
        if isinstance(message, m.Commit):
            self._complete(one, message.end_lsn, message.commit_time)
        elif isinstance(message, m.Prepare):
            self._prepare(one, message.end_lsn)

    def _outcome(
        self,
        message: m.StreamCommit | m.StreamPrepare | m.StreamAbort | m.CommitPrepared | m.RollbackPrepared,
    ) -> None:
        if self._open is not None:
            self._refuse("ends inside another")
        match message:
            case m.StreamCommit(xid, _, end_lsn, commit_time):
                one = self._streamed(xid)
                # From here on the server takes its shapes as known to everybody (R1.16).
                self._shapes |= self._streams.pop(xid).shapes
                self._complete(one, end_lsn, commit_time)
            case m.StreamPrepare(_, end_lsn, _, xid):
                self._prepare(self._streamed(xid), end_lsn)
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
        elif (one := self._streams.get(xid)) is not None:
            one.rolled_back.add(subxid)
            one.shapes.clear()  # the server describes all of them again (R1.16)

    def _opened(self) -> Transaction:
        if self._open is None:
            self._refuse("is outside of any transaction")
        return self._open

    def _streamed(self, xid: int) -> Transaction:
        if xid not in self._streams:
            self._refuse(f"streamed transaction {xid} did not start")
        return self._streams[xid]

    def _prepare(self, one: Transaction, end_lsn: Lsn) -> None:
        # With its COMMIT PREPARED, if two_phase came later: then its position is an old one (R9.9).
        self._check_position(end_lsn)
        self._last = max(self._last, end_lsn)
        self._keep_what_counts(one)
        self._prepared[one.xid] = one

    def _complete(self, one: Transaction, end_lsn: Lsn, commit_time: int | None) -> None:
        self._advance(end_lsn)
        self._keep_what_counts(one)
        one.end_lsn, one.commit_time = end_lsn, commit_time
        self.committed.append(one)

    def _keep_what_counts(self, one: Transaction) -> None:
        """Leave out what was rolled back (R9.5); relations of the rest must have been described (R1.13)."""
        one.changes = [change for change in one.changes if change.subxid not in one.rolled_back]
        if any(change.version is None and change.data[:1] in {b"I", b"U", b"D"} for change in one.changes):
            self._refuse("is of a change whose relation was not described")

    def _advance(self, end_lsn: Lsn) -> None:
        self._check_position(end_lsn)
        if end_lsn <= self._last:
            self._refuse("ends before the one before it")
        self._last = end_lsn

    def _check_position(self, end_lsn: Lsn) -> None:
        if end_lsn.value >= 2**63:
            self._refuse("ends where no WAL can be")

    def _refuse(self, problem: str) -> Never:
        raise InvalidMessage(f"{self.messages[-1].type.name} {problem}", rule="R9.1")
