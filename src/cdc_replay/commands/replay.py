"""`replay`: apply the change log to subscribers, one transaction per subscription and window.

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

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.config import Config, PublisherConfig
from cdc_replay.errors import (
    AnotherPublisher,
    CdcReplayError,
    ChangeLogMissing,
    InvalidConfiguration,
    SubscriptionParked,
)
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.results import ReplayResult
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot
from cdc_replay.publication.capture_coverage import left_out
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.parking import Attempt, Outcome, settled
from cdc_replay.replay.pipeline import Pipeline, Sources, failed
from cdc_replay.replay.publisher_fence import fences_of
from cdc_replay.replay.toast.window import Source
from cdc_replay.subscriber import state
from cdc_replay.subscriber.session import Opened, opened

log = logging.getLogger(__name__)


def replay(
    config: Config, subscriptions: Sequence[str], *, to_lsn: Lsn | None = None
) -> tuple[ReplayResult, ...]:
    """Apply the log up to `to_lsn` (default: its end); one result per subscription, in the given order.

    A subscription that is named twice is replayed once.

    Raises:
        InvalidConfiguration: if the subscriptions have different publishers.
        ChangeLogMissing: if there is no log, or it ends before `to_lsn`.
    """
    subscriptions = tuple(dict.fromkeys(subscriptions))  # who is named twice would wait for itself
    publisher = common_publisher(config, subscriptions)
    results: dict[str, ReplayResult] = {}
    with contextlib.ExitStack() as stack:
        at_work: list[Opened] = []
        for name in subscriptions:
            try:
                at_work.append(stack.enter_context(opened(config, name, "replay")))
            except (CdcReplayError, psycopg.Error) as error:
                log.warning("subscription %s is left out: %s", name, error)
                results[name] = ReplayResult(name, Lsn(0), Lsn(0), 0.0).failed_with(error)
        found = replay_opened(config, publisher, at_work, to_lsn)
        results |= {result.subscription: result for result in found}
    return tuple(results[name] for name in subscriptions)


def common_publisher(config: Config, subscriptions: Sequence[str]) -> PublisherConfig:
    """The publisher of all these subscriptions.

    Raises:
        InvalidConfiguration: if there is none, or more than one.
    """
    names = {config.subscription(name).subscription.publisher for name in subscriptions}
    if len(names) != 1:
        raise InvalidConfiguration(
            "the subscriptions must have one publisher",
            detail=f"Given: {', '.join(subscriptions) or 'none'}; their publishers: "
            f"{', '.join(sorted(names)) or 'none'}.",
        )
    return config.publisher(names.pop())


def replay_opened(
    config: Config,
    publisher: PublisherConfig,
    subscriptions: Sequence[Opened],
    to_lsn: Lsn | None = None,
    *,
    fence: ExportedSnapshot | None = None,
) -> tuple[ReplayResult, ...]:
    """`replay` for subscriptions whose locks the caller holds.

    `fence` is a snapshot exported at `to_lsn`, if the caller has one: where unsent values are read.
    """
    change_log = ChangeLog.open(publisher.change_log)
    upto = to_lsn or change_log.end_lsn
    if upto > change_log.end_lsn:
        raise ChangeLogMissing(
            f'the change log of publisher "{publisher.name}" ends at {change_log.end_lsn}, before {upto}',
            hint=f"Run `cdc-replay capture {publisher.name}` first.",
        )
    return replay_through(config, publisher, subscriptions, [upto], fence=fence)


def replay_through(
    config: Config,
    publisher: PublisherConfig,
    subscriptions: Sequence[Opened],
    ends: Iterable[Lsn],
    *,
    fence: ExportedSnapshot | None = None,
) -> tuple[ReplayResult, ...]:
    """Replay up to each of `ends`, which are in the log by the time that they come, one after the other.

    The caller holds the subscriptions' locks. One whose window fails is left out of the ends after it.
    """
    results = _Results()
    with Pipeline(functools.partial(_source, config, publisher, fence)) as pipeline:
        work: _Work | None = None
        for upto in ends:
            work = _Work(pipeline.sources, ChangeLog.open(publisher.change_log), upto)
            for each in results.going_on(subscriptions):
                results.add(each, work.bound(each) or work.past_parking(each))
            at_work = results.going_on(subscriptions)
            pipeline.advance(work.change_log, at_work, upto)
            for each in at_work:
                if pipeline.has_failed(each.subscription.name):
                    results.add(each, work.settled(each, pipeline.taken(each)))
        if work is not None:
            for each in results.going_on(subscriptions):
                results.add(each, work.settled(each, pipeline.taken(each)))
            _try_again(work, subscriptions, results)
    found = tuple(found for each in subscriptions if (found := results.of(each)) is not None)
    if any(result.changes_read for result in found):
        with contextlib.suppress(CdcReplayError, psycopg.Error):
            _warn_of_what_is_left_out(ChangeLog.open(publisher.change_log), results.going_on(subscriptions))
    return found


def _try_again(work: _Work, subscriptions: Sequence[Opened], results: _Results) -> None:
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
                before = applied_lsn(each)
                results.add(each, work.again(each))
                gets_further |= applied_lsn(each) != before


def _warn_of_what_is_left_out(change_log: ChangeLog, subscriptions: Iterable[Opened]) -> None:
    catalog = catalog_history(change_log).at(change_log.end_lsn)
    for each in subscriptions:
        for sentence in left_out(catalog, each.subscription, each.table_states()):
            log.warning("subscription %s: %s", each.subscription.name, sentence)


@contextlib.contextmanager
def _source(config: Config, publisher: PublisherConfig, fence: ExportedSnapshot | None) -> Iterator[Source]:
    with fences_of(config, publisher, fence) as fences:
        yield Source(publisher, config.dsn_of(publisher), fences)


@dataclass(slots=True)
class _Results:
    """What each subscription has come to so far."""

    _found: dict[str, ReplayResult] = field(default_factory=dict)
    _parked: set[str] = field(default_factory=set)
    """Subscriptions that stand before a transaction."""

    def of(self, at_work: Opened) -> ReplayResult | None:
        """All windows of the subscription; None before the first."""
        return self._found.get(at_work.subscription.name)

    def going_on(self, subscriptions: Iterable[Opened]) -> list[Opened]:
        """Those of which no window has failed."""
        return [each for each in subscriptions if (found := self.of(each)) is None or found.error is None]

    def parked(self, subscriptions: Iterable[Opened]) -> list[Opened]:
        """Those that are parked before a transaction."""
        return [each for each in subscriptions if each.subscription.name in self._parked]

    def add(self, at_work: Opened, outcome: Outcome) -> None:
        """What came next, if anything did."""
        if not outcome.windows:
            return
        name, before, result = at_work.subscription.name, self.of(at_work), _reported(at_work, outcome)
        self._found[name] = before.followed_by(result) if before else result
        self._parked.discard(name)
        if isinstance(outcome.error, SubscriptionParked):
            self._parked.add(name)


@dataclass(frozen=True, slots=True)
class _Work:
    """What the windows up to one position have in common."""

    sources: Sources
    change_log: ChangeLog
    upto: Lsn

    def bound(self, at_work: Opened) -> Outcome | None:
        """The failure, where the subscriber's rows do not come from the database that the log is of."""
        began, header = time.monotonic(), self.change_log.header
        try:
            state.check_publisher(
                at_work.connection, at_work.subscription.name, header.system_identifier, header.database
            )
        except (CdcReplayError, psycopg.Error) as error:
            return failed(at_work, Window(self.upto, self.upto), began, error)
        return None

    def past_parking(self, at_work: Opened) -> Outcome:
        """Try again what the subscription is parked before, as far as that is reached."""
        began = time.monotonic()
        name = at_work.subscription.name
        try:
            record = state.subscription_record(at_work.connection, name)
            if record is None or record.parked_at is None:
                return Outcome()
            if record.parked_transaction is None:
                # An earlier version has parked it for an unsent value; the next window finds its transaction.
                state.unpark(at_work.connection, name)
                return Outcome()
            # Before it everything is applied.
            end = min(record.parked_transaction, self.upto)
            outcome = settled(at_work, [end], self._attempt(at_work))
            if outcome.error is None and end == record.parked_transaction:
                state.unpark(at_work.connection, name)
                log.info("subscription %s is past transaction %s, and parked no more", name, end)
        except (CdcReplayError, psycopg.Error) as error:
            return failed(at_work, Window(self.upto, self.upto), began, error)
        return outcome

    def again(self, at_work: Opened) -> Outcome:
        """Try all that is left of a parked subscription: at once, where a row that came and went is none."""
        began = time.monotonic()
        name = at_work.subscription.name
        try:
            with Pipeline(self.sources) as pipeline:
                pipeline.advance(self.change_log, [at_work], self.upto)
                outcome = self.settled(at_work, pipeline.taken(at_work))
            if outcome.error is None:
                state.unpark(at_work.connection, name)
                log.info("subscription %s has everything up to %s, and is parked no more", name, self.upto)
        except (CdcReplayError, psycopg.Error) as error:
            return failed(at_work, Window(self.upto, self.upto), began, error)
        return outcome

    def settled(self, at_work: Opened, outcome: Outcome) -> Outcome:
        """The outcome, or, where a window was refused, what applying its parts comes to."""
        if not outcome.is_refused:
            return outcome
        began = time.monotonic()
        try:
            ends = self._ends(at_work)
            log.info(
                "subscription %s: the window is refused; its %d transactions are tried in parts: %s",
                *(at_work.subscription.name, len(ends), outcome.error),
            )
            rest = settled(at_work, ends, self._attempt(at_work), outcome)
        except (CdcReplayError, psycopg.Error) as error:
            rest = failed(at_work, Window(self.upto, self.upto), began, error)
        return outcome.followed_by(rest)

    def _attempt(self, at_work: Opened) -> Attempt:
        def attempt(end: Lsn) -> Outcome:
            with Pipeline(self._not_extending) as pipeline:
                pipeline.advance(self.change_log, [at_work], end)
                return pipeline.taken(at_work)

        return attempt

    @contextlib.contextmanager
    def _not_extending(self) -> Iterator[Source]:
        """A part that were extended would hold what it is to be told apart from."""
        with self.sources() as source:
            yield dataclasses.replace(source, may_extend=False)

    def _ends(self, at_work: Opened) -> list[Lsn]:
        """Where the transactions end that are not applied yet, and the window."""
        window = Window(applied_lsn(at_work) or self.upto, self.upto)
        ends = [commit.commit_lsn for commit in self.change_log.commits(window)]
        return ends if ends and ends[-1] == self.upto else [*ends, self.upto]


def _reported(at_work: Opened, outcome: Outcome) -> ReplayResult:
    """The result; if it is a failure it is recorded where `status` and Airflow read it.

    Not where the subscription is another deployment's.
    """
    result = outcome.result
    if outcome.failed is not None:
        name = at_work.subscription.name
        window = Window(outcome.failed.from_lsn, outcome.failed.to_lsn)
        log.warning("subscription %s: window %s was not applied: %s", name, window, outcome.error)
        if not isinstance(outcome.error, AnotherPublisher):
            with contextlib.suppress(psycopg.Error):
                state.record_result(at_work.connection, name, "replay", result.to_dict())
    return result


def applied_lsn(at_work: Opened) -> Lsn | None:
    """The position that all ready tables have reached; None before the first snapshot."""
    return at_work.position()
