"""A window into which rows enter with values that were not sent (R4.6), applied with the values found.

The flow is tried with the value from one source after the other (`commands.unsent`), until all are known, or
are not needed after all.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cdc_replay.apply.window import BeforeCommit, apply_window
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.fences import Fences
from cdc_replay.commands.plan import Plan, content_of, plan_window
from cdc_replay.commands.staged_windows import request_of
from cdc_replay.commands.unsent import Unsent
from cdc_replay.commands.window import decode_window
from cdc_replay.compact import Survey, lacks_values, net_changes, survey
from cdc_replay.config import PublisherConfig
from cdc_replay.failpoints import failpoint
from cdc_replay.fill import History, find
from cdc_replay.model.lsn import Lsn
from cdc_replay.route.router import Routed, route
from cdc_replay.spark_session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

Record: TypeAlias = Callable[[Plan, Callable[[], Mapping[str, int]]], BeforeCommit]
"""Records the result of a plan's window, with the routing's counts, which are asked for then."""


@dataclass(frozen=True, slots=True)
class Source:
    """The publisher, as far as replay needs it beside the log."""

    publisher: PublisherConfig
    dsn: str
    fences: Fences


@dataclass(frozen=True, slots=True)
class _Flow:
    """A plan's window as it was decoded, and what is known of it."""

    plan: Plan
    changes: DataFrame
    found: Survey

    def routed(self, source: Source, changes: DataFrame | None = None) -> Routed:
        """What the subscription sees of the window, or of `changes` in its place."""
        seen = self.changes if changes is None else changes
        origin = self.plan.opened.subscription.origin
        return route(seen, self.plan.routes, origin=origin, publisher_dsn=source.dsn)


def apply_with_unsent(plan: Plan, found: Survey, source: Source, record: Record) -> None:
    """Apply the window with the values of the first history that has all of them.

    Raises:
        UnknownValue: if none has.
        CdcReplayError: as `apply_window`, and if a fence cannot be had.
    """
    change_log = ChangeLog.open(source.publisher.change_log)
    changes = decode_window(spark_session("cdc-replay"), change_log, plan.window)
    for tried, history, is_last in _histories(_Flow(plan, changes, found), source):
        entries = [(commit_lsn, seq) for _, commit_lsn, seq in tried.found.unsent]
        with find(history, entries) as values:
            failpoint("fill.after_read")
            routed = tried.routed(source, values.put_into(tried.changes))
            tables, policy = tried.plan.routes.tables, tried.plan.opened.subscription.on_conflict
            net = net_changes(routed.changes, tried.found, tables, tried.plan.window, policy=policy)
            # A row that leaves again, or gets another value, does not need the one that was not sent.
            if is_last or values.unknown == 0 or not lacks_values(net):
                recorded = record(tried.plan, functools.partial(getattr, routed.counts, "get"))
                apply_window(net, request_of(tried.plan), tried.found.truncations, before_commit=recorded)
                return


def _histories(flow: _Flow, source: Source) -> Iterator[tuple[_Flow, History, bool]]:
    """What to apply, where to look for its unsent values, and whether it is the last that can be tried."""
    window, session = flow.plan.window, flow.changes.sparkSession
    unsent = Unsent(source.publisher, flow.plan.routes, flow.found)
    yield flow, unsent.in_window(flow.changes, window), False
    fence = source.fences.of(window)
    yield flow, unsent.at_fence(session, fence, window.after), False
    if fence.complete_upto > window.upto:
        flow = _extended(flow, source, fence.complete_upto)
        unsent = Unsent(source.publisher, flow.plan.routes, flow.found)
        yield flow, unsent.at_fence(session, fence, window.after), False
    yield flow, unsent.at_fence_with_whole_log(session, fence), True


def _extended(flow: _Flow, source: Source, upto: Lsn) -> _Flow:
    """The flow of the window, which goes up to `upto` instead."""
    change_log = ChangeLog.open(source.publisher.change_log)
    content = functools.partial(content_of, change_log)
    plan = plan_window(change_log, content, flow.plan.opened, upto, may_be_cut=False)
    log.warning(
        "subscription %s: window %s is extended to %s, because rows enter it with values that were not sent"
        " and that have changed since",
        plan.name,
        flow.plan.window,
        upto,
    )
    changes = decode_window(flow.changes.sparkSession, change_log, plan.window)
    extended = _Flow(plan, changes, Survey((), ()))
    return _Flow(plan, changes, survey(extended.routed(source).changes))
