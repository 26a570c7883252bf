"""Apply the change log to subscribers, one transaction per subscription and window.

Several subscriptions share one read and one decode of the log. What one of them cannot apply stops that one
only: its error is in its result and in its state, and what can never be applied is parked, with all that is
before it applied (`replay.parking`).

A row may enter a subscription with a value that the publisher did not send (R4.6). Then the flow is tried
with the value from one source after the other (`replay.toast.sources`), and parked before the row's
transaction where none has it, or NULL is stored (`replay.toast.window`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import psycopg

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import (
    AnotherPublisher,
    CdcReplayError,
    ChangeLogMissing,
    SubscriptionParked,
)
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.results import ReplayResult
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot
from cdc_replay.publication.capture_coverage import capture_warnings
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.parking import Attempt, ReplayOutcome, apply_in_halves
from cdc_replay.replay.pipeline import OpenPublisher, Pipeline, failed
from cdc_replay.replay.publisher_fence import open_fences
from cdc_replay.replay.toast.window import PublisherAccess
from cdc_replay.subscriber import recorded_results, subscription_records
from cdc_replay.subscriber.session import SubscriptionSession

logger = logging.getLogger(__name__)


def replay_sessions(
    source: CaptureSource,
    sessions: Sequence[SubscriptionSession],
    to_lsn: Lsn | None = None,
    *,
    fence: ExportedSnapshot | None = None,
) -> tuple[ReplayResult, ...]:
    """Replay up to `to_lsn` (default: the end of the log); one result per subscription, in order.

    `fence` is a snapshot exported at `to_lsn`, if the caller has one: where unsent values are read.

    Raises:
        ChangeLogMissing: if there is no log, or it ends before `to_lsn`.
    """
    change_log = ChangeLog.open(source.change_log)
    upto = to_lsn or change_log.end_lsn
    if upto > change_log.end_lsn:
        raise ChangeLogMissing(
            f'the change log of publisher "{source.publisher}" ends at {change_log.end_lsn}, before {upto}',
            hint=f"Run `cdc-replay capture {source.publisher}` first.",
        )
    return replay_up_to_each(source, sessions, [upto], fence=fence)


def replay_up_to_each(
    source: CaptureSource,
    sessions: Sequence[SubscriptionSession],
    ends: Iterable[Lsn],
    *,
    fence: ExportedSnapshot | None = None,
) -> tuple[ReplayResult, ...]:
    """Replay up to each of `ends`, which are in the log by the time that they come, one after the other.

    The caller holds the subscriptions' locks. One whose window fails is left out of the ends after it.
    """
    results = _ReplayResults()
    with Pipeline(functools.partial(_open_publisher, source, fence)) as pipeline:
        work: _ReplayUpTo | None = None
        for upto in ends:
            work = _ReplayUpTo(pipeline.open_publisher, ChangeLog.open(source.change_log), upto)
            for session in results.going_on(sessions):
                results.add(session, work.bound(session) or work.retry_parked_transaction(session))
            replaying = results.going_on(sessions)
            pipeline.advance(work.change_log, replaying, upto)
            for session in replaying:
                if pipeline.has_failed(session.subscription.name):
                    results.add(session, work.settled(session, pipeline.taken(session)))
        if work is not None:
            for session in results.going_on(sessions):
                results.add(session, work.settled(session, pipeline.taken(session)))
            _try_again(work, sessions, results)
    found = tuple(result for session in sessions if (result := results.of(session)) is not None)
    if any(result.changes_read for result in found):
        with contextlib.suppress(CdcReplayError, psycopg.Error):
            _warn_of_what_is_left_out(ChangeLog.open(source.change_log), results.going_on(sessions))
    return found


def _try_again(
    work: _ReplayUpTo, subscriptions: Sequence[SubscriptionSession], results: _ReplayResults
) -> None:
    """Try again what subscriptions are parked before, until none of those that share a database gets further.

    A row that goes from the filter of one to that of another is deleted by the one and inserted by the
    other. Natively the one that comes too early tries until it can (R8.5).
    """
    beside = Counter(each.dsn for each in subscriptions)
    shared = [each for each in subscriptions if beside[each.dsn] > 1]
    gets_further = True
    with contextlib.suppress(CdcReplayError, psycopg.Error):  # told by the result of the next replay
        while gets_further:
            gets_further = False
            for each in results.parked(shared):
                before = each.position()
                results.add(each, work.again(each))
                gets_further |= each.position() != before


def _warn_of_what_is_left_out(change_log: ChangeLog, subscriptions: Iterable[SubscriptionSession]) -> None:
    catalog = catalog_history(change_log).at(change_log.end_lsn)
    for each in subscriptions:
        for sentence in capture_warnings(catalog, each.subscription, each.table_states()):
            logger.warning("subscription %s: %s", each.subscription.name, sentence)


@contextlib.contextmanager
def _open_publisher(source: CaptureSource, fence: ExportedSnapshot | None) -> Iterator[PublisherAccess]:
    with open_fences(source, fence) as fences:
        yield PublisherAccess(source, fences)


@dataclass(slots=True)
class _ReplayResults:
    """What each subscription has come to so far."""

    _found: dict[str, ReplayResult] = field(default_factory=dict)
    _parked: set[str] = field(default_factory=set)
    """Subscriptions that stand before a transaction."""

    def of(self, session: SubscriptionSession) -> ReplayResult | None:
        """All windows of the subscription; None before the first."""
        return self._found.get(session.subscription.name)

    def going_on(self, sessions: Iterable[SubscriptionSession]) -> list[SubscriptionSession]:
        """Those of which no window has failed."""
        return [each for each in sessions if (found := self.of(each)) is None or found.error is None]

    def parked(self, subscriptions: Iterable[SubscriptionSession]) -> list[SubscriptionSession]:
        """Those that are parked before a transaction."""
        return [each for each in subscriptions if each.subscription.name in self._parked]

    def add(self, session: SubscriptionSession, outcome: ReplayOutcome) -> None:
        """What came next, if anything did."""
        if not outcome.windows:
            return
        name, before, result = session.subscription.name, self.of(session), _reported(session, outcome)
        self._found[name] = before.followed_by(result) if before else result
        self._parked.discard(name)
        if isinstance(outcome.error, SubscriptionParked):
            self._parked.add(name)


@dataclass(frozen=True, slots=True)
class _ReplayUpTo:
    """What the windows up to one position have in common."""

    open_publisher: OpenPublisher
    change_log: ChangeLog
    upto: Lsn

    def bound(self, session: SubscriptionSession) -> ReplayOutcome | None:
        """The failure, where the subscriber's rows do not come from the database that the log is of."""
        began, header = time.monotonic(), self.change_log.header
        try:
            subscription_records.check_publisher(
                session.connection, session.subscription.name, header.system_identifier, header.database
            )
        except (CdcReplayError, psycopg.Error) as error:
            return failed(session, Window(self.upto, self.upto), began, error)
        return None

    def retry_parked_transaction(self, session: SubscriptionSession) -> ReplayOutcome:
        """Try again what the subscription is parked before, as far as that is reached."""
        began = time.monotonic()
        name = session.subscription.name
        try:
            record = subscription_records.subscription_record(session.connection, name)
            if record is None or record.parked_at is None:
                return ReplayOutcome()
            if record.parked_transaction is None:
                # An earlier version has parked it for an unsent value; the next window finds its transaction.
                subscription_records.unpark(session.connection, name)
                return ReplayOutcome()
            # Before it everything is applied.
            end = min(record.parked_transaction, self.upto)
            outcome = apply_in_halves(session, [end], self._attempt(session))
            if outcome.error is None and end == record.parked_transaction:
                subscription_records.unpark(session.connection, name)
                logger.info("subscription %s is past transaction %s, and parked no more", name, end)
        except (CdcReplayError, psycopg.Error) as error:
            return failed(session, Window(self.upto, self.upto), began, error)
        return outcome

    def again(self, session: SubscriptionSession) -> ReplayOutcome:
        """Try all that is left of a parked subscription: at once, where a row that came and went is none."""
        began = time.monotonic()
        name = session.subscription.name
        try:
            with Pipeline(self.open_publisher) as pipeline:
                pipeline.advance(self.change_log, [session], self.upto)
                outcome = self.settled(session, pipeline.taken(session))
            if outcome.error is None:
                subscription_records.unpark(session.connection, name)
                logger.info("subscription %s has everything up to %s, and is parked no more", name, self.upto)
        except (CdcReplayError, psycopg.Error) as error:
            return failed(session, Window(self.upto, self.upto), began, error)
        return outcome

    def settled(self, session: SubscriptionSession, outcome: ReplayOutcome) -> ReplayOutcome:
        """The outcome, or, where a window was refused, what applying its parts comes to."""
        if not outcome.is_refused:
            return outcome
        began = time.monotonic()
        try:
            ends = self._ends(session)
            logger.info(
                "subscription %s: the window is refused; its %d transactions are tried in parts: %s",
                *(session.subscription.name, len(ends), outcome.error),
            )
            rest = apply_in_halves(session, ends, self._attempt(session), outcome)
        except (CdcReplayError, psycopg.Error) as error:
            rest = failed(session, Window(self.upto, self.upto), began, error)
        return outcome.followed_by(rest)

    def _attempt(self, session: SubscriptionSession) -> Attempt:
        def attempt(end: Lsn) -> ReplayOutcome:
            with Pipeline(self._not_extending) as pipeline:
                pipeline.advance(self.change_log, [session], end)
                return pipeline.taken(session)

        return attempt

    @contextlib.contextmanager
    def _not_extending(self) -> Iterator[PublisherAccess]:
        """A part that were extended would hold what it is to be told apart from."""
        with self.open_publisher() as publisher:
            yield dataclasses.replace(publisher, may_extend=False)

    def _ends(self, session: SubscriptionSession) -> list[Lsn]:
        """Where the transactions end that are not applied yet, and the window."""
        window = Window(session.position() or self.upto, self.upto)
        ends = [commit.commit_lsn for commit in self.change_log.commits(window)]
        return ends if ends and ends[-1] == self.upto else [*ends, self.upto]


def _reported(session: SubscriptionSession, outcome: ReplayOutcome) -> ReplayResult:
    """The result; if it is a failure it is recorded where `status` and Airflow read it.

    Not where the subscription is another deployment's.
    """
    result = outcome.result
    if outcome.failed is not None:
        name = session.subscription.name
        window = Window(outcome.failed.from_lsn, outcome.failed.to_lsn)
        logger.warning("subscription %s: window %s was not applied: %s", name, window, outcome.error)
        if not isinstance(outcome.error, AnotherPublisher):
            with contextlib.suppress(psycopg.Error):
                recorded_results.record_result(session.connection, name, "replay", result.to_dict())
    return result
