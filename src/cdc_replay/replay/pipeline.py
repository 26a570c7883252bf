"""Windows of several subscriptions in a pipeline: while one window is merged, the next is staged.

    subscription    window 1             window 2             window 3
    executors       stage                stage                stage
    subscriber                merge                merge                merge
    recorded                        (after, upto]        (after, upto]        (after, upto]

Staging is Spark's work, a merge the subscriber's. The next window is planned as if the previous one were
applied, and merged only after that. If the previous one fails, the staged rows are dropped, and the
subscription stops there. No window is staged during these merges: the last one, one with a TRUNCATE, which
locks its tables, and one with unsent values (`replay.toast.window`). Without this, five million of
`distinct_keys` take 3 to 16 % longer.

Windows with the same end share a Spark job. Subscribers are read (to plan) and merged into concurrently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self, TypeAlias, TypeVar

import psycopg

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import CdcReplayError
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.progress import Progress
from cdc_replay.model.results import ReplayResult, first_keys
from cdc_replay.postgres.connection import Connection
from cdc_replay.replay.apply.session import (
    Applied,
    ApplySession,
    BeforeCommit,
    advance_only,
    open_apply_session,
)
from cdc_replay.replay.parking import ReplayOutcome
from cdc_replay.replay.routing_groups import StagingResult, request_of, stage_windows
from cdc_replay.replay.toast.window import UNSENT_NULLS, PublisherAccess, RecordResult, apply_with_toast
from cdc_replay.replay.window_inputs import ReadContent, WindowContent
from cdc_replay.replay.window_plan import WindowPlan, plan_window, read_content
from cdc_replay.spark.errors import translated_spark_errors
from cdc_replay.subscriber import history, recorded_results, subscription_tables
from cdc_replay.subscriber.session import SubscriptionSession

logger = logging.getLogger(__name__)

MERGES_AT_ONCE: Final = 4
"""Subscribers that are merged into concurrently; the work is theirs."""
PLANS_AT_ONCE: Final = 8
"""Subscriptions that are planned concurrently; each waits for a dozen queries of its subscriber."""

_T = TypeVar("_T")
_Argument = TypeVar("_Argument")

OpenPublisher: TypeAlias = Callable[[], contextlib.AbstractContextManager[PublisherAccess]]
"""Opens the publisher for windows with the same end."""


@dataclass(frozen=True, slots=True)
class _Merging:
    """A window that is being merged; closing `resources` drops its staging tables."""

    plan: WindowPlan
    session: ApplySession
    resources: contextlib.ExitStack
    outcome: Future[ReplayOutcome]


@dataclass(slots=True)
class Pipeline:
    """By subscription, the window that is being merged, and the outcomes of earlier ones.

    The caller holds the subscriptions' locks, also while the context exits: that waits for merges.
    """

    open_publisher: OpenPublisher
    _merging: dict[str, _Merging] = field(default_factory=dict)
    _outcomes: dict[str, ReplayOutcome] = field(default_factory=dict)
    _ended: dict[str, float] = field(default_factory=dict)
    """When the last window of a subscription was merged, on the monotonic clock."""
    _began_at: dict[str, Lsn] = field(default_factory=dict)
    """Where the first window of a subscription began."""
    _windows: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _merges: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MERGES_AT_ONCE, thread_name_prefix="merge")
    )
    _plans: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(PLANS_AT_ONCE, thread_name_prefix="plan")
    )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._plans.shutdown(cancel_futures=True)
        self._merges.shutdown()
        self._windows.close()

    def advance(self, change_log: ChangeLog, subscriptions: Sequence[SubscriptionSession], upto: Lsn) -> None:
        """Apply the log up to `upto`, except for the last windows, which may still be merging.

        A subscription stops at its first window that fails.
        """
        # Subscriptions with the same position share what is read of the log.
        content = _memoize_content(functools.partial(read_content, change_log))
        active = {session.subscription.name: session for session in subscriptions}
        while active:
            planned = functools.partial(self._plan, change_log, content, upto)
            plans = [plan for plan in self._map_concurrently(planned, active.values()) if plan is not None]
            ends: dict[Lsn, list[WindowPlan]] = {}
            for plan in plans:
                if plan.routes.routes:
                    ends.setdefault(plan.window.upto, []).append(plan)
            self._map_concurrently(
                self._advance_empty_window, [plan for plan in plans if not plan.routes.routes]
            )
            for group in ends.values():
                with self.open_publisher() as publisher:
                    self._stage_and_merge(change_log, group, publisher)
            partial = (plan.name for plan in plans if plan.is_partial)
            active = {name: active[name] for name in partial if not self.has_failed(name)}

    def has_failed(self, name: str) -> bool:
        """Whether a window of the subscription is known to have failed."""
        return name in self._outcomes and self._outcomes[name].error is not None

    def pop_outcome(self, session: SubscriptionSession) -> ReplayOutcome:
        """The outcome of the subscription's windows since the last call; waits for its merge."""
        self._await_merge(session.subscription.name)
        return self._outcomes.pop(session.subscription.name, ReplayOutcome())

    def _map_concurrently(
        self, function: Callable[[_Argument], _T], arguments: Iterable[_Argument]
    ) -> list[_T]:
        """The results of `function`, in order; each argument belongs to another subscription."""
        return list(self._plans.map(function, arguments))

    # --- one window

    def _plan(
        self, change_log: ChangeLog, content: ReadContent, upto: Lsn, session: SubscriptionSession
    ) -> WindowPlan | None:
        """The subscription's next window; None if it stops."""
        name, began = session.subscription.name, time.monotonic()
        if (merging := self._merging.get(name)) is not None:
            applied = dict.fromkeys(merging.plan.advanced, merging.plan.window.upto)
            with contextlib.suppress(CdcReplayError, psycopg.Error):
                return plan_window(change_log, content, session.as_if_applied(applied), upto)
            # The error may be gone, or reported, once the previous window is merged.
            self._await_merge(name)
            if self.has_failed(name):
                return None
        try:
            return plan_window(change_log, content, session, upto)
        except (CdcReplayError, psycopg.Error) as error:
            self._add(name, failed_outcome(session, Window(upto, upto), began, error))
            return None

    def _advance_empty_window(self, plan: WindowPlan) -> None:
        self._await_merge(plan.name)
        if not self.has_failed(plan.name):
            self._add(plan.name, self._run(plan, functools.partial(_advance, plan)))

    def _stage_and_merge(
        self, change_log: ChangeLog, plans: Sequence[WindowPlan], publisher: PublisherAccess
    ) -> None:
        sessions = zip(plans, self._map_concurrently(self._open_apply_session, plans), strict=True)
        open_sessions = [(plan, *session) for plan, session in sessions if session is not None]
        planned_sessions = [(plan, session) for plan, session, _ in open_sessions]
        staged = stage_windows(change_log, planned_sessions, publisher.source.dsn)
        for plan, session, resources in open_sessions:
            self._await_merge(plan.name)
            if self.has_failed(plan.name):
                resources.close()
                continue
            apply = functools.partial(_apply, plan, session, staged[plan.name], publisher)
            outcome = self._merges.submit(self._run, plan, apply)
            self._merging[plan.name] = _Merging(plan, session, resources, outcome)
        for plan, _ in planned_sessions:
            if not _can_overlap(plan, staged[plan.name]):
                self._await_merge(plan.name)

    def _open_apply_session(self, plan: WindowPlan) -> tuple[ApplySession, contextlib.ExitStack] | None:
        merging = self._merging.get(plan.name)
        resources = self._windows.enter_context(contextlib.ExitStack())
        try:
            previous = None if merging is None else merging.session
            session = open_apply_session(request_of(plan), previous=previous)
            return resources.enter_context(session), resources
        except (CdcReplayError, psycopg.Error) as error:
            self._await_merge(plan.name)
            if not self.has_failed(plan.name):
                self._add(plan.name, failed_outcome(plan.session, plan.window, plan.began, error, plan))
            return None

    def _await_merge(self, name: str) -> None:
        if (merging := self._merging.pop(name, None)) is None:
            return
        with merging.resources:
            outcome = merging.outcome.result()
        self._add(name, outcome)

    def _add(self, name: str, outcome: ReplayOutcome) -> None:
        self._outcomes[name] = self._outcomes.get(name, ReplayOutcome()).followed_by(outcome)

    def _run(self, plan: WindowPlan, apply: Callable[[RecordResult], None]) -> ReplayOutcome:
        """Apply a window; its outcome, and why the next cannot be planned. Records the result."""
        name, results = plan.name, list[ReplayResult]()
        # The merge during which it was staged has its own seconds.
        began = max(plan.began, self._ended.get(name, plan.began))

        def record(applied_plan: WindowPlan, counts: Callable[[], Mapping[str, int]]) -> BeforeCommit:
            def before_commit(connection: Connection, applied: Applied) -> None:
                # Tables without a change in the window advance too.
                subscription_tables.advance_tables(
                    connection, name, applied_plan.advanced, applied_plan.window.upto
                )
                subscription_tables.mark_rewritten(
                    connection, name, applied_plan.rewritten, applied_plan.window.upto
                )
                if applied_plan.found_by_name:
                    subscription_tables.record_names(connection, name, applied_plan.found_by_name)
                timed = dataclasses.replace(applied_plan, began=began)
                results.append(_make_result(timed, counts(), applied))
                recorded_results.record_result(connection, name, "replay", results[-1].to_dict())
                history.append_window(
                    connection, results[-1], lag_seconds=timed.lag_seconds(), lag_bytes=timed.lag_bytes
                )

            return before_commit

        try:
            with translated_spark_errors(f'replay of subscription "{name}"'):
                apply(record)
        except (CdcReplayError, psycopg.Error) as error:
            return failed_outcome(plan.session, plan.window, began, error, plan)
        finally:
            self._ended[name] = time.monotonic()
        # A retried transaction records its result again.
        result = results[-1]
        _log_window(plan, result)
        self._report(plan)
        outcome = ReplayOutcome((result,))
        if plan.stops_at_error is None:
            return outcome
        unapplied = Window(plan.window.upto, plan.requested_upto)
        return outcome.followed_by(failed_outcome(plan.session, unapplied, plan.began, plan.stops_at_error))

    def _report(self, plan: WindowPlan) -> None:
        start = self._began_at.setdefault(plan.name, plan.window.after).value
        done, total = plan.window.upto.value - start, plan.requested_upto.value - start
        plan.session.report(Progress("replay", plan.name, done, total))


def _log_window(plan: WindowPlan, result: ReplayResult) -> None:
    logger.info(
        "subscription %s: (%s, %s], %d changes read, %d filtered out, applied %s, conflicts %s, %.2f s",
        plan.name,
        result.from_lsn,
        result.to_lsn,
        result.changes_read,
        result.filtered_out,
        " ".join(f"{kind}={count}" for kind, count in result.applied.items()),
        dict(result.conflicts) or "none",
        result.seconds,
    )
    for warning in plan.warnings:
        logger.warning("subscription %s: %s", plan.name, warning)
    if plan.rewritten:
        logger.info(
            "subscription %s: the publisher has rewritten %s by the transaction that committed at %s,"
            " which sends no changes (R11.9); the next sync, snapshot or refresh compares values",
            *(plan.name, ", ".join(map(str, plan.rewritten)), plan.window.upto),
        )


def _memoize_content(content: ReadContent) -> ReadContent:
    """Read a window's content once, for all threads that request it."""
    cached, lock = functools.cache(content), threading.Lock()

    def read(window: Window) -> WindowContent:
        with lock:
            return cached(window)

    return read


def _advance(plan: WindowPlan, record: RecordResult) -> None:
    advance_only(request_of(plan), record(plan, dict))


def _apply(
    plan: WindowPlan,
    session: ApplySession,
    staging: StagingResult,
    publisher: PublisherAccess,
    record: RecordResult,
) -> None:
    failpoint("replay.after_staging")
    if isinstance(staging, CdcReplayError):
        raise staging
    if staging.survey.unsent:
        apply_with_toast(plan, session, staging.survey, publisher, record)
        return
    session.apply(
        staging.staged, staging.survey.truncations, before_commit=record(plan, lambda: staging.counts)
    )


def _can_overlap(plan: WindowPlan, staging: StagingResult) -> bool:
    """Whether another window can be planned and staged while this one is merged."""
    if plan.stops_at_error is not None or isinstance(staging, CdcReplayError):
        return False
    return not staging.survey.unsent and not staging.survey.truncations


def _make_result(plan: WindowPlan, counts: Mapping[str, int], applied: Applied) -> ReplayResult:
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
        unsent_nulls=counts.get(UNSENT_NULLS, 0),
        passed_over=tuple(map(str, plan.unsubscribed)),
    )


def failed_outcome(
    session: SubscriptionSession,
    window: Window,
    began: float,
    error: Exception,
    plan: WindowPlan | None = None,
) -> ReplayOutcome:
    """The outcome of a window that was not applied; `began` is on the monotonic clock."""
    name = session.subscription.name
    seconds = time.monotonic() - began
    result = ReplayResult(name, window.after, window.upto, seconds).failed_with(error)
    return ReplayOutcome((), result, error, plan)
