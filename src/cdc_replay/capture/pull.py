"""Pulls the publisher's changes into the change log, in bounded steps that are each durable.

One pull: peek, in two pieces if it is long (`split_peek`) → write the segment → for truncated partitioned
tables, peek again and rewrite the segment → write relations and catalogs → commit the segment with the new
end LSN → advance the slot. The log is written before the slot moves, so a crash loses nothing; redelivered
transactions are recognised by their end LSN.

| killed at                 | state at the next pull        | what it does                            |
|---------------------------|-------------------------------|-----------------------------------------|
| capture.after_peek        | log and slot unchanged        | repeats the pull                        |
| capture.after_segment     | an uncommitted file           | repeats the pull into another file      |
| capture.after_roots       | one or two uncommitted files  | the same; replaces stored prepared rows |
| capture.after_definitions | also catalogs after log's end | removes them, repeats the pull          |
| capture.after_commit      | slot before the log's end     | moves the slot, continues at log's end  |
| capture.after_advance     | pull complete                 | the next pull                           |

Peeks do not move the slot, so all peeks of a pull read the same changes. Extra peeks are needed for TRUNCATE
of partitioned tables (`root_truncates`) and for subscriptions with `origin = none` (`change_origins`).

The new end is the end of the last transaction that was read, or the target once it is reached: everything
that commits before it was read (R1.23). So the log never ends inside an unread transaction, and a slot past
the log's end always means a gap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from cdc_replay.capture.change_origins import LocalChanges, can_filter_origins, read_local_changes
from cdc_replay.capture.ddl.catalog_tracker import CatalogTracker, PullCatalogs
from cdc_replay.capture.ddl.event_triggers import EVENT_TRIGGERS, read_secret
from cdc_replay.capture.ddl.message_code import MessageFilter
from cdc_replay.capture.ownership import check_ownership
from cdc_replay.capture.root_truncates import PullRange, RootPeeks, merge_root_truncates
from cdc_replay.capture.slot_continuity import (
    align_slot_and_log,
    check_continuity,
    check_no_gap,
    reachable_lsn,
)
from cdc_replay.capture.slot_lock import only_reader
from cdc_replay.capture.split_peek import SplitPeek, may_split
from cdc_replay.capture.transactions import CaptureCounts, TransactionAssembler
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import DecodingFailed
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.progress import Progress, Report, unreported
from cdc_replay.postgres.connection import Connection, connect, translated_errors
from cdc_replay.postgres.peek import PeekOptions, RawMessages, use_decoding_memory
from cdc_replay.postgres.slot import check_server, check_slot
from cdc_replay.postgres.slot_feedback import send_slot_feedback
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_MAX_XIDS_NAMED: Final = 5
"""A warning names at most this many transactions."""

_REJECTED_BECAUSE: Final = {
    False: "their code is missing or wrong, so another program wrote them",
    True: "the event triggers are not installed, so their author cannot be verified",
}


@dataclass(frozen=True, slots=True)
class CaptureSource:
    """A publisher's slot, its change log and the capture options.

    A pull reads at most about `wal_bytes_per_pull` of WAL, or twice the WAL that the server decodes again for
    it, if that is more; without streaming, `max_changes_per_pull` messages in each of its pieces at most.
    `origin_none`: some subscription has `origin = none` (R8.20).
    """

    publisher: str
    dsn: str
    slot: str
    change_log: str
    streaming: bool = False
    two_phase: bool = False
    max_changes_per_pull: int = 2_000_000
    wal_bytes_per_pull: int = 512 << 20
    split_bytes: int = 32 << 20
    """A pull of at least so much WAL is read in two pieces."""
    origin_none: bool = False
    max_retained_wal: int | None = None
    """In bytes; None: no limit other than the server's."""
    report: Report = field(default=unreported, compare=False)

    def __repr__(self) -> str:
        # Without the DSN, which may hold a password.
        return f"CaptureSource(publisher={self.publisher!r}, slot={self.slot!r})"


@dataclass(frozen=True, slots=True)
class CaptureOutcome:
    """Counts of the captured transactions in `(from_lsn, to_lsn]`; `bytes` is the size of the messages."""

    from_lsn: Lsn
    to_lsn: Lsn
    pulls: int
    transactions: int
    messages: int
    bytes: int
    seconds: float


def capture_changes(
    source: CaptureSource, to_lsn: Lsn | None = None, *, progress: Callable[[Lsn, Lsn], None] | None = None
) -> CaptureOutcome:
    """Pull until the log holds everything up to `to_lsn` (default: the current WAL position).

    If `to_lsn` is not flushed yet, the flush position is the target. A run that reads a new catalog may
    continue to the position of that catalog. `progress` is called with log end and target after each pull.

    Raises:
        ChangeLogMissing, SlotMissing: before `setup`.
        PublisherNotReady: if the server's WAL has not reached `to_lsn`.
        SlotActive: if another process captures.
        SlotLost: if the slot no longer has the changes after the log's end.
        DecodingFailed: if the server cannot decode the next changes.
        ChangeLogMismatch: if the log belongs to another cluster, timeline or slot.
        ChangeLogConflict: if something else writes to the log.
        PublicationMissing: if a capture publication was dropped.
    """
    began = time.monotonic()
    with (
        translated_errors(f'cannot capture publisher "{source.publisher}"'),
        connect(source.dsn, purpose=f"capture {source.publisher}") as connection,
        only_reader(connection, source.slot),
    ):
        check_server(connection)
        use_decoding_memory(connection)
        check_ownership(connection, EVENT_TRIGGERS)
        log = ChangeLog.open(source.change_log)
        status = check_continuity(connection, log, source.slot)
        align_slot_and_log(connection, log, status)
        log.remove_dead_pulls()
        secret = read_secret(connection, source.slot)
        catalogs = CatalogTracker(connection, log, is_exact=secret is not None)
        target = reachable_lsn(connection, catalogs.target(to_lsn))
        puller = _Puller(source, connection, log, catalogs, secret, two_phase=status.two_phase)
        from_lsn = log.end_lsn
        total, pulls = CaptureCounts(), 0
        while log.end_lsn < target:
            total = total + puller.pull(target)
            pulls += 1
            if progress is not None:
                progress(log.end_lsn, target)
    seconds = time.monotonic() - began
    return CaptureOutcome(
        from_lsn, log.end_lsn, pulls, total.transactions, total.messages, total.bytes, seconds
    )


def current_position(dsn: str) -> Lsn:
    """The publisher's current WAL position that a capture can reach."""
    with connect(dsn, purpose="position") as connection:
        return reachable_lsn(connection, None)


class _Puller:
    """Pulls one publisher's changes into one log; the caller holds the lock."""

    def __init__(
        self,
        source: CaptureSource,
        connection: Connection,
        log: ChangeLog,
        catalogs: CatalogTracker,
        secret: bytes | None,
        *,
        two_phase: bool,
    ) -> None:
        self._source = source
        self._connection = connection
        self._log = log
        self._catalogs = catalogs
        self._secret = secret
        self._restart_lsn = log.end_lsn
        self._may_split = may_split(connection)
        self._progress = _CaptureProgress(source, log.end_lsn)
        self._options = PeekOptions(
            source.slot, tuple(CAPTURE_PUBLICATIONS.values()), source.streaming, two_phase
        )
        # After the target was chosen: an origin that is created later has no changes before the target.
        self._with_origins = source.origin_none and can_filter_origins(connection)
        self._local_changes: LocalChanges | None = None
        self._root_peeks = RootPeeks(connection, log, source.slot, with_origins=self._with_origins)

    def pull(self, target: Lsn) -> CaptureCounts:
        """Pull once towards `target`; durable on return, and the log's end has moved.

        The limit of messages would end a streamed peek inside a transaction (R1.24), and another peek with
        what is sent again (R1.30): without it, that of WAL remains.
        """
        limit = None if self._options.streaming else self._source.max_changes_per_pull
        self._progress.target = target
        target = min(target, self._pull_limit())
        self._catalogs.refresh()
        while (counts := self._pull_with_fallback(target, limit)) is None:
            limit = None
        self._progress.report(self._log.end_lsn)
        return counts

    def _pull_limit(self) -> Lsn:
        """The furthest end of one pull, so that replay can start while the next pull reads.

        Each pull decodes from restart_lsn on (R1.31), which an open transaction may hold back. A pull covers
        at least twice that distance, which bounds the total of repeated decoding.
        """
        end = self._log.end_lsn
        self._restart_lsn = check_slot(self._connection, self._source.slot).restart_lsn or end
        decoded_again = end.value - self._restart_lsn.value
        return Lsn(end.value + max(self._source.wal_bytes_per_pull, 2 * decoded_again))

    def _pull_with_fallback(self, target: Lsn, limit: int | None) -> CaptureCounts | None:
        """Pull with streaming if configured, and without if the server cannot decode the changes otherwise.

        If a table is altered in a rolled-back savepoint, and then again, the server cannot decode it before
        the transaction ends: it still applies the rolled-back change (seen on 15 and 18).
        """
        try:
            return self._pull_once(target, limit)
        except DecodingFailed as error:
            if not self._options.streaming:
                raise
            logger.warning("%s; continuing without streaming", error.message)
            self._options = dataclasses.replace(self._options, streaming=False)
            return self._pull_once(target, limit)

    def _pull_once(self, target: Lsn, limit: int | None) -> CaptureCounts | None:
        began, after = time.monotonic(), self._log.end_lsn
        if (local_changes := self._read_local_changes(target, limit)) is not None:
            target = min(target, local_changes.upto)
        pieces = self._split_peek(Window(after, target), limit)
        messages = MessageFilter(self._secret)
        assembler = TransactionAssembler(after, self._log.prepared, local_changes, messages=messages)
        with contextlib.closing(pieces.batches()) as batches, assembler:
            segments = self._log.write(_log_rows(self._reported(batches), assembler))
            failpoint("capture.after_segment")
            self._may_split = pieces.may_split
            end = max(assembler.end_lsn, pieces.complete_upto)
            if end <= after:
                return None
            pull_catalogs = self._catalogs.catalogs_for_pull(
                Window(after, end), assembler.catalog_messages, assembler.described_relations
            )
            roots = self._root_peeks.read(self._pull_range(after, end, pull_catalogs), assembler)
            segments, root_counts = merge_root_truncates(self._log, segments, roots)
            failpoint("capture.after_roots")
            # If another reader moved the slot since the previous pull, this peek missed changes.
            check_no_gap(self._connection, self._log, self._source.slot)
            self._log.add_relations({**assembler.relations, **roots.relations})
            self._log.add_catalogs(pull_catalogs.added)
            failpoint("capture.after_definitions")
            self._log.commit(segments, end)
            failpoint("capture.after_commit")
            self._catalogs.commit_pull(pull_catalogs)
            self._log.prepared.remove(assembler.resolved)
            self._root_peeks.forget(roots)
        source = self._source
        send_slot_feedback(
            self._connection, source.dsn, source.slot, end, publication=self._options.publications[0]
        )
        failpoint("capture.after_advance")
        _warn_of_rejected(source.publisher, messages)
        counts = assembler.counts + root_counts
        logger.info(
            "captured %s (%s, %s]: %d transactions, %d messages, %d bytes, %.2f s",
            self._source.publisher, after, end, counts.transactions, counts.messages, counts.bytes,
            time.monotonic() - began,
        )  # fmt: skip
        return counts

    def _pull_range(self, after: Lsn, upto: Lsn, catalogs: PullCatalogs) -> PullRange:
        return PullRange(after, upto, catalogs.before, catalogs.now, catalogs.between, catalogs.is_exact)

    def _split_peek(self, window: Window, limit: int | None) -> SplitPeek:
        return SplitPeek(
            self._connection,
            self._source.dsn,
            self._options,
            window,
            limit,
            least_bytes=self._source.split_bytes,
            restart_lsn=self._restart_lsn,
            may_split=self._may_split,
        )

    def _reported(self, batches: Iterator[RawMessages]) -> Iterator[RawMessages]:
        for index, batch in enumerate(batches):
            if index == 0:
                failpoint("capture.after_peek")
            self._progress.report(Lsn(int(batch.lsn[-1])))
            yield batch

    def _read_local_changes(self, target: Lsn, limit: int | None) -> LocalChanges | None:
        """The next changes that `origin = none` sends, if some subscription needs them (R8.20).

        They end after the log's end, unless `limit` is too small.
        """
        if not self._with_origins:
            return None
        if self._local_changes is None or self._local_changes.upto <= self._log.end_lsn:
            began, after = time.monotonic(), self._log.end_lsn
            self._local_changes = read_local_changes(
                self._connection, self._options, upto_lsn=target, upto_nchanges=limit
            )
            logger.info(
                "peeked (%s, %s] of %s with origin = none: %d changes, %.2f s",
                after, self._local_changes.upto, self._source.publisher, len(self._local_changes.changes),
                time.monotonic() - began,
            )  # fmt: skip
        return self._local_changes


def _warn_of_rejected(publisher: str, messages: MessageFilter) -> None:
    if not messages.refused:
        return
    xids = sorted(messages.refused)
    xids_text = ", ".join(map(str, xids[:_MAX_XIDS_NAMED])) + (", …" if len(xids) > _MAX_XIDS_NAMED else "")
    logger.warning(
        "publisher %s: ignored %d logical messages with the prefix of the event triggers"
        " (transactions %s): %s",
        *(publisher, messages.refused.total(), xids_text, _REJECTED_BECAUSE[messages.secret is None]),
    )


@dataclass(slots=True)
class _CaptureProgress:
    """Reports how much of the WAL between `start` and `target` has been read."""

    source: CaptureSource
    start: Lsn
    target: Lsn = ZERO
    highest: Lsn = ZERO

    def report(self, lsn: Lsn) -> None:
        """The position `lsn` is read; changes of concurrent transactions are not in order of it."""
        self.highest = max(self.highest, min(lsn, self.target), self.start)
        done, total = self.highest.value - self.start.value, self.target.value - self.start.value
        self.source.report(Progress("capture", self.source.publisher, done, total))


def _log_rows(batches: Iterator[RawMessages], assembler: TransactionAssembler) -> Iterator[pa.RecordBatch]:
    for messages in batches:
        yield from assembler.feed(messages)
