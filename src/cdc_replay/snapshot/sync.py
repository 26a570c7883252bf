"""Snapshot where needed, then capture and replay, for subscriptions of one publisher side by side.

On return the subscribers equal the publisher's filtered state as of one LSN. If the publisher has rewritten a
table without sending its rows (R11.9), all subscriptions are brought to a fence, and the values of that table
are compared there (`replay.rewritten_values`); an obstacle to that is a warning, and changes are still
applied.

A subscription whose subscriber does not answer, or whose snapshot fails, stops no other one. Its ready tables
are still replayed, and the error is in its result.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psycopg

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.results import CaptureResult, ReplayResult, SnapshotResult, SyncResult
from cdc_replay.replay.capture_and_replay import capture_and_replay
from cdc_replay.replay.rewritten_values import compare_marked, warn_of_failure
from cdc_replay.snapshot.run import SnapshotOptions, snapshot_lsn, snapshot_session
from cdc_replay.subscriber.session import SubscriptionSession

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """The publisher, the LSN that all subscriptions are brought to, and how each of them is copied."""

    source: CaptureSource
    target: Lsn
    options: Mapping[str, SnapshotOptions]


def sync_sessions(
    request: SyncRequest, sessions: Sequence[SubscriptionSession], failures: Mapping[str, Exception]
) -> Mapping[str, SyncResult]:
    """Sync the subscriptions; `failures` are those that could not be opened. One result for each of both.

    Raises:
        CdcReplayError: from capture, or the first failure if no subscription has tables to replay.
    """
    sync = _Sync(request, dict(failures))
    sync.copy_and_replay(sessions)
    sync.compare_rewritten(sessions)
    names = (*failures, *(session.subscription.name for session in sessions))
    return {name: sync.result(name) for name in names}


@dataclass(slots=True)
class _Sync:
    request: SyncRequest
    failures: dict[str, Exception]
    """By subscription: why it could not be opened or copied."""
    results: dict[str, SyncResult] = field(default_factory=dict)
    captured: CaptureResult | None = None

    def copy_and_replay(self, sessions: Sequence[SubscriptionSession]) -> None:
        """Copy what waits for it, then capture and replay what has tables.

        Raises:
            ChangeLogMissing: before `setup` of the publisher.
            CdcReplayError: from capture, or the first failure if there is nothing to replay.
        """
        began = time.monotonic()
        change_log = ChangeLog.open(self.request.source.change_log)
        snapshots = {session.subscription.name: self._snapshot(session, change_log) for session in sessions}
        replayable = [session for session in sessions if self._has_tables(session)]
        if not replayable:
            raise next(iter(self.failures.values()))
        target = self.request.target
        upto = max(target, *(snapshot_lsn(snapshot, target) for snapshot in snapshots.values()))
        self.captured, replays = capture_and_replay(self.request.source, replayable, upto)
        for replayed in replays:
            name = replayed.subscription
            self.results[name] = SyncResult(
                subscription=name,
                from_lsn=replayed.from_lsn,
                to_lsn=replayed.to_lsn,
                seconds=time.monotonic() - began,
                snapshot=snapshots[name],
                capture=self.captured,
                replay=replayed,
            )

    def compare_rewritten(self, sessions: Sequence[SubscriptionSession]) -> None:
        """Compare the tables marked as rewritten; all subscriptions reach the fence of that."""
        began, applied = time.monotonic(), [session for session in sessions if self._is_applied(session)]
        if not applied:
            return
        try:
            comparison = compare_marked(self.request.source, applied)
        except (CdcReplayError, psycopg.Error) as error:
            for session in applied:
                warn_of_failure(session, error)
            return
        if comparison is None or self.captured is None:
            return
        self.captured = self.captured.followed_by(comparison.captured)
        for replayed in comparison.replayed:
            before = self.results[replayed.subscription]
            self.results[replayed.subscription] = dataclasses.replace(
                before,
                to_lsn=replayed.to_lsn,
                seconds=before.seconds + time.monotonic() - began,
                capture=self.captured,
                replay=before.replay.followed_by(replayed),
                compared=comparison.tables[replayed.subscription],
            )

    def result(self, name: str) -> SyncResult:
        """What was done for a subscription; a failure to open or copy it counts as its error."""
        if self.captured is None:
            raise next(iter(self.failures.values()))
        empty = ReplayResult(name, ZERO, ZERO, 0.0)
        result = self.results.get(name) or SyncResult(
            name, ZERO, ZERO, 0.0, SnapshotResult.nothing(name), self.captured, empty
        )
        if (failure := self.failures.get(name)) is None:
            return result
        return dataclasses.replace(result, replay=result.replay.failed_with(failure))

    def _is_applied(self, session: SubscriptionSession) -> bool:
        result = self.results.get(session.subscription.name)
        return result is not None and result.replay.error is None

    def _snapshot(self, session: SubscriptionSession, change_log: ChangeLog) -> SnapshotResult:
        name = session.subscription.name
        if name in self.failures:
            return SnapshotResult.nothing(name)
        try:
            return snapshot_session(self.request.source, change_log, session, self.request.options[name])
        except (CdcReplayError, psycopg.Error) as error:
            self._record_failure(name, error)
            return SnapshotResult.nothing(name)

    def _has_tables(self, session: SubscriptionSession) -> bool:
        """Whether there is something to replay; if not, the failed snapshot has logged why."""
        name = session.subscription.name
        if name not in self.failures:
            return True
        try:
            return bool(session.ready_tables())
        except psycopg.Error as error:
            self._record_failure(name, error)
            return False

    def _record_failure(self, name: str, error: Exception) -> None:
        logger.info("subscription %s: %s", name, error)
        self.failures.setdefault(name, error)
