"""Pull the publisher's changes into the change log, in bounded steps that are each durable.

One pull: peek → write the segment → peek again where the first peek does not show all, and write the segment
anew → write relations and definitions (`definitions`) → commit the segment with the new end LSN → advance the
slot. The log is written before the slot moves, so a crash anywhere loses nothing; what is delivered again is
recognised by its end LSN.

| killed at                 | the next pull finds          | and does                                   |
|---------------------------|------------------------------|--------------------------------------------|
| capture.after_peek        | log and slot as before       | the same pull                              |
| capture.after_segment     | a file that no commit names  | the same pull, into another file           |
| capture.after_roots       | such a file, the first or    | the same pull, into another file; what is  |
|                           | the second one, or both      | kept of prepared transactions is replaced  |
| capture.after_definitions | also definitions that are in | takes them out; the same pull              |
|                           | force behind the log's end   |                                            |
| capture.after_commit      | the slot behind the log      | moves the slot, goes on from the log's end |
| capture.after_advance     | everything done              | the next pull                              |

Peeks move nothing, so all peeks of a pull see the same slot. Most pulls need one: the second ones are for
TRUNCATE of partitioned tables (`roots`), and for subscriptions with `origin = none` (`origins`).

The new end is the end of the last transaction that was read. Once the target is reached it is the target
itself, even if nothing was there: all that commits before it was included (R1.23), so it is never inside an
unread transaction, and a slot that is ahead of its log always means a gap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdc_replay.capture.change_origins import LocalChanges, can_filter_origins, read_local_changes
from cdc_replay.capture.ddl.catalog_tracker import CatalogTracker
from cdc_replay.capture.ddl.event_triggers import EVENT_TRIGGERS, read_secret
from cdc_replay.capture.ddl.message_code import MessageFilter
from cdc_replay.capture.ownership import check_ownership
from cdc_replay.capture.root_truncates import PullRange, RootPeeks, merge_root_truncates
from cdc_replay.capture.slot_continuity import (
    align_slot_and_log,
    check_continuity,
    check_no_gap,
    only_reader,
    reachable_lsn,
)
from cdc_replay.capture.transactions import CaptureCounts, TransactionAssembler
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import DecodingFailed
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.postgres.connection import Connection, connect, translated_errors
from cdc_replay.postgres.peek import PeekOptions, RawMessages, peek
from cdc_replay.postgres.slot import check_server, check_slot
from cdc_replay.postgres.slot_feedback import send_slot_feedback
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_XIDS_NAMED: Final = 5
"""How many transactions a warning names."""

_WHY_REFUSED: Final = {
    False: "they do not carry their code, so somebody else has written them",
    True: "the event triggers are not installed, so nothing shows who has written them",
}


@dataclass(frozen=True, slots=True)
class CaptureSource:
    """Where to read and where to keep it.

    One pull is bounded by `max_changes_per_pull` messages, and by `wal_bytes_per_pull`, or twice the WAL that
    the server has to decode again for it, if that is more. `origin_none`: there is a subscription that must
    not see changes with an origin (R8.20).
    """

    publisher: str
    dsn: str
    slot: str
    change_log: str
    streaming: bool = False
    two_phase: bool = False
    max_changes_per_pull: int = 2_000_000
    wal_bytes_per_pull: int = 512 << 20
    origin_none: bool = False
    max_retained_wal: int | None = None
    """In bytes; None: as much as the server lets it."""

    def __repr__(self) -> str:
        # Without the DSN, which may hold a password.
        return f"CaptureSource(publisher={self.publisher!r}, slot={self.slot!r})"


@dataclass(frozen=True, slots=True)
class CaptureOutcome:
    """What went into the log: the transactions in `(from_lsn, to_lsn]`; bytes are those of the messages."""

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
    """Pull until the log holds everything up to `to_lsn` (default: where the publisher writes now).

    A `to_lsn` that is not flushed yet is cut to what is; a run that finds new definitions may go on to
    where it has found them. `progress` is told the log's end and the target after each pull.

    Raises:
        ChangeLogMissing, SlotMissing: before `setup`.
        PublisherNotReady: if the server has not written as far as `to_lsn`.
        SlotActive: if another process captures.
        SlotLost: if the slot cannot give what comes next in the log.
        DecodingFailed: if the server cannot decode what comes next.
        ChangeLogMismatch: if the log is of another cluster, timeline or slot.
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
        check_ownership(connection, EVENT_TRIGGERS)
        log = ChangeLog.open(source.change_log)
        status = check_continuity(connection, log, source.slot)
        align_slot_and_log(connection, log, status)
        log.remove_orphans()
        secret = read_secret(connection, source.slot)
        definitions = CatalogTracker(connection, log, is_exact=secret is not None)
        target = reachable_lsn(connection, definitions.target(to_lsn))
        puller = _Puller(source, connection, log, definitions, secret, two_phase=status.two_phase)
        first = log.end_lsn
        total, pulls = CaptureCounts(), 0
        while log.end_lsn < target:
            total = total + puller.pull(target)
            pulls += 1
            if progress is not None:
                progress(log.end_lsn, target)
    seconds = time.monotonic() - began
    return CaptureOutcome(first, log.end_lsn, pulls, total.transactions, total.messages, total.bytes, seconds)


def current_position(dsn: str) -> Lsn:
    """Where the publisher writes now, as far as a capture can read it: a fence for `capture_changes`."""
    with connect(dsn, purpose="position") as connection:
        return reachable_lsn(connection, None)


class _Puller:
    """Pulls one publisher's changes into one log; the caller holds the lock."""

    def __init__(
        self,
        source: CaptureSource,
        connection: Connection,
        log: ChangeLog,
        definitions: CatalogTracker,
        secret: bytes | None,
        *,
        two_phase: bool,
    ) -> None:
        self._source = source
        self._connection = connection
        self._log = log
        self._definitions = definitions
        self._secret = secret
        self._options = PeekOptions(
            source.slot, tuple(CAPTURE_PUBLICATIONS.values()), source.streaming, two_phase
        )
        # After the target was chosen: an origin that is created later has no change before it.
        self._with_origins = source.origin_none and can_filter_origins(connection)
        self._local: LocalChanges | None = None
        self._second_peeks = RootPeeks(connection, log, source.slot, with_origins=self._with_origins)

    def pull(self, target: Lsn) -> CaptureCounts:
        """One pull towards `target`, durable when it returns; it always moves the log's end.

        With streaming a peek may end before any transaction is complete (R1.24): it is then repeated with
        twice the bound.
        """
        limit = self._source.max_changes_per_pull
        target = min(target, self._reach())
        self._definitions.read_again()
        while (tally := self._either_way(target, limit)) is None:
            limit *= 2
        return tally

    def _reach(self) -> Lsn:
        """How far one pull goes, so that what has been read is replayed while the rest is.

        Each pull decodes from the slot's restart_lsn on (R1.31), which an open transaction may hold back: a
        pull reaches twice as far as that is away, so that not much more is decoded than in a single one.
        """
        end = self._log.end_lsn
        restart = check_slot(self._connection, self._source.slot).restart_lsn or end
        return Lsn(end.value + max(self._source.wal_bytes_per_pull, 2 * (end.value - restart.value)))

    def _either_way(self, target: Lsn, limit: int) -> CaptureCounts | None:
        """Try with streaming if that is wanted, and without where the server cannot decode otherwise.

        A table that was altered in a savepoint that was rolled back, and then again, cannot be decoded before
        the transaction ends: the server still believes the rolled back change (seen on 15 and 18).
        """
        try:
            return self._try(target, limit)
        except DecodingFailed as error:
            if not self._options.streaming:
                raise
            logger.warning("%s; reading on without streaming", error.message)
            self._options = dataclasses.replace(self._options, streaming=False)
            return self._try(target, limit)

    def _try(self, target: Lsn, limit: int) -> CaptureCounts | None:
        began, after = time.monotonic(), self._log.end_lsn
        if (local := self._local_changes(target, limit)) is not None:
            target = min(target, local.upto)
        batches = peek(self._connection, self._options, upto_lsn=target, upto_nchanges=limit)
        messages = MessageFilter(self._secret)
        assembler = TransactionAssembler(after, self._log.prepared, local, messages=messages)
        with contextlib.closing(batches), assembler:
            peeked = _Peeked(batches)
            segments = self._log.write(_rows(peeked, assembler))
            failpoint("capture.after_segment")
            is_complete = peeked.messages < limit
            end = max(assembler.end_lsn, target) if is_complete else assembler.end_lsn
            if end <= after:
                return None
            defined = self._definitions.catalogs_for_pull(
                Window(after, end), assembler.catalog_messages, assembler.described_relations
            )
            pull = PullRange(after, end, defined.before, defined.now, defined.between)
            roots = self._second_peeks.roots(pull, assembler)
            segments, more = merge_root_truncates(self._log, segments, roots)
            failpoint("capture.after_roots")
            # Whoever moved the slot since the pull before has taken changes that this peek did not see.
            check_no_gap(self._connection, self._log, self._source.slot)
            self._log.add_relations({**assembler.relations, **roots.relations})
            self._log.add_catalogs(defined.added)
            failpoint("capture.after_definitions")
            self._log.commit(segments, end)
            failpoint("capture.after_commit")
            self._definitions.commit_pull(defined)
            self._log.prepared.forget(assembler.resolved)
            self._second_peeks.forget(roots)
        source = self._source
        send_slot_feedback(
            self._connection, source.dsn, source.slot, end, publication=self._options.publications[0]
        )
        failpoint("capture.after_advance")
        _warn_of_refused(source.publisher, messages)
        tally = assembler.tally + more
        logger.info(
            "captured %s (%s, %s]: %d transactions, %d messages, %d bytes, %.2f s",
            self._source.publisher, after, end, tally.transactions, tally.messages, tally.bytes,
            time.monotonic() - began,
        )  # fmt: skip
        return tally

    def _local_changes(self, target: Lsn, limit: int) -> LocalChanges | None:
        """What `origin = none` sends of what comes next, if that matters (R8.20).

        It reaches past the log's end, unless `limit` is too small for that.
        """
        if not self._with_origins:
            return None
        if self._local is None or self._local.upto <= self._log.end_lsn:
            began, after = time.monotonic(), self._log.end_lsn
            self._local = read_local_changes(
                self._connection, self._options, upto_lsn=target, upto_nchanges=limit
            )
            logger.info(
                "peeked (%s, %s] of %s with origin = none: %d changes, %.2f s",
                after, self._local.upto, self._source.publisher, len(self._local.changes),
                time.monotonic() - began,
            )  # fmt: skip
        return self._local


def _warn_of_refused(publisher: str, messages: MessageFilter) -> None:
    if not messages.refused:
        return
    xids = sorted(messages.refused)
    named = ", ".join(map(str, xids[:_XIDS_NAMED])) + (", …" if len(xids) > _XIDS_NAMED else "")
    logger.warning(
        "publisher %s: ignored %d logical messages that have the prefix of the event triggers"
        " (transactions %s): %s",
        *(publisher, messages.refused.total(), named, _WHY_REFUSED[messages.secret is None]),
    )


class _Peeked:
    """The batches of a peek, counted as they are read."""

    def __init__(self, batches: Iterator[RawMessages]) -> None:
        self._batches = batches
        self.messages = 0

    def __iter__(self) -> Iterator[RawMessages]:
        for batch in self._batches:
            if self.messages == 0:
                failpoint("capture.after_peek")
            self.messages += len(batch.lsn)
            yield batch


def _rows(peeked: _Peeked, assembler: TransactionAssembler) -> Iterator[pa.RecordBatch]:
    for messages in peeked:
        yield from assembler.feed(messages)
