"""Apply the change log to subscribers, one transaction per subscription and window.

Several subscriptions share one read and one decode of the log. A change that one of them cannot apply stops
that one only: the error is in its result and its state, and after a permanent error everything before the
failing transaction is applied, then it is parked (`replay.parking`).

A row may enter a subscription with a value that the publisher did not send (R4.6). Then the window is tried
with the values of one source after the other (`replay.toast.sources`); if none has the value, NULL is stored,
or the subscription is parked before the row's transaction (`replay.toast.window`).

Subscriptions that feed one table apply each TRUNCATE before any of them goes on: it empties the whole table,
and what the others have inserted since would be lost.
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
from typing import TypeAlias

import psycopg

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import AnotherPublisher, CdcReplayError, ChangeLogMissing, SubscriptionParked
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import ReplayResult
from cdc_replay.model.table_state import Parked, Ready
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot
from cdc_replay.publication.capture_coverage import capture_warnings
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.parking import Attempt, ReplayOutcome, apply_in_halves
from cdc_replay.replay.pipeline import OpenPublisher, Pipeline, failed_outcome
from cdc_replay.replay.publisher_fence import open_fences
from cdc_replay.replay.toast.window import PublisherAccess
from cdc_replay.subscriber import history, recorded_results, subscription_records, subscription_tables
from cdc_replay.subscriber.session import SubscriptionSession

logger = logging.getLogger(__name__)

_Located: TypeAlias = tuple[SubscriptionSession, tuple[str, int]]
"""A subscription, and what tells its database from others."""


def replay_sessions(
    source: CaptureSource,
    sessions: Sequence[SubscriptionSession],
    to_lsn: Lsn | None = None,
    *,
    fence: ExportedSnapshot | None = None,
) -> tuple[ReplayResult, ...]:
    """Replay up to `to_lsn` (default: the end of the log); one result per subscription, in order.

    `fence` is a snapshot exported at `to_lsn`, if the caller has one: unsent values are read from it.

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
    """Replay up to each of `ends` in turn; the log reaches each position by the time that it is yielded.

    The caller holds the subscriptions' locks. A subscription stops at its first window that fails.
    """
    results = _ReplayResults()
    neighbours = _within_one_database(sessions)
    with Pipeline(functools.partial(_open_publisher, source, fence)) as pipeline:
        work: _ReplayUpTo | None = None
        for upto in _steps(source, neighbours, ends):
            work = _ReplayUpTo(pipeline.open_publisher, ChangeLog.open(source.change_log), upto)
            for session in results.active(sessions):
                results.add(session, work.check_binding(session) or work.retry_parked_transaction(session))
            replaying = results.active(sessions)
            pipeline.advance(work.change_log, replaying, upto)
            for session in replaying:
                if pipeline.has_failed(session.subscription.name):
                    results.add(session, work.retry_in_parts(session, pipeline.pop_outcome(session)))
        if work is not None:
            for session in results.active(sessions):
                results.add(session, work.retry_in_parts(session, pipeline.pop_outcome(session)))
            _retry_parked(work, [session for session, _ in neighbours], results)
    combined = tuple(result for session in sessions if (result := results.result_of(session)) is not None)
    if work is not None and any(result.changes_read for result in combined):
        with contextlib.suppress(CdcReplayError, psycopg.Error):
            _warn_of_uncaptured_changes(work.change_log, results.active(sessions))
    return combined


def _steps(source: CaptureSource, neighbours: Sequence[_Located], ends: Iterable[Lsn]) -> Iterator[Lsn]:
    """`ends`, and before each of them the transactions with a TRUNCATE, if subscriptions share a table."""
    last = ZERO
    for upto in ends:
        with contextlib.suppress(CdcReplayError, psycopg.Error):  # the replay reports it
            if sharing := _sharing(neighbours):
                position = min(session.position() or upto for session in sharing)
                change_log = ChangeLog.open(source.change_log)
                after = max(last, change_log.start_lsn, position)
                if after < upto:
                    yield from (end for end in change_log.truncate_commits(Window(after, upto)) if end < upto)
        yield upto
        last = upto


def _sharing(neighbours: Sequence[_Located]) -> list[SubscriptionSession]:
    """The subscriptions that feed a table which another one of these feeds too."""
    fed = [
        (session, {(database, table.relation) for table in session.known_tables()})
        for session, database in neighbours
    ]
    feeds = Counter(table for _, tables in fed for table in tables)
    return [session for session, tables in fed if any(feeds[table] > 1 for table in tables)]


def _within_one_database(sessions: Sequence[SubscriptionSession]) -> list[_Located]:
    """The subscriptions of a database that another one of these is in, too."""
    located: list[_Located] = []
    for session in sessions if len(sessions) > 1 else ():
        with contextlib.suppress(psycopg.Error):  # the replay reports it; the others go on
            located.append((session, session.database()))
    subscriptions = Counter(database for _, database in located)
    return [(session, database) for session, database in located if subscriptions[database] > 1]


def _retry_parked(work: _ReplayUpTo, shared: Sequence[SubscriptionSession], results: _ReplayResults) -> None:
    """Retry those of `shared` that are parked, and tables parked here, until none advances.

    They are in databases with several subscriptions.

    A row that moves from the filter of one to that of another is deleted by the one and inserted by the
    other. Natively the worker that applies its change too early retries until it can (R8.5).
    """
    has_advanced = True
    with contextlib.suppress(CdcReplayError, psycopg.Error):  # the next replay reports it
        while has_advanced:
            has_advanced = False
            for session in results.parked(shared):
                before = session.position()
                results.add(session, work.retry_parked(session))
                has_advanced |= session.position() != before
            for session in results.active(shared):
                if before_tables := results.parked_tables(session):
                    results.add(session, work.retry_parked_tables(session, before_tables))
                    has_advanced |= results.parked_tables(session) != before_tables
        results.forget_resumed(shared)


def _warn_of_uncaptured_changes(change_log: ChangeLog, subscriptions: Iterable[SubscriptionSession]) -> None:
    catalog = catalog_history(change_log).at(change_log.end_lsn)
    for session in subscriptions:
        for sentence in capture_warnings(catalog, session.subscription, session.table_states()):
            logger.warning("subscription %s: %s", session.subscription.name, sentence)


@contextlib.contextmanager
def _open_publisher(source: CaptureSource, fence: ExportedSnapshot | None) -> Iterator[PublisherAccess]:
    with open_fences(source, fence) as fences:
        yield PublisherAccess(source, fences)


@dataclass(slots=True)
class _ReplayResults:
    _results: dict[str, ReplayResult] = field(default_factory=dict)
    _parked: set[str] = field(default_factory=set)
    """Subscriptions that are parked before a transaction."""

    def result_of(self, session: SubscriptionSession) -> ReplayResult | None:
        """All windows of the subscription; None before the first."""
        return self._results.get(session.subscription.name)

    def active(self, sessions: Iterable[SubscriptionSession]) -> list[SubscriptionSession]:
        """Subscriptions without a failed window."""
        return [
            session
            for session in sessions
            if (result := self.result_of(session)) is None or result.error is None
        ]

    def parked(self, subscriptions: Iterable[SubscriptionSession]) -> list[SubscriptionSession]:
        """Subscriptions that are parked before a transaction."""
        return [session for session in subscriptions if session.subscription.name in self._parked]

    def parked_tables(self, session: SubscriptionSession) -> dict[QualifiedName, Lsn]:
        """The tables that these windows have parked and that still are, each with its transaction."""
        result = self.result_of(session)
        if result is None or not result.parked:
            return {}
        return {
            table: state.transaction
            for table, state in session.table_states().items()
            if isinstance(state, Parked) and str(table) in result.parked
        }

    def forget_resumed(self, subscriptions: Iterable[SubscriptionSession]) -> None:
        """Let the results name only the tables that are parked now."""
        for session in subscriptions:
            if (result := self.result_of(session)) is not None and result.parked:
                parked = tuple(map(str, self.parked_tables(session)))
                self._results[session.subscription.name] = dataclasses.replace(result, parked=parked)

    def add(self, session: SubscriptionSession, outcome: ReplayOutcome) -> None:
        """Add the next windows, if there are any."""
        if not outcome.windows:
            return
        name, previous, result = (
            session.subscription.name,
            self.result_of(session),
            _record_failure(session, outcome),
        )
        self._results[name] = previous.followed_by(result) if previous else result
        self._parked.discard(name)
        if isinstance(outcome.error, SubscriptionParked):
            self._parked.add(name)


@dataclass(frozen=True, slots=True)
class _ReplayUpTo:
    """What windows up to one position have in common."""

    open_publisher: OpenPublisher
    change_log: ChangeLog
    upto: Lsn

    def check_binding(self, session: SubscriptionSession) -> ReplayOutcome | None:
        """The failure, if the subscriber's rows come from another database than the log."""
        began, header = time.monotonic(), self.change_log.header
        try:
            subscription_records.check_publisher(
                session.connection, session.subscription.name, header.system_identifier, header.database
            )
        except (CdcReplayError, psycopg.Error) as error:
            return failed_outcome(session, Window(self.upto, self.upto), began, error)
        return None

    def retry_parked_transaction(self, session: SubscriptionSession) -> ReplayOutcome:
        """Retry the transaction before which the subscription is parked, or what precedes it up to `upto`."""
        began = time.monotonic()
        name = session.subscription.name
        try:
            record = subscription_records.subscription_record(session.connection, name)
            if record is None or record.parked_transaction is None:
                return ReplayOutcome()
            # Everything before it is applied, unless a table was resumed since.
            end = min(record.parked_transaction, self.upto)
            outcome = apply_in_halves(session, self._ends(session, end), self._attempt(session))
            if outcome.error is None and end == record.parked_transaction:
                subscription_records.unpark(session.connection, name)
                logger.info("subscription %s applied transaction %s and is no longer parked", name, end)
        except (CdcReplayError, psycopg.Error) as error:
            return failed_outcome(session, Window(self.upto, self.upto), began, error)
        return outcome

    def retry_parked(self, session: SubscriptionSession) -> ReplayOutcome:
        """Retry all that is left of a parked subscription in one window, as its net effect."""
        began = time.monotonic()
        name = session.subscription.name
        try:
            outcome = self._retry_rest(session)
            if outcome.error is None:
                subscription_records.unpark(session.connection, name)
                logger.info(
                    "subscription %s applied everything up to %s and is no longer parked", name, self.upto
                )
        except (CdcReplayError, psycopg.Error) as error:
            return failed_outcome(session, Window(self.upto, self.upto), began, error)
        return outcome

    def retry_parked_tables(
        self, session: SubscriptionSession, tables: Iterable[QualifiedName]
    ) -> ReplayOutcome:
        """Retry all that is left of parked tables in the same way; what is refused again parks them again."""
        began, name, states = time.monotonic(), session.subscription.name, session.table_states()
        try:
            for table in tables:
                if isinstance(parked := states.get(table), Parked):
                    ready = Ready(parked.applied_lsn)
                    subscription_tables.set_table_state(session.connection, name, table, ready)
            return self._retry_rest(session)
        except (CdcReplayError, psycopg.Error) as error:
            return failed_outcome(session, Window(self.upto, self.upto), began, error)

    def _retry_rest(self, session: SubscriptionSession) -> ReplayOutcome:
        with Pipeline(self.open_publisher) as pipeline:
            pipeline.advance(self.change_log, [session], self.upto)
            return self.retry_in_parts(session, pipeline.pop_outcome(session))

    def retry_in_parts(self, session: SubscriptionSession, outcome: ReplayOutcome) -> ReplayOutcome:
        """The outcome; if a window was refused, the outcome of applying it in halves."""
        if not outcome.is_refused:
            return outcome
        began = time.monotonic()
        try:
            ends = self._ends(session, self.upto)
            logger.info(
                "subscription %s: window rejected by the subscriber;"
                " retrying its %d transactions in halves: %s",
                *(session.subscription.name, len(ends), outcome.error),
            )
            tail = apply_in_halves(session, ends, self._attempt(session), outcome)
        except (CdcReplayError, psycopg.Error) as error:
            tail = failed_outcome(session, Window(self.upto, self.upto), began, error)
        return outcome.followed_by(tail)

    def _attempt(self, session: SubscriptionSession) -> Attempt:
        def attempt(end: Lsn) -> ReplayOutcome:
            with Pipeline(self._open_without_extension) as pipeline:
                pipeline.advance(self.change_log, [session], end)
                return pipeline.pop_outcome(session)

        return attempt

    @contextlib.contextmanager
    def _open_without_extension(self) -> Iterator[PublisherAccess]:
        """Extending a part would add the transactions that it must be told apart from."""
        with self.open_publisher() as publisher:
            yield dataclasses.replace(publisher, may_extend=False)

    def _ends(self, session: SubscriptionSession, upto: Lsn) -> list[Lsn]:
        """The ends of the transactions up to `upto` that are not applied yet, and `upto`."""
        window = Window(min(session.position() or upto, upto), upto)
        ends = [commit.commit_lsn for commit in self.change_log.commits(window)]
        return ends if ends and ends[-1] == upto else [*ends, upto]


def _record_failure(session: SubscriptionSession, outcome: ReplayOutcome) -> ReplayResult:
    """The result; a failure is recorded for `status` and Airflow.

    It is not if the subscription belongs to another deployment.
    """
    result = outcome.result
    if outcome.failed is not None:
        name = session.subscription.name
        window = Window(outcome.failed.from_lsn, outcome.failed.to_lsn)
        # At info: the result says it too, and it is to be said once to a person.
        logger.info("subscription %s: window %s was not applied: %s", name, window, outcome.error)
        if not isinstance(outcome.error, AnotherPublisher):
            with contextlib.suppress(psycopg.Error):
                recorded_results.record_result(session.connection, name, "replay", result.to_dict())
                history.append_window(session.connection, outcome.failed)
    return result
