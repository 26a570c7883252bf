"""`replay`: apply the change log to subscribers, one transaction per subscription and window.

Several subscriptions share one read and one decode of the log. What one of them cannot apply stops that one
only: its error is in its result and in its state, and what can never be applied is parked, with all that is
before it applied (`commands.parking`).

A row may enter a subscription with a value that the publisher did not send (R4.6). Then the flow is tried
with the value from one source after the other (`commands.unsent`), and parked where none has it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import psycopg

from cdc_replay.apply.window import Applied, BeforeCommit, OpenWindow, advance_only, opened_window
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.opened import Opened, opened
from cdc_replay.commands.parking import Attempt, Outcome, settled
from cdc_replay.commands.plan import Plan, content_of, plan_window
from cdc_replay.commands.results import ReplayResult, first_keys
from cdc_replay.commands.spark_errors import translated_spark_errors
from cdc_replay.commands.staged_windows import StagedWindow, request_of, staged_windows
from cdc_replay.commands.unsent import fence_of
from cdc_replay.commands.unsent_windows import Record, Source, apply_with_unsent
from cdc_replay.config import Config, PublisherConfig
from cdc_replay.errors import (
    CdcReplayError,
    ChangeLogMissing,
    InvalidConfiguration,
    UnknownValue,
)
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot
from cdc_replay.subscriber import state

log = logging.getLogger(__name__)

MERGES_AT_ONCE: Final = 4
"""Subscribers that are merged into at the same time; the work is theirs."""


def replay(
    config: Config, subscriptions: Sequence[str], *, to_lsn: Lsn | None = None
) -> tuple[ReplayResult, ...]:
    """Apply the log up to `to_lsn` (default: its end); one result per subscription, in the given order.

    Raises:
        InvalidConfiguration: if the subscriptions have different publishers.
        ChangeLogMissing: if there is no log, or it ends before `to_lsn`.
    """
    publisher = common_publisher(config, subscriptions)
    results: dict[str, ReplayResult] = {}
    with contextlib.ExitStack() as stack:
        at_work: list[Opened] = []
        for name in subscriptions:
            try:
                at_work.append(stack.enter_context(opened(config, name, "replay")))
            except CdcReplayError as error:
                log.warning("subscription %s is left out: %s", name, error)
                results[name] = ReplayResult(name, Lsn(0), Lsn(0), 0.0, error=str(error))
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
    work = _Work(config, publisher, change_log, fence)
    results: dict[str, ReplayResult] = {}
    going_on = []
    for each in subscriptions:
        name = each.subscription.name
        past = work.past_parking(each, upto)
        if past is not None:
            results[name] = _reported(each, past)
        if past is None or past.error is None:
            going_on.append(each)
    for each, outcome in zip(going_on, work.replayed(going_on, upto), strict=True):
        name = each.subscription.name
        result = _reported(each, work.settled(each, upto, outcome))
        results[name] = results[name].followed_by(result) if name in results else result
    return tuple(results[each.subscription.name] for each in subscriptions)


@dataclass(frozen=True, slots=True)
class _Work:
    """What the windows of one call have in common."""

    config: Config
    publisher: PublisherConfig
    change_log: ChangeLog
    fence: ExportedSnapshot | None

    def replayed(self, subscriptions: Sequence[Opened], upto: Lsn) -> tuple[Outcome, ...]:
        """What replaying them up to there comes to, in their order; nothing is parked."""
        # Subscriptions that stand at one position share what the log says of the window.
        content = functools.cache(functools.partial(content_of, self.change_log))
        outcomes: dict[str, Outcome] = {}
        plans = []
        for each in subscriptions:
            began = time.monotonic()
            try:
                plans.append(plan_window(self.change_log, content, each, upto))
            except (CdcReplayError, psycopg.Error) as error:
                outcomes[each.subscription.name] = _failed(each, Window(upto, upto), began, error)
        with fence_of(self.config, self.publisher, self.fence) as opened_fence:
            source = Source(self.publisher, self.config.dsn_of(self.publisher), opened_fence)
            for plan, outcome in _replay_plans(self.change_log, plans, source):
                outcomes[plan.name] = _with_obstacle(plan, outcome, upto)
        parts = [each.opened for each in plans if each.is_part]
        rest = [each for each in parts if outcomes[each.subscription.name].error is None]
        if rest:
            for at_work, later in zip(rest, self.replayed(rest, upto), strict=True):
                name = at_work.subscription.name
                outcomes[name] = outcomes[name].followed_by(later)
        return tuple(outcomes[each.subscription.name] for each in subscriptions)

    def past_parking(self, at_work: Opened, upto: Lsn) -> Outcome | None:
        """Try again what the subscription is parked before; None if that is nothing, or not to be reached."""
        began = time.monotonic()
        name = at_work.subscription.name
        try:
            record = state.subscription_record(at_work.connection, name)
            if record is None or record.parked_transaction is None:
                return None
            # Before it everything is applied.
            end = min(record.parked_transaction, upto)
            outcome = settled(at_work, [end], self._attempt(at_work))
            if outcome.error is None and end == record.parked_transaction:
                state.unpark(at_work.connection, name)
                log.info("subscription %s is past transaction %s, and parked no more", name, end)
        except (CdcReplayError, psycopg.Error) as error:
            return _failed(at_work, Window(upto, upto), began, error)
        return outcome

    def settled(self, at_work: Opened, upto: Lsn, outcome: Outcome) -> Outcome:
        """The outcome, or, where the window was refused, what applying its parts comes to."""
        if not (outcome.is_refused or isinstance(outcome.error, UnknownValue)):
            return outcome
        began = time.monotonic()
        try:
            ends = self._ends(at_work, upto)
            log.info(
                "subscription %s: the window is refused; its %d transactions are tried in parts: %s",
                *(at_work.subscription.name, len(ends), outcome.error),
            )
            rest = settled(at_work, ends, self._attempt(at_work), outcome)
        except (CdcReplayError, psycopg.Error) as error:
            rest = _failed(at_work, Window(upto, upto), began, error)
        return outcome.followed_by(rest)

    def _attempt(self, at_work: Opened) -> Attempt:
        def attempt(end: Lsn) -> Outcome:
            (outcome,) = self.replayed([at_work], end)
            return outcome

        return attempt

    def _ends(self, at_work: Opened, upto: Lsn) -> list[Lsn]:
        """Where the transactions end that are not applied yet, and the window."""
        window = Window(applied_lsn(at_work) or upto, upto)
        ends = [commit.commit_lsn for commit in self.change_log.commits(window)]
        return ends if ends and ends[-1] == upto else [*ends, upto]


def _with_obstacle(plan: Plan, outcome: Outcome, upto: Lsn) -> Outcome:
    """The outcome of a plan's window, with what keeps the next one from being planned."""
    if plan.obstacle is None or outcome.error is not None:
        return outcome
    left = Window(plan.window.upto, upto)
    return outcome.followed_by(_failed(plan.opened, left, plan.began, plan.obstacle))


def _replay_plans(
    change_log: ChangeLog, plans: Sequence[Plan], source: Source
) -> Iterator[tuple[Plan, Outcome]]:
    """Apply windows; those that end at one position share a Spark job."""
    ends: dict[Lsn, list[Plan]] = {}
    for plan in plans:
        if plan.routes.routes:
            ends.setdefault(plan.window.upto, []).append(plan)
        else:
            yield plan, _outcome_of(plan, functools.partial(_advance, plan))
    for together in ends.values():
        yield from _replay_together(change_log, together, source)


def _replay_together(
    change_log: ChangeLog, plans: Sequence[Plan], source: Source
) -> Iterator[tuple[Plan, Outcome]]:
    with contextlib.ExitStack() as stack:
        windows: list[tuple[Plan, OpenWindow]] = []
        for plan in plans:
            try:
                windows.append((plan, stack.enter_context(opened_window(request_of(plan)))))
            except (CdcReplayError, psycopg.Error) as error:
                yield plan, _failed(plan.opened, plan.window, plan.began, error, plan)
        staged = staged_windows(change_log, windows, source.dsn)
        with ThreadPoolExecutor(MERGES_AT_ONCE, thread_name_prefix="merge") as merges:
            outcomes = [
                merges.submit(
                    _outcome_of, plan, functools.partial(_apply, plan, window, staged[plan.name], source)
                )
                for plan, window in windows
            ]
            for (plan, _), outcome in zip(windows, outcomes, strict=True):
                yield plan, outcome.result()


def _advance(plan: Plan, record: Record) -> None:
    advance_only(request_of(plan), before_commit=record(plan, dict))


def _apply(plan: Plan, window: OpenWindow, lane: StagedWindow, source: Source, record: Record) -> None:
    failpoint("replay.after_staging")
    if isinstance(lane, CdcReplayError):
        raise lane
    if lane.survey.unsent:
        apply_with_unsent(plan, lane.survey, source, record)
        return
    window.apply(lane.staged, lane.survey.truncations, before_commit=record(plan, lambda: lane.counts))


def _outcome_of(plan: Plan, apply: Callable[[Record], None]) -> Outcome:
    """What applying a window has come to; its result is recorded with it."""
    name = plan.name
    results: list[ReplayResult] = []

    def record(done: Plan, counts: Callable[[], Mapping[str, int]]) -> BeforeCommit:
        def before_commit(connection: Connection, applied: Applied) -> None:
            # Tables without a change in the window have reached its end too.
            state.advance_tables(connection, name, done.behind, done.window.upto)
            results.append(_result(done, counts(), applied))
            state.record_result(connection, name, "replay", results[-1].to_dict())

        return before_commit

    try:
        with translated_spark_errors(f'replay of subscription "{name}"'):
            apply(record)
    except (CdcReplayError, psycopg.Error) as error:
        return _failed(plan.opened, plan.window, plan.began, error, plan)
    # A transaction that is tried again makes its result again.
    result = results[-1]
    log.info(
        "subscription %s: (%s, %s], %d changes read, %d filtered out, applied %s, conflicts %s, %.2f s",
        name,
        result.from_lsn,
        result.to_lsn,
        result.changes_read,
        result.filtered_out,
        " ".join(f"{kind}={count}" for kind, count in result.applied.items()),
        dict(result.conflicts) or "none",
        result.seconds,
    )
    return Outcome((result,))


def _result(plan: Plan, counts: Mapping[str, int], applied: Applied) -> ReplayResult:
    return ReplayResult(
        subscription=plan.name,
        from_lsn=plan.window.after,
        to_lsn=plan.window.upto,
        seconds=time.monotonic() - plan.began,
        changes_read=plan.messages,
        transactions=plan.transactions,
        filtered_out=counts.get("filtered_out", 0),
        updates_to_insert=counts.get("updates_to_insert", 0),
        updates_to_delete=counts.get("updates_to_delete", 0),
        applied=applied.counts,
        conflicts=dict(applied.conflicts),
        conflict_keys=first_keys(applied.conflict_keys, {}),
    )


def _failed(
    at_work: Opened, window: Window, began: float, error: Exception, plan: Plan | None = None
) -> Outcome:
    """The outcome of a window that was not applied."""
    name = at_work.subscription.name
    seconds = time.monotonic() - began
    result = ReplayResult(name, window.after, window.upto, seconds, error=str(error).strip())
    return Outcome((), result, error, plan)


def _reported(at_work: Opened, outcome: Outcome) -> ReplayResult:
    """The result; if it is a failure it is recorded where `status` and Airflow read it."""
    result = outcome.result
    if outcome.failed is not None:
        name = at_work.subscription.name
        window = Window(outcome.failed.from_lsn, outcome.failed.to_lsn)
        log.warning("subscription %s: window %s was not applied: %s", name, window, outcome.error)
        with contextlib.suppress(psycopg.Error):
            state.record_result(at_work.connection, name, "replay", result.to_dict())
    return result


def applied_lsn(at_work: Opened) -> Lsn | None:
    """The position that all ready tables have reached; None before the first snapshot."""
    return min(at_work.ready_tables().values(), default=None)
