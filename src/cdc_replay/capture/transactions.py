"""Messages of one peek → rows of the log: committed transactions only, in commit order.

| on the wire            | what becomes of it                                                           |
|------------------------|------------------------------------------------------------------------------|
| B … C                  | a transaction, whole and committed (R9.1)                                    |
| S … E S … E c          | collected by xid until c; interleaved with others (R9.5)                     |
| A(top, sub)            | the rows of `sub` are left out at c; all of it if the two are equal          |
| S … without c, A, p    | dropped: the next peek sends the transaction again, perhaps as B … C (R1.26) |
| b … P, S … E p         | kept aside, durably, until its outcome (R9.8), again if it is sent again     |
| K                      | what was kept is a transaction at K's position; if nothing was, none (R9.9)  |
| r                      | what was kept is forgotten                                                   |
| M                      | a row if it is of our event triggers; else it is not there (`message_code`)  |
| R                      | the shape of the rows behind it; in a stream, of its own until c (R1.16)     |
| O                      | the transaction's origin (R1.12)                                             |
| Y                      | nothing: types are known from the catalog                                    |

Transactions that end at or before the log's end are in it already and are left out (R1.30). Rows are
numbered in their transaction after aborted subtransactions are left out, so a streamed transaction has the
same rows as one that is not.

A logical message of a streamed block has the id of the top transaction, whatever savepoint it was written in
(R1.9). Those of others stay in the log where that was rolled back; where the messages of the event triggers
are concerned, which decide what changes mean, the range has to be read without streaming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.capture.change_origins import UNNAMED, LocalChanges
from cdc_replay.capture.ddl.message_code import MessageFilter
from cdc_replay.capture.ddl.messages import CatalogMessage, catalog_messages
from cdc_replay.capture.message_batch import (
    MessageBatch,
    MessageRange,
    RelationVersions,
    TransactionStamp,
    TransactionStamps,
    log_rows,
    number_rows,
    restamp_prepared,
)
from cdc_replay.capture.open_transaction import OpenTransaction
from cdc_replay.capture.plain_transactions import TransactionRun, parts
from cdc_replay.capture.spool import limit_memory
from cdc_replay.capture.truncate_rows import truncated_in
from cdc_replay.changelog.prepared_transactions import PreparedKey, PreparedTransactions
from cdc_replay.errors import DecodingFailed, InvalidMessage
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.relation import Relation, RelationId
from cdc_replay.pgoutput import messages as m
from cdc_replay.pgoutput.reader import decode, relation_of
from cdc_replay.postgres.peek import RawMessages

_LONG_STREAM_ABORT: Final = 1 + 4 + 4 + 8 + 8
_RELATION: Final = ord(m.MessageType.RELATION.value)
_LAST_LSN: Final = 2**63 - 1
"""Positions of the log are signed numbers of 64 bits."""
_OUTSIDE: Final = frozenset(b"BSbcAprK")
"""What never comes between the first and the last message of a transaction or block."""


@dataclass(frozen=True, slots=True)
class _Committed:
    """A transaction that is complete: its rows are in `open`, or waited under `prepared`."""

    stamp: TransactionStamp
    open: OpenTransaction | None = None
    prepared: PreparedKey | None = None


@dataclass(slots=True)
class CaptureCounts:
    """What went into the log; bytes are those of the messages."""

    transactions: int = 0
    messages: int = 0
    bytes: int = 0

    def __add__(self, other: CaptureCounts) -> CaptureCounts:
        return CaptureCounts(
            self.transactions + other.transactions, self.messages + other.messages, self.bytes + other.bytes
        )


class TransactionAssembler:
    """Puts the messages of one peek together; used as a context manager, for one peek only (R1.9, R1.14).

    `after` is the end of the log; `prepared` is where prepared transactions wait; `local` tells the changes
    without an origin, where that matters (R8.20); `messages` which logical messages are of our event
    triggers.
    """

    def __init__(
        self,
        after: Lsn,
        prepared: PreparedTransactions,
        local: LocalChanges | None = None,
        *,
        messages: MessageFilter | None = None,
    ) -> None:
        self.end_lsn = ZERO
        """The end of the last transaction that is complete, whether it was new or not."""
        self.relations: dict[int, Relation] = {}
        """All relation shapes that were sent, by version."""
        self.resolved: list[PreparedKey] = []
        """Prepared transactions that need not wait any more, once this pull is committed."""
        self.decided: set[int] = set()
        """The xids of prepared transactions whose outcome was sent, whether they waited or not."""
        self.truncated: set[RelationId] = set()
        """The relations that TRUNCATEs of this peek name, those of prepared transactions included."""
        self.catalog_messages: list[CatalogMessage] = []
        """What DDL of committed transactions changed, as far as event triggers tell of it."""
        self.described: set[RelationId] = set()
        """The relations that committed transactions have changed, and others that were described to these."""
        self.tally = CaptureCounts()
        self._after = after
        self._prepared = prepared
        self._local = local
        self._messages = messages or MessageFilter(secret=None)
        self._waiting = {key.xid: key for key in prepared.list_keys()}
        self._global = RelationVersions()
        self._open: OpenTransaction | None = None
        self._in_stream = False
        self._streams: dict[int, OpenTransaction] = {}
        self._committed: list[_Committed] = []
        self._chunk: MessageBatch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._unfinished():
            one.spool.close()

    def feed(self, raw: RawMessages) -> Iterator[pa.RecordBatch]:
        """Take the next messages; yields rows of the log for the transactions that they complete.

        Raises:
            InvalidMessage: if the messages are not what pgoutput sends.
            DecodingFailed: if a streamed transaction can only be understood without streaming.
        """
        self._chunk = chunk = self._messages.filtered(MessageBatch.of(raw, in_stream=self._in_stream))
        yield from self._counted(self._taken(chunk))
        for one in self._unfinished():
            one.spill(chunk)
        limit_memory(one.spool for one in self._unfinished())

    def _taken(self, chunk: MessageBatch) -> Iterator[pa.RecordBatch]:
        position = 0
        for part in parts(chunk):
            start = part.start if isinstance(part, TransactionRun) else part
            if start > position:
                self._take_data(position, start)
            if isinstance(part, TransactionRun):
                yield from self._emitted()
                yield from self._stretched(part)
                position = part.stop
            else:
                self._take_control(part)
                position = part + 1
        if len(chunk.kinds) > position:
            self._take_data(position, len(chunk.kinds))
        yield from self._emitted()

    def _take_data(self, start: int, stop: int) -> None:
        if (one := self._open) is not None:
            one.runs.append(MessageRange(start, stop, one.relations))
            if self._in_stream and not one.tells_of_ddl:
                one.tells_of_ddl = self._chunk.has_message(start, stop)
            return
        raise InvalidMessage("a change is outside of any transaction", rule="R9.1")

    def _take_control(self, position: int) -> None:
        data = self._chunk.message(position)
        if data[0] == _RELATION:
            self._relation(data)
            return
        if self._open is not None and data[0] in _OUTSIDE:
            raise InvalidMessage(f'message "{chr(data[0])}" is inside another transaction', rule="R9.1")
        # Capture never asks for streaming = parallel, but what it adds says nothing that matters here (R1.3).
        message = decode(data, streaming_parallel=len(data) == _LONG_STREAM_ABORT)
        self._HANDLERS[type(message)](self, message)

    def _stretched(self, stretch: TransactionRun) -> Iterator[pa.RecordBatch]:
        if self._open is not None:
            raise InvalidMessage(f"transaction {stretch.xid[0]} is inside another transaction", rule="R9.1")
        lsns = np.append(self.end_lsn.value, stretch.end_lsn)
        for late in np.flatnonzero(np.diff(lsns) <= 0).tolist():
            raise _out_of_order(Lsn(int(lsns[late + 1])), Lsn(int(lsns[late])))
        self.end_lsn = Lsn(int(lsns[-1]))
        new = stretch.after(self._after.value)
        if new.counts.any():
            yield self._finished(log_rows(new.body(self._chunk, self._global), new.stamps(), new.counts))

    def _relation(self, data: bytes) -> None:
        relation = relation_of(data)
        self.relations.setdefault(relation.version, relation)
        if self._open is not None:
            self._open.relations = self._open.relations.with_version(relation.id, relation.version)
        if not self._in_stream:
            self._global = self._global.with_version(relation.id, relation.version)
            if self._open is None or not self._open.is_prepared:
                self.described.add(relation.id)

    def _begin(self, message: m.Begin | m.BeginPrepare) -> None:
        is_prepared = isinstance(message, m.BeginPrepare)
        self._open = OpenTransaction(message.xid, self._global, is_prepared=is_prepared)

    def _commit(self, message: m.Commit) -> None:
        self._complete(self._closed(), message.end_lsn, message.commit_time)

    def _origin(self, message: m.Origin) -> None:
        if self._open is None:
            raise InvalidMessage("an origin is outside of any transaction", rule="R1.12")
        self._open.origin = message.name

    def _type(self, message: m.TypeMessage) -> None:
        """Types are known from the catalog (R1.10)."""

    def _stream_start(self, message: m.StreamStart) -> None:
        if message.is_first:
            self._abandon(message.xid)
            # The server describes every relation again in each streamed transaction (R1.16).
            self._streams[message.xid] = OpenTransaction(message.xid, RelationVersions())
        self._open = self._streamed(message.xid)
        self._in_stream = True

    def _stream_stop(self, _message: m.StreamStop) -> None:
        self._closed(in_stream=True)
        self._in_stream = False

    def _stream_commit(self, message: m.StreamCommit) -> None:
        one = self._end_of_stream(message.xid)
        # From here on the server takes the shapes that it sent in this stream as known to everybody (R1.16).
        self._global = self._global.with_all(one.relations)
        self.described.update(map(RelationId, one.relations.versions))
        self._complete(one, message.end_lsn, message.commit_time)

    def _stream_abort(self, message: m.StreamAbort) -> None:
        if message.xid == message.subxid:
            self._abandon(message.xid)
        elif (one := self._streams.get(message.xid)) is not None:
            if one.tells_of_ddl:
                raise DecodingFailed(
                    f"streamed transaction {one.xid} has DDL and a savepoint that was rolled back, and its"
                    " logical messages do not say whether they are of that one",
                    hint="It can be decoded without streaming.",
                    rule="R1.9",
                )
            one.aborted.add(message.subxid)
            # The subtransaction may have made the shapes: the server describes all of them again (R1.16).
            one.relations = RelationVersions()

    def _prepare(self, message: m.Prepare) -> None:
        self._keep(self._closed(is_prepared=True), message)

    def _stream_prepare(self, message: m.StreamPrepare) -> None:
        self._keep(self._end_of_stream(message.xid), message)

    def _commit_prepared(self, message: m.CommitPrepared) -> None:
        self._advance(message.end_lsn)
        self.decided.add(message.xid)
        key = self._waiting.pop(message.xid, None)
        if key is None:
            return
        self.resolved.append(key)
        if message.end_lsn > self._after:
            is_local = self._local is None or self._local.has_commit(message.end_lsn)
            origin = None if is_local else UNNAMED
            stamp = TransactionStamp(message.end_lsn, message.commit_time, message.xid, origin)
            self._committed.append(_Committed(stamp, prepared=key))

    def _rollback_prepared(self, message: m.RollbackPrepared) -> None:
        self._advance(message.end_lsn)
        self.decided.add(message.xid)
        self.resolved.append(PreparedKey(message.xid, message.prepare_end_lsn))

    _HANDLERS: ClassVar[Mapping[type, Callable[[TransactionAssembler, Any], None]]] = {
        m.Begin: _begin,
        m.Commit: _commit,
        m.Origin: _origin,
        m.TypeMessage: _type,
        m.StreamStart: _stream_start,
        m.StreamStop: _stream_stop,
        m.StreamCommit: _stream_commit,
        m.StreamAbort: _stream_abort,
        m.BeginPrepare: _begin,
        m.Prepare: _prepare,
        m.StreamPrepare: _stream_prepare,
        m.CommitPrepared: _commit_prepared,
        m.RollbackPrepared: _rollback_prepared,
    }

    def _closed(self, *, in_stream: bool = False, is_prepared: bool = False) -> OpenTransaction:
        one = self._open
        if one is None or (self._in_stream, one.is_prepared) != (in_stream, is_prepared):
            raise InvalidMessage("a transaction ends that did not start", rule="R9.1")
        self._open = None
        return one

    def _streamed(self, xid: int) -> OpenTransaction:
        try:
            return self._streams[xid]
        except KeyError:
            raise InvalidMessage(f"streamed transaction {xid} did not start", rule="R9.5") from None

    def _end_of_stream(self, xid: int) -> OpenTransaction:
        one = self._streamed(xid)
        del self._streams[xid]
        return one

    def _abandon(self, xid: int) -> None:
        if (one := self._streams.pop(xid, None)) is not None:
            one.spool.close()

    def _unfinished(self) -> Iterator[OpenTransaction]:
        yield from self._streams.values()
        if self._open is not None and not self._in_stream:
            yield self._open

    def _advance(self, end_lsn: Lsn) -> None:
        if end_lsn <= self.end_lsn:
            raise _out_of_order(end_lsn, self.end_lsn)
        _check_position(end_lsn)
        self.end_lsn = end_lsn

    def _complete(self, one: OpenTransaction, end_lsn: Lsn, commit_time: int | None) -> None:
        self._advance(end_lsn)
        if end_lsn <= self._after:
            one.spool.close()
            return
        self._committed.append(_Committed(TransactionStamp(end_lsn, commit_time, one.xid, one.origin), one))

    def _keep(self, one: OpenTransaction, message: m.Prepare | m.StreamPrepare) -> None:
        # A transaction that was prepared before the slot had two_phase comes with its COMMIT PREPARED, under
        # the position of its PREPARE (R9.9): that says nothing about whether its content is known.
        _check_position(message.end_lsn)
        self.end_lsn = max(self.end_lsn, message.end_lsn)
        one.spill(self._chunk)
        stamp = TransactionStamp(message.end_lsn, message.prepare_time, one.xid, one.origin)
        key = PreparedKey(one.xid, message.end_lsn)
        if self._prepared.store(key, map(self._finished, number_rows(one.bodies(), stamp))):
            self._waiting[one.xid] = key

    def _emitted(self) -> Iterator[pa.RecordBatch]:
        """The rows of the completed transactions; those that lie wholly in the chunk are made together."""
        plain: list[_Committed] = []
        for committed in self._committed:
            if committed.open is not None and committed.open.is_plain:
                plain.append(committed)
                continue
            yield from self._together(plain)
            plain = []
            yield from self._alone(committed)
        yield from self._together(plain)
        self._committed = []

    def _together(self, plain: list[_Committed]) -> Iterator[pa.RecordBatch]:
        runs = [run for one in plain if one.open for run in one.open.runs]
        if not runs:
            return
        counts = [sum(run.stop - run.start for run in one.open.runs) for one in plain if one.open]
        stamps = TransactionStamps.of([one.stamp for one in plain])
        yield self._finished(log_rows(self._chunk.body(runs), stamps, counts))

    def _alone(self, committed: _Committed) -> Iterator[pa.RecordBatch]:
        if committed.open is not None:
            committed.open.spill(self._chunk)
            yield from map(self._finished, number_rows(committed.open.bodies(), committed.stamp))
        elif committed.prepared is not None:
            for batch in self._prepared.content(committed.prepared):
                yield restamp_prepared(batch, committed.stamp)

    def _finished(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows that this peek has sent, as they are written or kept."""
        self.truncated.update(truncated_in(rows))
        return rows if self._local is None else self._local.marked(rows)

    def _counted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            # A message outside of any transaction has no commit time, and is none (R9.13).
            first = pc.and_(pc.equal(batch["seq"], 0), pc.is_valid(batch["commit_time"]))
            self.tally.transactions += first.true_count
            self.tally.messages += batch.num_rows
            self.tally.bytes += pc.sum(pc.binary_length(batch["message"])).as_py() or 0
            self.catalog_messages += catalog_messages(batch)
            yield batch


def _check_position(end_lsn: Lsn) -> None:
    if end_lsn.value > _LAST_LSN:
        raise InvalidMessage(f"a transaction ends at {end_lsn}, where no WAL can be", rule="R1.2")


def _out_of_order(end_lsn: Lsn, previous: Lsn) -> InvalidMessage:
    return InvalidMessage(f"a transaction ends at {end_lsn}, after one that ends at {previous}", rule="R1.28")
