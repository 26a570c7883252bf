"""`replay`: apply the change log to subscribers, one transaction per subscription and window.

Several subscriptions share one read and one decode of the log. What one of them cannot apply stops that one
only: its error is in its result and in its state, its rows and its LSN are as they were.

A row may enter a subscription with a value that the publisher did not send (R4.6). Then the flow is tried
with the value from one source after the other (`commands.unsent`), and parked where none has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
from pyspark import StorageLevel

from cdc_replay.apply.window import Applied, ApplyRequest, advance_only, apply_window
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.opened import Opened, opened
from cdc_replay.commands.plan import Plan, content_of, plan_window
from cdc_replay.commands.results import ReplayResult
from cdc_replay.commands.spark_errors import translated_spark_errors
from cdc_replay.commands.unsent import Fence, Unsent, fence_of
from cdc_replay.commands.window import decode_window
from cdc_replay.compact import Survey, lacks_values, net_changes, survey
from cdc_replay.config import Config, PublisherConfig
from cdc_replay.errors import (
    CdcReplayError,
    ChangeLogMissing,
    InvalidConfiguration,
    UnknownValue,
)
from cdc_replay.failpoints import failpoint
from cdc_replay.fill import History, find
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot
from cdc_replay.route.router import Routed, route
from cdc_replay.spark_session import spark_session, tune_for
from cdc_replay.subscriber import state

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class _Source:
    """The publisher, as far as replay needs it beside the log."""

    publisher: PublisherConfig
    dsn: str
    fence: Fence


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
    # Subscriptions that stand at one position share what the log says of the window.
    content = functools.cache(functools.partial(content_of, change_log))
    results = {}
    plans = []
    for each in subscriptions:
        try:
            plans.append(plan_window(change_log, content, each, upto))
        except (CdcReplayError, psycopg.Error) as error:
            results[each.subscription.name] = _failed(each, Window(upto, upto), time.monotonic(), error)
    with fence_of(config, publisher, fence) as opened_fence, _decoded(change_log, plans) as changes:
        source = _Source(publisher, config.dsn_of(publisher), opened_fence)
        for plan in plans:
            result = _replay_one(plan, changes, source)
            if plan.obstacle is not None and result.error is None:
                result = _failed(plan.opened, Window(plan.window.upto, upto), plan.began, plan.obstacle)
            results[plan.opened.subscription.name] = result
    parts = [each.opened for each in plans if each.is_part]
    if rest := [each for each in parts if results[each.subscription.name].error is None]:
        for later in replay_opened(config, publisher, rest, upto, fence=fence):
            results[later.subscription] = results[later.subscription].followed_by(later)
    return tuple(results[each.subscription.name] for each in subscriptions)


@contextlib.contextmanager
def _decoded(change_log: ChangeLog, plans: Sequence[Plan]) -> Iterator[DataFrame | None]:
    """The changes of all the plans' windows, decoded once; None if no plan has a route for any."""
    routed = [plan for plan in plans if plan.routes.routes]
    if not routed:
        yield None
        return
    window = Window(min(plan.window.after for plan in routed), max(plan.window.upto for plan in routed))
    session = spark_session("cdc-replay")
    tune_for(session, max(plan.messages for plan in routed))
    changes = decode_window(session, change_log, window)
    if len(routed) > 1:
        changes = changes.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield changes
    finally:
        if len(routed) > 1:
            changes.unpersist()


def _replay_one(plan: Plan, changes: DataFrame | None, source: _Source) -> ReplayResult:
    name = plan.opened.subscription.name
    try:
        with translated_spark_errors(f'replay of subscription "{name}"'):
            result = _flow(plan, changes, source)
    except UnknownValue as error:
        with contextlib.suppress(psycopg.Error):
            state.park(plan.opened.connection, name, plan.window.after, str(error))
        return _failed(plan.opened, plan.window, plan.began, error)
    except (CdcReplayError, psycopg.Error) as error:
        return _failed(plan.opened, plan.window, plan.began, error)
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
    return result


def _flow(plan: Plan, changes: DataFrame | None, source: _Source) -> ReplayResult:
    if changes is None or not plan.routes.routes:
        return _apply(plan, None)
    if plan.is_part:
        changes = changes.where(changes["commit_lsn"] <= plan.window.upto.value)
    flow = _routed(plan, changes, source)
    if flow.found.unsent:
        return _flow_with_unsent(flow, source)
    return _apply(plan, flow)


@dataclass(frozen=True, slots=True)
class _Flow:
    """A plan's window, routed and surveyed; nothing is folded yet."""

    plan: Plan
    changes: DataFrame
    routed: Routed
    found: Survey

    @property
    def net(self) -> DataFrame:
        """The net changes."""
        policy = self.plan.opened.subscription.on_conflict
        return net_changes(self.routed.changes, self.found, self.plan.routes.tables, policy=policy)


def _routed(plan: Plan, changes: DataFrame, source: _Source) -> _Flow:
    routed = _route(plan, changes, source)
    return _Flow(plan, changes, routed, survey(routed.changes))


def _route(plan: Plan, changes: DataFrame, source: _Source) -> Routed:
    origin = plan.opened.subscription.origin
    return route(changes, plan.routes, origin=origin, publisher_dsn=source.dsn)


def _flow_with_unsent(flow: _Flow, source: _Source) -> ReplayResult:
    """Apply the window with the values of the first history that has all of them.

    Raises:
        UnknownValue: if none has.
    """
    for tried, history, is_last in _histories(flow, source):
        entries = [(commit_lsn, seq) for _, commit_lsn, seq in tried.found.unsent]
        with find(history, entries) as values:
            failpoint("fill.after_read")
            routed = _route(tried.plan, values.put_into(tried.changes), source)
            # Values change no outcome, so the counts are those of the survey.
            completed = dataclasses.replace(tried, routed=Routed(routed.changes, tried.routed.counts))
            # A row that leaves again, or gets another value, does not need the one that was not sent.
            if is_last or values.unknown == 0 or not lacks_values(completed.net):
                return _apply(tried.plan, completed)
    raise AssertionError("the last history is the last")


def _histories(flow: _Flow, source: _Source) -> Iterator[tuple[_Flow, History, bool]]:
    """What to apply, where to look for its unsent values, and whether it is the last that can be tried."""
    window, session = flow.plan.window, flow.changes.sparkSession
    unsent = Unsent(source.publisher, flow.plan.routes, flow.found, source.fence)
    yield flow, unsent.in_window(flow.changes, window), False
    yield flow, unsent.at_fence(session, window.after), False
    if (fence := source.fence().consistent_point) > window.upto:
        flow = _extended(flow, source, fence)
        unsent = dataclasses.replace(unsent, routes=flow.plan.routes, found=flow.found)
        yield flow, unsent.at_fence(session, window.after), False
    yield flow, unsent.at_fence_with_whole_log(session), True


def _extended(flow: _Flow, source: _Source, fence: Lsn) -> _Flow:
    """The flow of the window up to the fence."""
    change_log = ChangeLog.open(source.publisher.change_log)
    plan = plan_window(change_log, functools.partial(content_of, change_log), flow.plan.opened, fence)
    log.warning(
        "subscription %s: window %s is extended to %s, because rows enter it with values that were not sent"
        " and that have changed since",
        plan.opened.subscription.name,
        flow.plan.window,
        fence,
    )
    changes = decode_window(flow.changes.sparkSession, change_log, plan.window)
    return _routed(dataclasses.replace(plan, began=flow.plan.began), changes, source)


def _apply(plan: Plan, flow: _Flow | None) -> ReplayResult:
    """Apply the net changes, or only advance where there is nothing to route."""
    subscription = plan.opened.subscription
    results: list[ReplayResult] = []

    def record(connection: Connection, applied: Applied) -> None:
        # Tables without a change in the window have reached its end too.
        state.advance_tables(connection, subscription.name, plan.behind, plan.window.upto)
        results.append(_result(plan, flow.routed if flow else None, applied))
        state.record_result(connection, subscription.name, "replay", results[-1].to_dict())

    request = ApplyRequest(subscription, plan.opened.dsn, plan.routes.tables, (), plan.window.upto)
    if flow is None:
        advance_only(request, before_commit=record)
        return results[0]
    request = dataclasses.replace(request, truncations=flow.found.truncations)
    apply_window(flow.net, request, before_commit=record)
    return results[0]


def _result(plan: Plan, routed: Routed | None, applied: Applied) -> ReplayResult:
    counts = routed.counts.get if routed is not None else {}
    return ReplayResult(
        subscription=plan.opened.subscription.name,
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
    )


def _failed(at_work: Opened, window: Window, began: float, error: Exception) -> ReplayResult:
    """The result of a window that was not applied, recorded where `status` and Airflow read it."""
    name = at_work.subscription.name
    log.warning("subscription %s: window %s was not applied: %s", name, window, error)
    result = ReplayResult(name, window.after, window.upto, time.monotonic() - began, error=str(error).strip())
    with contextlib.suppress(psycopg.Error):
        state.record_result(at_work.connection, name, "replay", result.to_dict())
    return result


def applied_lsn(at_work: Opened) -> Lsn | None:
    """The position that all ready tables have reached; None before the first snapshot."""
    return min(at_work.ready_tables().values(), default=None)
