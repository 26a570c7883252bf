"""Assembles the messages of one pull into log rows: committed transactions only, in commit order.

| on the wire         | effect                                                                       |
|---------------------|------------------------------------------------------------------------------|
| B … C               | a complete, committed transaction (R9.1)                                     |
| S … E S … E c       | collected by xid until c; interleaved with other transactions (R9.5)         |
| A(top, sub)         | the rows of `sub` are dropped at c; all rows if `sub` is `top`               |
| S … without c, A, p | dropped: the next peek sends the transaction again, perhaps as B … C (R1.26) |
| b … P, S … E p      | stored durably until the outcome (R9.8); replaced if it is sent again        |
| K                   | the stored rows, if any, become a transaction at K's position (R9.9)         |
| r                   | the stored rows are removed                                                  |
| M                   | a row; other messages than the event triggers' were dropped (`message_code`) |
| R                   | version of the following rows' relation; in a stream, local until c (R1.16)  |
| O                   | origin of the transaction (R1.12)                                            |
| Y                   | ignored: types are read from the catalog                                     |

Transactions that end at or before the log's end are already in the log and are skipped (R1.30). `seq` is
assigned after aborted subtransactions are dropped, so streaming does not change the rows of a transaction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import numpy as np

from cdc_replay.arrow.byte_slices import view_bytes
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
from cdc_replay.capture.plain_transactions import TransactionRun, split_runs
from cdc_replay.capture.spool import limit_memory
from cdc_replay.capture.truncate_rows import truncated_relations
from cdc_replay.changelog.prepared_transactions import PreparedKey, PreparedTransactions
from cdc_replay.changelog.queries import first_messages
from cdc_replay.errors import DecodingFailed, InvalidMessage
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.relation import Relation, RelationId
from cdc_replay.pgoutput import messages as m
from cdc_replay.pgoutput.reader import decode, parse_relation
from cdc_replay.postgres.peek import RawMessages

if TYPE_CHECKING:
    import pyarrow as pa

_LONG_STREAM_ABORT: Final = 1 + 4 + 4 + 8 + 8
_RELATION: Final = ord(m.MessageType.RELATION.value)
_LAST_LSN: Final = 2**63 - 1
"""The log stores positions as signed 64-bit integers."""
_OUTSIDE: Final = frozenset(b"BSbcAprK")
"""Message types that never occur inside a transaction or block."""


@dataclass(frozen=True, slots=True)
class _CommittedTransaction:
    """A committed transaction; its rows are in `transaction`, or stored under `prepared`."""

    stamp: TransactionStamp
    transaction: OpenTransaction | None = None
    prepared: PreparedKey | None = None


@dataclass(slots=True)
class CaptureCounts:
    """Counts of captured transactions and messages; `bytes` is the size of the messages."""

    transactions: int = 0
    messages: int = 0
    bytes: int = 0

    def __add__(self, other: CaptureCounts) -> CaptureCounts:
        return CaptureCounts(
            self.transactions + other.transactions, self.messages + other.messages, self.bytes + other.bytes
        )


class TransactionAssembler:
    """Assembles the messages of one peek (R1.9, R1.14), or of two in succession; a context manager.

    `after` is the end of the log. `prepared` stores prepared transactions. `local` lists the changes without
    an origin, if some subscription needs that (R8.20). `messages` drops foreign logical messages.
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
        """The end of the last complete transaction, including skipped ones."""
        self.relations: dict[int, Relation] = {}
        """All relations that were sent, by version."""
        self.resolved: list[PreparedKey] = []
        """Prepared transactions to remove once this pull is committed."""
        self.decided_xids: set[int] = set()
        """The xids of prepared transactions whose outcome was sent, stored or not."""
        self.truncated_in_peek: set[RelationId] = set()
        """The relations truncated in this peek, including prepared transactions."""
        self.has_prepared_ddl = False
        """Whether a transaction that was prepared in this peek has messages of the event triggers."""
        self.catalog_messages: list[CatalogMessage] = []
        """The event triggers' messages of committed transactions."""
        self.described_relations: set[RelationId] = set()
        """The relations that committed transactions changed or that were described in them."""
        self.counts = CaptureCounts()
        self._after = after
        self._prepared = prepared
        self._local = local
        self._messages = messages or MessageFilter(secret=None)
        self._waiting = {key.xid: key for key in prepared.list_keys()}
        self._global = RelationVersions()
        self._open: OpenTransaction | None = None
        self._in_stream = False
        self._streams: dict[int, OpenTransaction] = {}
        self._committed: list[_CommittedTransaction] = []
        self._batch: MessageBatch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for transaction in self._unfinished_transactions():
            transaction.spool.close()

    def feed(self, raw: RawMessages) -> Iterator[pa.RecordBatch]:
        """Add the next messages; yields log rows of the transactions that they complete.

        Raises:
            InvalidMessage: if the messages violate the protocol.
            DecodingFailed: if a streamed transaction can only be read without streaming.
        """
        batch = self._messages.drop_foreign(MessageBatch.from_raw(raw, in_stream=self._in_stream))
        self._batch = batch
        yield from self._count(self._assemble(batch))
        for transaction in self._unfinished_transactions():
            transaction.spill(batch)
        limit_memory(transaction.spool for transaction in self._unfinished_transactions())

    def _assemble(self, batch: MessageBatch) -> Iterator[pa.RecordBatch]:
        position = 0
        for part in split_runs(batch):
            start = part.start if isinstance(part, TransactionRun) else part
            if start > position:
                self._add_data(position, start)
            if isinstance(part, TransactionRun):
                yield from self._emit_completed()
                yield from self._emit_run(part)
                position = part.stop
            else:
                self._handle_control(part)
                position = part + 1
        if len(batch.kinds) > position:
            self._add_data(position, len(batch.kinds))
        yield from self._emit_completed()

    def _add_data(self, start: int, stop: int) -> None:
        if (transaction := self._open) is not None:
            transaction.runs.append(MessageRange(start, stop, transaction.relations))
            if self._in_stream and not transaction.has_ddl_messages:
                transaction.has_ddl_messages = self._batch.has_logical_message(start, stop)
            return
        raise InvalidMessage("a change is outside of any transaction", rule="R9.1")

    def _handle_control(self, position: int) -> None:
        data = self._batch.message(position)
        if data[0] == _RELATION:
            self._relation(data)
            return
        if self._open is not None and data[0] in _OUTSIDE:
            raise InvalidMessage(f'message "{chr(data[0])}" is inside another transaction', rule="R9.1")
        # Capture never uses streaming = parallel; its extra fields would be ignored here (R1.3).
        message = decode(data, streaming_parallel=len(data) == _LONG_STREAM_ABORT)
        self._HANDLERS[type(message)](self, message)

    def _emit_run(self, run: TransactionRun) -> Iterator[pa.RecordBatch]:
        if self._open is not None:
            raise InvalidMessage(f"transaction {run.xid[0]} is inside another transaction", rule="R9.1")
        lsns = np.append(self.end_lsn.value, run.end_lsn)
        for index in np.flatnonzero(np.diff(lsns) <= 0).tolist():
            raise _out_of_order(Lsn(int(lsns[index + 1])), Lsn(int(lsns[index])))
        self.end_lsn = Lsn(int(lsns[-1]))
        new = run.after(self._after.value)
        if new.counts.any():
            yield self._finish_rows(log_rows(new.body(self._batch, self._global), new.stamps(), new.counts))

    def _relation(self, data: bytes) -> None:
        relation = parse_relation(data)
        self.relations.setdefault(relation.version, relation)
        if self._open is not None:
            self._open.relations = self._open.relations.with_version(relation.id, relation.version)
        if not self._in_stream:
            self._global = self._global.with_version(relation.id, relation.version)
            if self._open is None or not self._open.is_prepared:
                self.described_relations.add(relation.id)

    def _begin(self, message: m.Begin | m.BeginPrepare) -> None:
        is_prepared = isinstance(message, m.BeginPrepare)
        self._open = OpenTransaction(message.xid, self._global, is_prepared=is_prepared)

    def _commit(self, message: m.Commit) -> None:
        self._complete(self._close_open(), message.end_lsn, message.commit_time)

    def _origin(self, message: m.Origin) -> None:
        if self._open is None:
            raise InvalidMessage("an origin is outside of any transaction", rule="R1.12")
        self._open.origin = message.name

    def _type(self, message: m.TypeMessage) -> None:
        """Ignored: types are read from the catalog (R1.10)."""

    def _stream_start(self, message: m.StreamStart) -> None:
        if message.is_first:
            self._abandon(message.xid)
            # The server describes every relation again in each streamed transaction (R1.16).
            self._streams[message.xid] = OpenTransaction(message.xid, RelationVersions())
        self._open = self._stream_of(message.xid)
        self._in_stream = True

    def _stream_stop(self, _message: m.StreamStop) -> None:
        self._close_open(in_stream=True)
        self._in_stream = False

    def _stream_commit(self, message: m.StreamCommit) -> None:
        transaction = self._pop_stream(message.xid)
        # From here on the server regards the relations of this stream as sent to all transactions (R1.16).
        self._global = self._global.with_all(transaction.relations)
        self.described_relations.update(map(RelationId, transaction.relations.versions))
        self._complete(transaction, message.end_lsn, message.commit_time)

    def _stream_abort(self, message: m.StreamAbort) -> None:
        if message.xid == message.subxid:
            self._abandon(message.xid)
        elif (transaction := self._streams.get(message.xid)) is not None:
            if transaction.has_ddl_messages:
                raise DecodingFailed(
                    f"streamed transaction {transaction.xid} contains DDL and a rolled-back savepoint",
                    detail="Streamed logical messages do not name the savepoint that they were written in.",
                    hint="The transaction can be read without streaming.",
                    rule="R1.9",
                )
            transaction.aborted.add(message.subxid)
            # The subtransaction may have altered relations: the server describes all of them again (R1.16).
            transaction.relations = RelationVersions()

    def _prepare(self, message: m.Prepare) -> None:
        self._store_prepared(self._close_open(is_prepared=True), message)

    def _stream_prepare(self, message: m.StreamPrepare) -> None:
        self._store_prepared(self._pop_stream(message.xid), message)

    def _commit_prepared(self, message: m.CommitPrepared) -> None:
        self._advance(message.end_lsn)
        self.decided_xids.add(message.xid)
        key = self._waiting.pop(message.xid, None)
        if key is None:
            return
        self.resolved.append(key)
        if message.end_lsn > self._after:
            is_local = self._local is None or self._local.has_commit(message.end_lsn)
            origin = None if is_local else UNNAMED
            stamp = TransactionStamp(message.end_lsn, message.commit_time, message.xid, origin)
            self._committed.append(_CommittedTransaction(stamp, prepared=key))

    def _rollback_prepared(self, message: m.RollbackPrepared) -> None:
        self._advance(message.end_lsn)
        self.decided_xids.add(message.xid)
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

    def _close_open(self, *, in_stream: bool = False, is_prepared: bool = False) -> OpenTransaction:
        transaction = self._open
        if transaction is None or (self._in_stream, transaction.is_prepared) != (in_stream, is_prepared):
            raise InvalidMessage("a transaction ends that did not start", rule="R9.1")
        self._open = None
        return transaction

    def _stream_of(self, xid: int) -> OpenTransaction:
        try:
            return self._streams[xid]
        except KeyError:
            raise InvalidMessage(f"streamed transaction {xid} did not start", rule="R9.5") from None

    def _pop_stream(self, xid: int) -> OpenTransaction:
        transaction = self._stream_of(xid)
        del self._streams[xid]
        return transaction

    def _abandon(self, xid: int) -> None:
        if (transaction := self._streams.pop(xid, None)) is not None:
            transaction.spool.close()

    def _unfinished_transactions(self) -> Iterator[OpenTransaction]:
        yield from self._streams.values()
        if self._open is not None and not self._in_stream:
            yield self._open

    def _advance(self, end_lsn: Lsn) -> None:
        if end_lsn <= self.end_lsn:
            raise _out_of_order(end_lsn, self.end_lsn)
        _check_position(end_lsn)
        self.end_lsn = end_lsn

    def _complete(self, transaction: OpenTransaction, end_lsn: Lsn, commit_time: int | None) -> None:
        self._advance(end_lsn)
        if end_lsn <= self._after:
            transaction.spool.close()
            return
        stamp = TransactionStamp(end_lsn, commit_time, transaction.xid, transaction.origin)
        self._committed.append(_CommittedTransaction(stamp, transaction))

    def _store_prepared(self, transaction: OpenTransaction, message: m.Prepare | m.StreamPrepare) -> None:
        # A transaction that was prepared before the slot had two_phase is sent together with its COMMIT
        # PREPARED, at its PREPARE's LSN (R9.9): that may be before the log's end although its rows are new.
        _check_position(message.end_lsn)
        self.end_lsn = max(self.end_lsn, message.end_lsn)
        transaction.spill(self._batch)
        stamp = TransactionStamp(message.end_lsn, message.prepare_time, transaction.xid, transaction.origin)
        key = PreparedKey(transaction.xid, message.end_lsn)
        if self._prepared.store(key, map(self._finish_prepared, number_rows(transaction.bodies(), stamp))):
            self._waiting[transaction.xid] = key

    def _emit_completed(self) -> Iterator[pa.RecordBatch]:
        """Rows of completed transactions; those that lie completely in the batch are built together."""
        plain: list[_CommittedTransaction] = []
        for committed in self._committed:
            if committed.transaction is not None and committed.transaction.is_plain:
                plain.append(committed)
                continue
            yield from self._emit_plain(plain)
            plain = []
            yield from self._emit_single(committed)
        yield from self._emit_plain(plain)
        self._committed = []

    def _emit_plain(self, plain: list[_CommittedTransaction]) -> Iterator[pa.RecordBatch]:
        ranges = [committed.transaction.runs for committed in plain if committed.transaction]
        if not any(ranges):
            return
        counts = [sum(run.stop - run.start for run in runs) for runs in ranges]
        stamps = TransactionStamps.from_stamps([committed.stamp for committed in plain])
        body = self._batch.body(list(itertools.chain.from_iterable(ranges)))
        yield self._finish_rows(log_rows(body, stamps, counts))

    def _emit_single(self, committed: _CommittedTransaction) -> Iterator[pa.RecordBatch]:
        if (transaction := committed.transaction) is not None:
            transaction.spill(self._batch)
            yield from map(self._finish_rows, number_rows(transaction.bodies(), committed.stamp))
        elif committed.prepared is not None:
            for batch in self._prepared.content(committed.prepared):
                yield restamp_prepared(batch, committed.stamp)

    def _finish_prepared(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        self.has_prepared_ddl |= next(catalog_messages(rows), None) is not None
        return self._finish_rows(rows)

    def _finish_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        self.truncated_in_peek.update(truncated_relations(rows))
        return rows if self._local is None else self._local.mark_origins(rows)

    def _count(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.counts.transactions += first_messages(batch).true_count
            self.counts.messages += batch.num_rows
            self.counts.bytes += view_bytes(batch["message"])
            self.catalog_messages += catalog_messages(batch)
            yield batch


def _check_position(end_lsn: Lsn) -> None:
    if end_lsn.value > _LAST_LSN:
        raise InvalidMessage(f"a transaction ends at {end_lsn}, beyond the largest WAL position", rule="R1.2")


def _out_of_order(end_lsn: Lsn, previous: Lsn) -> InvalidMessage:
    return InvalidMessage(f"a transaction ends at {end_lsn}, after one that ends at {previous}", rule="R1.28")
