"""A window into which rows enter with values that were not sent (R4.6), applied with the values found.

The flow is tried with the value from one source after the other (`replay.toast.sources`), until all are
known, or are not needed after all. What is missing then:

| a value                                        | is                                                      |
|------------------------------------------------|---------------------------------------------------------|
| that is nowhere since (`fill`)                 | NULL                                                    |
| `unchanged_toast: native`                      | NULL                                                    |
| that somebody has accepted to be lost          | NULL                                                    |
| otherwise                                      | an error, which parks before the transaction            |

NULL is what a native subscription has there. It is counted and told.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import PublicationRefused, UnchangedToastLost
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import FailurePolicy, SubscribedTable, Subscription, UnchangedToast
from cdc_replay.postgres.connection import Connection
from cdc_replay.publication.resolve import synced_tables
from cdc_replay.replay.apply.session import Applied, BeforeCommit, apply_window
from cdc_replay.replay.compact import (
    EnteredRow,
    UnsentNulls,
    WindowFacts,
    fold_frame,
    has_missing_values,
    scan_window,
    unsent_nulls,
    with_nulls,
)
from cdc_replay.replay.log_window import catalog_history, decode_window
from cdc_replay.replay.publisher_fence import FenceProvider
from cdc_replay.replay.route.spark_router import Routed, route
from cdc_replay.replay.routing_groups import request_of
from cdc_replay.replay.toast import ChangeHistory, resolve_values
from cdc_replay.replay.toast.sources import ToastSources
from cdc_replay.replay.window_plan import WindowPlan, plan_window, read_content
from cdc_replay.spark.session import spark_session
from cdc_replay.subscriber import null_acceptance

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

UNSENT_NULLS: Final = "unsent_nulls"
"""The count of NULLs that were stored for unsent values, beside those of the routing."""

RecordResult: TypeAlias = Callable[[WindowPlan, Callable[[], Mapping[str, int]]], BeforeCommit]
"""Records the result of a plan's window, with the routing's counts, which are asked for then."""


@dataclass(frozen=True, slots=True)
class PublisherAccess:
    """The publisher, as far as replay needs it beside the log."""

    source: CaptureSource
    fences: FenceProvider
    may_extend: bool = True
    """Whether a window may go further than it was asked to."""


@dataclass(frozen=True, slots=True)
class _DecodedWindow:
    """A plan's window as it was decoded, and what is known of it."""

    plan: WindowPlan
    changes: DataFrame
    found: WindowFacts

    def routed(self, publisher: PublisherAccess, changes: DataFrame | None = None) -> Routed:
        """What the subscription sees of the window, or of `changes` in its place."""
        seen = self.changes if changes is None else changes
        origin = self.plan.opened.subscription.origin
        return route(seen, self.plan.routes, origin=origin, publisher_dsn=publisher.source.dsn)


def apply_with_toast(
    plan: WindowPlan, found: WindowFacts, publisher: PublisherAccess, record: RecordResult
) -> None:
    """Apply the window with the values of the first history that has all of them.

    Raises:
        UnknownValue: if none has, and that is not accepted.
        CdcReplayError: as `apply_window`, and if a fence cannot be had.
    """
    change_log = ChangeLog.open(publisher.source.change_log)
    changes = decode_window(spark_session("cdc-replay"), change_log, plan.window)
    for tried, history, is_last in _toast_sources(_DecodedWindow(plan, changes, found), publisher):
        entries = [(commit_lsn, seq) for _, commit_lsn, seq in tried.found.unsent]
        with resolve_values(history, entries) as values:
            failpoint("fill.after_read")
            routed = tried.routed(publisher, values.merge_into(tried.changes))
            tables, policy = tried.plan.routes.tables, tried.plan.opened.subscription.on_conflict
            net = fold_frame(routed.changes, tried.found, tables, tried.plan.window, policy=policy)
            # A row that leaves again, or gets another value, does not need the one that was not sent.
            if is_last or values.unknown == 0 or not has_missing_values(net):
                _apply(tried, net, routed, record, change_log, is_complete=values.unknown == 0)
                return


def _apply(
    flow: _DecodedWindow,
    net: DataFrame,
    routed: Routed,
    record: RecordResult,
    change_log: ChangeLog,
    *,
    is_complete: bool,
) -> None:
    """Apply the flow's net changes, with NULL for what is missing where that may be."""
    plan, name = flow.plan, flow.plan.name
    accepted = _accepted(plan)
    nulls = UnsentNulls({}, {}, None, 0) if is_complete else unsent_nulls(net, plan.window, accepted)
    if nulls.unknown is not None:
        raise _unknown_value(plan, nulls.unknown, nulls.more, change_log)

    def before_commit(connection: Connection, applied: Applied) -> None:
        null_acceptance.clear_null_acceptance(connection, name, plan.window.upto)
        record(plan, lambda: {**routed.counts.get, UNSENT_NULLS: nulls.count})(connection, applied)

    whole = with_nulls(net, plan.window, accepted)
    apply_window(whole, request_of(plan), flow.found.truncations, before_commit=before_commit)
    _tell_of(plan, nulls)


def _accepted(plan: WindowPlan) -> dict[int, Lsn]:
    """By target, up to which commit a row may enter with NULL for a value that nobody has."""
    if plan.opened.subscription.unchanged_toast is UnchangedToast.NATIVE:
        return {table.index: plan.window.upto for table in plan.routes.tables}
    accepted = null_acceptance.read_null_acceptance(plan.opened.connection, plan.name)
    return {table.index: accepted[table.name] for table in plan.routes.tables if table.name in accepted}


def _tell_of(plan: WindowPlan, nulls: UnsentNulls) -> None:
    tables = {table.index: table for table in plan.routes.tables}
    for target, count in nulls.values.items():
        keys = ", ".join(_key(tables[target], row) for row in nulls.rows[target])
        logger.warning(
            "subscription %s: table %s: %d NULL, as natively, for values that were not sent and that neither"
            " the log nor the publisher has any more (R4.6); first rows: %s",
            *(plan.name, tables[target].name, count, keys),
        )


def _key(table: SubscribedTable, row: EnteredRow) -> str:
    if not table.is_keyed:
        return "without a key"
    shown = row.key[: len(table.identity)]
    return f"({', '.join(table.identity)})=({', '.join(map(str, shown))})"


def _unknown_value(plan: WindowPlan, row: EnteredRow, more: int, change_log: ChangeLog) -> UnchangedToastLost:
    table = next(table for table in plan.routes.tables if table.index == row.target)
    subscription, target = plan.opened.subscription, table.name
    columns = [f'"{name}"' for name, kind in zip(table.columns, row.kinds, strict=True) if kind == "u"]
    others = f" There are {more} more such rows in this window." if more else ""
    alone = f" --table {target}" if subscription.on_failure is FailurePolicy.TABLE else ""
    resume = f"cdc-replay resume {subscription.name}{alone}"
    ways = [
        f"store NULL as a native subscription does: `{resume} --accept-null`",
        f"leave the transaction out: `{resume} --skip {row.commit_lsn}`",
    ]
    if target in _published(subscription, change_log):
        ways.append(f"copy the table again: `cdc-replay snapshot {subscription.name} --table {target}`")
    error = UnchangedToastLost(
        f'a row enters table "{target.schema}"."{target.name}" without a value of column'
        f" {', '.join(columns)}",
        detail=f"Key {_key(table, row)}, by the transaction that committed at {row.commit_lsn}. An UPDATE has"
        " brought the row into the filter of the publications, and a publisher does not send an unchanged"
        " value that is stored out of line. The change log does not have it, and what the publisher has"
        f" cannot be told to be the same row's or the same value.{others}",
        hint=f"No NULL is stored instead, unless `unchanged_toast` is `native`. {_sentence(ways)}",
        rule="R4.6",
        table=(target.schema, target.name),
    )
    error.commit_lsn = row.commit_lsn.value
    return error


def _sentence(ways: Sequence[str]) -> str:
    text = "; ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def _published(subscription: Subscription, change_log: ChangeLog) -> frozenset[QualifiedName]:
    """The tables that a snapshot can copy, as far as the log knows."""
    catalog = catalog_history(change_log).at(change_log.end_lsn)
    try:
        return frozenset(each.table.name for each in synced_tables(catalog, subscription.publications))
    except PublicationRefused:
        return frozenset()


def _toast_sources(
    flow: _DecodedWindow, publisher: PublisherAccess
) -> Iterator[tuple[_DecodedWindow, ChangeHistory, bool]]:
    """What to apply, where to look for its unsent values, and whether it is the last that can be tried."""
    window, session = flow.plan.window, flow.changes.sparkSession
    unsent = ToastSources(publisher.source.change_log, flow.plan.routes, flow.found)
    yield flow, unsent.in_window(flow.changes, window), False
    fence = publisher.fences.of(window)
    yield flow, unsent.at_fence(session, fence, window.after), False
    if publisher.may_extend and fence.complete_upto > window.upto:
        flow = _extend_window(flow, publisher, fence.complete_upto)
        unsent = ToastSources(publisher.source.change_log, flow.plan.routes, flow.found)
        yield flow, unsent.at_fence(session, fence, window.after), False
    yield flow, unsent.at_fence_with_whole_log(session, fence, window.after), True


def _extend_window(flow: _DecodedWindow, publisher: PublisherAccess, upto: Lsn) -> _DecodedWindow:
    """The flow of the window, which goes up to `upto` instead."""
    change_log = ChangeLog.open(publisher.source.change_log)
    content = functools.partial(read_content, change_log)
    plan = plan_window(change_log, content, flow.plan.opened, upto, may_be_cut=False)
    logger.warning(
        "subscription %s: window %s is extended to %s, because rows enter it with values that were not sent"
        " and that have changed since",
        plan.name,
        flow.plan.window,
        upto,
    )
    changes = decode_window(flow.changes.sparkSession, change_log, plan.window)
    extended = _DecodedWindow(plan, changes, WindowFacts((), ()))
    return _DecodedWindow(plan, changes, scan_window(extended.routed(publisher).changes))
