"""Windows of several subscriptions, one after the other: while one is merged, the next is staged.

    subscription    window 1             window 2             window 3
    executors       stage                stage                stage
    subscriber                merge                merge                merge
    recorded                        (after, upto]        (after, upto]        (after, upto]

Staging is Spark's work, a merge the subscriber's. The next window is planned as if the one before were
applied, and merged only once it is. If it is not, what was staged is dropped, and the subscription stops
there. A window that another one cannot be staged beside is waited for: the last one, one with a TRUNCATE,
which locks its tables, and one with values to look for (`replay.toast.window`).

Windows that end at one position share a Spark job. What several subscriptions ask of their subscribers is
asked side by side: what their tables are, and to merge.
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
from cdc_replay.replay.window_plan import ReadContent, WindowContent, WindowPlan, plan_window, read_content
from cdc_replay.spark.errors import translated_spark_errors
from cdc_replay.subscriber import state
from cdc_replay.subscriber.session import SubscriptionSession

logger = logging.getLogger(__name__)

MERGES_AT_ONCE: Final = 4
"""Subscribers that are merged into at the same time; the work is theirs."""
PLANS_AT_ONCE: Final = 8
"""Subscriptions that are planned at the same time; each waits for a dozen answers of its subscriber."""

_T = TypeVar("_T")
_Given = TypeVar("_Given")

OpenPublisher: TypeAlias = Callable[[], contextlib.AbstractContextManager[PublisherAccess]]
"""Opens the publisher for windows that end at one position."""


@dataclass(frozen=True, slots=True)
class _Merging:
    """A window that is being merged; closing it drops what is staged."""

    plan: WindowPlan
    window: ApplySession
    closing: contextlib.ExitStack
    outcome: Future[ReplayOutcome]


@dataclass(slots=True)
class Pipeline:
    """What is under way, by subscription: a window that is merged, and what those before it have come to.

    The caller holds the subscriptions' locks, also while the context is left: merges are waited for.
    """

    open_publisher: OpenPublisher
    _merging: dict[str, _Merging] = field(default_factory=dict)
    _outcomes: dict[str, ReplayOutcome] = field(default_factory=dict)
    _ended: dict[str, float] = field(default_factory=dict)
    """When the last window of a subscription was merged, on the monotonic clock."""
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
        """Apply the log up to there, but for the last windows, which may be merging still.

        A subscription of which a window fails goes no further.
        """
        # Subscriptions that stand at one position share what the log says of the window.
        content = _once(functools.partial(read_content, change_log))
        going_on = {each.subscription.name: each for each in subscriptions}
        while going_on:
            planned = functools.partial(self._planned, change_log, content, upto)
            plans = [plan for plan in self._side_by_side(planned, going_on.values()) if plan is not None]
            ends: dict[Lsn, list[WindowPlan]] = {}
            for plan in plans:
                if plan.routes.routes:
                    ends.setdefault(plan.window.upto, []).append(plan)
            self._side_by_side(self._pass_by, [plan for plan in plans if not plan.routes.routes])
            for together in ends.values():
                with self.open_publisher() as publisher:
                    self._stage_and_merge(change_log, together, publisher)
            parts = (plan.name for plan in plans if plan.is_partial)
            going_on = {name: going_on[name] for name in parts if not self.has_failed(name)}

    def has_failed(self, name: str) -> bool:
        """Whether it is known that a window of the subscription was not applied."""
        return name in self._outcomes and self._outcomes[name].error is not None

    def taken(self, session: SubscriptionSession) -> ReplayOutcome:
        """What the subscription's windows have come to since this was asked last; waits for its merge."""
        self._settle(session.subscription.name)
        return self._outcomes.pop(session.subscription.name, ReplayOutcome())

    def _side_by_side(self, work: Callable[[_Given], _T], given: Iterable[_Given]) -> list[_T]:
        """What `work` makes of each, in their order; each is of a subscription of its own."""
        return list(self._plans.map(work, given))

    # --- one window

    def _planned(
        self, change_log: ChangeLog, content: ReadContent, upto: Lsn, session: SubscriptionSession
    ) -> WindowPlan | None:
        """The subscription's next window; None if it goes no further."""
        name, began = session.subscription.name, time.monotonic()
        if (before := self._merging.get(name)) is not None:
            reached = dict.fromkeys(before.plan.advanced, before.plan.window.upto)
            with contextlib.suppress(CdcReplayError, psycopg.Error):
                return plan_window(change_log, content, session.as_if_applied(reached), upto)
            # Once it is applied, or is not, what is in the way may be gone, or may be told.
            self._settle(name)
            if self.has_failed(name):
                return None
        try:
            return plan_window(change_log, content, session, upto)
        except (CdcReplayError, psycopg.Error) as error:
            self._add(name, failed(session, Window(upto, upto), began, error))
            return None

    def _pass_by(self, plan: WindowPlan) -> None:
        """A window without anything for the subscription."""
        self._settle(plan.name)
        if not self.has_failed(plan.name):
            self._add(plan.name, self._outcome_of(plan, functools.partial(_advance, plan)))

    def _stage_and_merge(
        self, change_log: ChangeLog, plans: Sequence[WindowPlan], publisher: PublisherAccess
    ) -> None:
        found = zip(plans, self._side_by_side(self._opened, plans), strict=True)
        opened = [(plan, *window) for plan, window in found if window is not None]
        windows = [(plan, window) for plan, window, _ in opened]
        staged = stage_windows(change_log, windows, publisher.source.dsn)
        for plan, window, closing in opened:
            self._settle(plan.name)
            if self.has_failed(plan.name):
                closing.close()
                continue
            apply = functools.partial(_apply, plan, window, staged[plan.name], publisher)
            outcome = self._merges.submit(self._outcome_of, plan, apply)
            self._merging[plan.name] = _Merging(plan, window, closing, outcome)
        for plan, _ in windows:
            if not _leaves_room(plan, staged[plan.name]):
                self._settle(plan.name)

    def _opened(self, plan: WindowPlan) -> tuple[ApplySession, contextlib.ExitStack] | None:
        before = self._merging.get(plan.name)
        closing = self._windows.enter_context(contextlib.ExitStack())
        try:
            window = open_apply_session(request_of(plan), previous=None if before is None else before.window)
            return closing.enter_context(window), closing
        except (CdcReplayError, psycopg.Error) as error:
            self._settle(plan.name)
            if not self.has_failed(plan.name):
                self._add(plan.name, failed(plan.session, plan.window, plan.began, error, plan))
            return None

    def _settle(self, name: str) -> None:
        """Wait for the subscription's merge, if there is one, and take up what it has come to."""
        if (merging := self._merging.pop(name, None)) is None:
            return
        with merging.closing:
            outcome = merging.outcome.result()
        self._add(name, outcome)

    def _add(self, name: str, outcome: ReplayOutcome) -> None:
        self._outcomes[name] = self._outcomes.get(name, ReplayOutcome()).followed_by(outcome)

    def _outcome_of(self, plan: WindowPlan, apply: Callable[[RecordResult], None]) -> ReplayOutcome:
        """What applying a window has come to, and why the next cannot be planned; its result is recorded."""
        name, results = plan.name, list[ReplayResult]()
        # What it was staged beside has its own seconds.
        began = max(plan.began, self._ended.get(name, plan.began))

        def record(done: WindowPlan, counts: Callable[[], Mapping[str, int]]) -> BeforeCommit:
            def before_commit(connection: Connection, applied: Applied) -> None:
                # Tables without a change in the window have reached its end too.
                state.advance_tables(connection, name, done.advanced, done.window.upto)
                state.mark_rewritten(connection, name, done.rewritten, done.window.upto)
                if done.found_by_name:
                    state.record_names(connection, name, done.found_by_name)
                timed = dataclasses.replace(done, began=began)
                results.append(_result(timed, counts(), applied))
                state.record_result(connection, name, "replay", results[-1].to_dict())

            return before_commit

        try:
            with translated_spark_errors(f'replay of subscription "{name}"'):
                apply(record)
        except (CdcReplayError, psycopg.Error) as error:
            return failed(plan.session, plan.window, began, error, plan)
        finally:
            self._ended[name] = time.monotonic()
        # A transaction that is tried again makes its result again.
        result = results[-1]
        logger.info(
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
        if plan.unsubscribed:
            logger.warning(
                "subscription %s: passed over changes of %s, which are published and not subscribed to,"
                " new on the publisher or made anew on the subscriber; `cdc-replay refresh %s` takes them in",
                *(name, ", ".join(map(str, plan.unsubscribed)), name),
            )
        if plan.rewritten:
            logger.info(
                "subscription %s: the publisher has rewritten %s by the transaction that committed at %s,"
                " which sends no changes (R11.9); the next sync, snapshot or refresh compares values",
                *(name, ", ".join(map(str, plan.rewritten)), plan.window.upto),
            )
        outcome = ReplayOutcome((result,))
        if plan.stops_at_error is None:
            return outcome
        left = Window(plan.window.upto, plan.requested_upto)
        return outcome.followed_by(failed(plan.session, left, plan.began, plan.stops_at_error))


def _once(content: ReadContent) -> ReadContent:
    """What it says of a window, read once, whoever asks for it at the same time."""
    cached, lock = functools.cache(content), threading.Lock()

    def read(window: Window) -> WindowContent:
        with lock:
            return cached(window)

    return read


def _advance(plan: WindowPlan, record: RecordResult) -> None:
    advance_only(request_of(plan), before_commit=record(plan, dict))


def _apply(
    plan: WindowPlan,
    window: ApplySession,
    lane: StagingResult,
    publisher: PublisherAccess,
    record: RecordResult,
) -> None:
    failpoint("replay.after_staging")
    if isinstance(lane, CdcReplayError):
        raise lane
    if lane.survey.unsent:
        apply_with_toast(plan, lane.survey, publisher, record)
        return
    window.apply(lane.staged, lane.survey.truncations, before_commit=record(plan, lambda: lane.counts))


def _leaves_room(plan: WindowPlan, lane: StagingResult) -> bool:
    """Whether another window can be planned and staged while this one is merged."""
    if plan.stops_at_error is not None or isinstance(lane, CdcReplayError):
        return False
    return not lane.survey.unsent and not lane.survey.truncations


def _result(plan: WindowPlan, counts: Mapping[str, int], applied: Applied) -> ReplayResult:
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


def failed(
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
