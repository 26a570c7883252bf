"""`sync`: snapshot where needed, then capture and replay, side by side.

On return the subscribers equal the publisher's filtered state as of one LSN. Where the publisher has
rewritten a table without sending its rows (R11.9), all are brought to a fence, and the values of that table
are compared there (`replay.rewritten_values`). What is in the way of that is a warning: changes go on. A
table that lacks a value which nobody has (R4.6) is left to a snapshot: then all three steps are done again.

A subscription whose subscriber does not answer, or whose snapshot fails, stops nobody else. Its tables that
are ready are replayed all the same, and the error is in its result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import psycopg

from cdc_replay.capture.pull import CaptureSource, current_position
from cdc_replay.commands.opening import common_source, open_subscription, snapshot_options
from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import CaptureResult, ReplayResult, SnapshotResult, SyncResult
from cdc_replay.model.table_state import Parked
from cdc_replay.replay.capture_and_replay import capture_and_replay
from cdc_replay.replay.rewritten_values import compare_marked, warn_of_failure
from cdc_replay.snapshot.run import snapshot_lsn, snapshot_session
from cdc_replay.subscriber.session import SubscriptionSession

logger = logging.getLogger(__name__)

ROUNDS: Final = 5
"""A table that parks for a copy again and again is left to the next sync after that many."""


def sync(
    config: Config, subscriptions: Sequence[str], *, to_lsn: Lsn | None = None
) -> tuple[SyncResult, ...]:
    """Bring subscriptions of one publisher to `to_lsn` (default: the publisher's WAL position at the start).

    A table that is copied or compared on the way is so as of a later LSN; all are brought to that one then. A
    subscription that is named twice is synced once.

    Raises:
        CdcReplayError: from capture, and where no subscription gets as far as that. What fails for one of
            them otherwise is in its result.
    """
    subscriptions = tuple(dict.fromkeys(subscriptions))  # twice, one would deadlock on its own lock
    source = common_source(config, subscriptions)
    target = to_lsn or current_position(source.dsn)
    with contextlib.ExitStack() as stack:
        syncing = _Syncing(config, source, target)
        sessions = []
        for name in subscriptions:
            try:
                sessions.append(stack.enter_context(open_subscription(config, name, "sync")))
            except (CdcReplayError, psycopg.Error) as error:
                syncing.fail(name, error)
        for _ in range(ROUNDS):
            if syncing.round(sessions):
                break
        syncing.compare(sessions)
    return tuple(syncing.result(name) for name in subscriptions)


@dataclass(slots=True)
class _Syncing:
    config: Config
    source: CaptureSource
    target: Lsn
    results: dict[str, SyncResult] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    """By subscription: why it could not be opened or copied."""
    captured: CaptureResult | None = None

    def fail(self, name: str, error: Exception) -> None:
        """Note what stops that subscription, and no other."""
        logger.warning("subscription %s: %s", name, error)
        self.failures.setdefault(name, error)

    def round(self, sessions: Sequence[SubscriptionSession]) -> bool:
        """The three steps, once; whether replay has left no table to another snapshot.

        Raises:
            CdcReplayError: from capture, or the first failure if there is nothing to replay.
        """
        began = time.monotonic()
        snapshots = {each.subscription.name: self._copied(each) for each in sessions}
        going_on = [each for each in sessions if self._has_tables(each)]
        if not going_on:
            raise next(iter(self.failures.values()))
        upto = max(self.target, *(snapshot_lsn(each, self.target) for each in snapshots.values()))
        waiting = [_waiting_for_copy(each) for each in going_on]
        captured, replays = capture_and_replay(self.source, going_on, upto)
        self.captured = captured if self.captured is None else self.captured.followed_by(captured)
        for replayed in replays:
            name = replayed.subscription
            found = SyncResult(
                subscription=name,
                from_lsn=replayed.from_lsn,
                to_lsn=replayed.to_lsn,
                seconds=time.monotonic() - began,
                snapshot=snapshots[name],
                capture=captured,
                replay=replayed,
            )
            self.results[name] = self.results[name].followed_by(found) if name in self.results else found
        return all(_waiting_for_copy(each) <= known for each, known in zip(going_on, waiting, strict=True))

    def compare(self, sessions: Sequence[SubscriptionSession]) -> None:
        """Bring all to a fence where one of them has a table whose values are to be compared there."""
        began, applied = time.monotonic(), [each for each in sessions if self._is_applied(each)]
        if not applied:
            return
        try:
            found = compare_marked(self.source, applied)
        except (CdcReplayError, psycopg.Error) as error:
            for each in applied:
                warn_of_failure(each, error)
            return
        if found is None or self.captured is None:
            return
        self.captured = self.captured.followed_by(found.captured)
        for replayed in found.replayed:
            before = self.results[replayed.subscription]
            self.results[replayed.subscription] = dataclasses.replace(
                before,
                to_lsn=replayed.to_lsn,
                seconds=before.seconds + time.monotonic() - began,
                capture=self.captured,
                replay=before.replay.followed_by(replayed),
                compared=found.tables[replayed.subscription],
            )

    def _is_applied(self, each: SubscriptionSession) -> bool:
        found = self.results.get(each.subscription.name)
        return found is not None and found.replay.error is None

    def result(self, name: str) -> SyncResult:
        """All rounds of a subscription; what kept it from being opened or copied counts as its error."""
        if self.captured is None:
            raise next(iter(self.failures.values()))
        nothing = ReplayResult(name, ZERO, ZERO, 0.0)
        found = self.results.get(name) or SyncResult(
            name, ZERO, ZERO, 0.0, SnapshotResult.nothing(name), self.captured, nothing
        )
        if (failure := self.failures.get(name)) is None:
            return found
        return dataclasses.replace(found, replay=found.replay.failed_with(failure))

    def _copied(self, each: SubscriptionSession) -> SnapshotResult:
        name = each.subscription.name
        if name in self.failures:
            return SnapshotResult.nothing(name)
        try:
            return snapshot_session(
                self.source,
                each,
                dataclasses.replace(snapshot_options(self.config, name), release_lock=False),
            )
        except (CdcReplayError, psycopg.Error) as error:
            self.fail(name, error)
            return SnapshotResult.nothing(name)

    def _has_tables(self, each: SubscriptionSession) -> bool:
        """Without any there is nothing to replay, and the snapshot has said why."""
        name = each.subscription.name
        if name not in self.failures:
            return True
        try:
            return bool(each.ready_tables())
        except psycopg.Error as error:
            self.fail(name, error)
            return False


def _waiting_for_copy(session: SubscriptionSession) -> frozenset[QualifiedName]:
    """The parked tables that a snapshot copies without being asked for them."""
    if not session.subscription.copy_data:
        return frozenset()
    states = session.table_states().items()
    return frozenset(
        name for name, found in states if isinstance(found, Parked) and found.transaction is None
    )
