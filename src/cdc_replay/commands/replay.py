"""`replay`: apply the change log to subscribers, one transaction per subscription and window.

Several subscriptions share one read and one decode of the log. What one of them cannot apply stops that one
only: its error is in its result and in its state, its rows and its LSN are as they were.

A row may enter a subscription with a value that the publisher did not send (R4.6). Then the flow is tried
with the value from one source after the other (`commands.unsent`), and parked where none has it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import psycopg

from cdc_replay.apply.window import Applied, BeforeCommit, OpenWindow, advance_only, opened_window
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.opened import Opened, opened
from cdc_replay.commands.plan import Plan, content_of, plan_window
from cdc_replay.commands.results import ReplayResult
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
    # Subscriptions that stand at one position share what the log says of the window.
    content = functools.cache(functools.partial(content_of, change_log))
    results = {}
    plans = []
    for each in subscriptions:
        try:
            plans.append(plan_window(change_log, content, each, upto))
        except (CdcReplayError, psycopg.Error) as error:
            results[each.subscription.name] = _failed(each, Window(upto, upto), time.monotonic(), error)
    with fence_of(config, publisher, fence) as opened_fence:
        source = Source(publisher, config.dsn_of(publisher), opened_fence)
        for plan, result in _replay_plans(change_log, plans, source):
            results[plan.name] = result
            if plan.obstacle is not None and result.error is None:
                left = Window(plan.window.upto, upto)
                results[plan.name] = _failed(plan.opened, left, plan.began, plan.obstacle)
    parts = [each.opened for each in plans if each.is_part]
    if rest := [each for each in parts if results[each.subscription.name].error is None]:
        for later in replay_opened(config, publisher, rest, upto, fence=fence):
            results[later.subscription] = results[later.subscription].followed_by(later)
    return tuple(results[each.subscription.name] for each in subscriptions)


def _replay_plans(
    change_log: ChangeLog, plans: Sequence[Plan], source: Source
) -> Iterator[tuple[Plan, ReplayResult]]:
    """Apply windows; those that end at one position share a Spark job."""
    ends: dict[Lsn, list[Plan]] = {}
    for plan in plans:
        if plan.routes.routes:
            ends.setdefault(plan.window.upto, []).append(plan)
        else:
            yield plan, _result_of(plan, functools.partial(_advance, plan))
    for together in ends.values():
        yield from _replay_together(change_log, together, source)


def _replay_together(
    change_log: ChangeLog, plans: Sequence[Plan], source: Source
) -> Iterator[tuple[Plan, ReplayResult]]:
    with contextlib.ExitStack() as stack:
        windows: list[tuple[Plan, OpenWindow]] = []
        for plan in plans:
            try:
                windows.append((plan, stack.enter_context(opened_window(request_of(plan)))))
            except (CdcReplayError, psycopg.Error) as error:
                yield plan, _failed(plan.opened, plan.window, plan.began, error)
        staged = staged_windows(change_log, windows, source.dsn)
        for plan, window in windows:
            yield plan, _result_of(plan, functools.partial(_apply, plan, window, staged[plan.name], source))


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


def _result_of(plan: Plan, apply: Callable[[Record], None]) -> ReplayResult:
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
    except UnknownValue as error:
        with contextlib.suppress(psycopg.Error):
            state.park(plan.opened.connection, name, plan.window.after, str(error))
        return _failed(plan.opened, plan.window, plan.began, error)
    except (CdcReplayError, psycopg.Error) as error:
        return _failed(plan.opened, plan.window, plan.began, error)
    (result,) = results
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
