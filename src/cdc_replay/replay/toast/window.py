"""A window into which rows enter with unsent values (R4.6), applied with the resolved values.

The window is tried with the values of one source after the other (`replay.toast.sources`), until all are
known, or not needed. A value that is missing then:

| a value                                        | is                                                      |
|------------------------------------------------|---------------------------------------------------------|
| that is given up (`replay.toast`)              | NULL                                                    |
| under `unchanged_toast: native`                | NULL                                                    |
| that was accepted as lost (`resume`)            | NULL                                                    |
| otherwise                                      | an error; the subscription parks before the transaction |

NULL is what a native subscription stores. It is counted and logged.
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
"""The number of NULLs stored for unsent values, next to the counts of the routing."""

RecordResult: TypeAlias = Callable[[WindowPlan, Callable[[], Mapping[str, int]]], BeforeCommit]
"""Records the result of a plan's window; the routing's counts are read when it is called."""


@dataclass(frozen=True, slots=True)
class PublisherAccess:
    """The publisher: its change log, and its fences."""

    source: CaptureSource
    fences: FenceProvider
    may_extend: bool = True
    """Whether a window may go beyond its requested end."""


@dataclass(frozen=True, slots=True)
class _DecodedWindow:
    plan: WindowPlan
    changes: DataFrame
    facts: WindowFacts

    def route_changes(self, publisher: PublisherAccess, changes: DataFrame | None = None) -> Routed:
        """What the subscription sees of the window, or of `changes` in its place."""
        seen = self.changes if changes is None else changes
        origin = self.plan.session.subscription.origin
        return route(seen, self.plan.routes, origin=origin, publisher_dsn=publisher.source.dsn)


def apply_with_toast(
    plan: WindowPlan, facts: WindowFacts, publisher: PublisherAccess, record: RecordResult
) -> None:
    """Apply the window with the values of the first history that has all of them.

    Raises:
        UnchangedToastLost: if none has, and NULL is not accepted.
        CdcReplayError: as `apply_window`, and if there is no fence.
    """
    change_log = ChangeLog.open(publisher.source.change_log)
    changes = decode_window(spark_session("cdc-replay"), change_log, plan.window)
    for decoded, history, is_last in _toast_sources(_DecodedWindow(plan, changes, facts), publisher):
        entries = [(commit_lsn, seq) for _, commit_lsn, seq in decoded.facts.unsent]
        with resolve_values(history, entries) as values:
            failpoint("fill.after_read")
            routed = decoded.route_changes(publisher, values.merge_into(decoded.changes))
            tables, policy = decoded.plan.routes.tables, decoded.plan.session.subscription.on_conflict
            net = fold_frame(routed.changes, decoded.facts, tables, decoded.plan.window, policy=policy)
            # A row that leaves again, or gets another value, does not need the unsent one.
            if is_last or values.unknown == 0 or not has_missing_values(net):
                _apply(decoded, net, routed, record, change_log, is_complete=values.unknown == 0)
                return


def _apply(
    decoded: _DecodedWindow,
    net: DataFrame,
    routed: Routed,
    record: RecordResult,
    change_log: ChangeLog,
    *,
    is_complete: bool,
) -> None:
    """Apply the net changes, with NULL for missing values where that is accepted."""
    plan, name = decoded.plan, decoded.plan.name
    accepted = _accepted(plan)
    nulls = UnsentNulls({}, {}, None, 0) if is_complete else unsent_nulls(net, plan.window, accepted)
    if nulls.unknown is not None:
        raise _lost_value_error(plan, nulls.unknown, nulls.more, change_log)

    def before_commit(connection: Connection, applied: Applied) -> None:
        null_acceptance.clear_null_acceptance(connection, name, plan.window.upto)
        record(plan, lambda: {**routed.counts.get, UNSENT_NULLS: nulls.count})(connection, applied)

    whole = with_nulls(net, plan.window, accepted)
    apply_window(whole, request_of(plan), decoded.facts.truncations, before_commit=before_commit)
    _log_nulls(plan, nulls)


def _accepted(plan: WindowPlan) -> dict[int, Lsn]:
    """By target, the commit up to which a row may enter with NULL for a lost value."""
    if plan.session.subscription.unchanged_toast is UnchangedToast.NATIVE:
        return {table.index: plan.window.upto for table in plan.routes.tables}
    accepted = null_acceptance.read_null_acceptance(plan.session.connection, plan.name)
    return {table.index: accepted[table.name] for table in plan.routes.tables if table.name in accepted}


def _log_nulls(plan: WindowPlan, nulls: UnsentNulls) -> None:
    tables = {table.index: table for table in plan.routes.tables}
    for target, count in nulls.values.items():
        keys = ", ".join(_key(tables[target], row) for row in nulls.rows[target])
        logger.warning(
            "subscription %s: table %s: %d NULL, as natively, for unsent values that neither the log nor"
            " the publisher has any more (R4.6); first rows: %s",
            *(plan.name, tables[target].name, count, keys),
        )


def _key(table: SubscribedTable, row: EnteredRow) -> str:
    if not table.is_keyed:
        return "without a key"
    shown = row.key[: len(table.identity)]
    return f"({', '.join(table.identity)})=({', '.join(map(str, shown))})"


def _lost_value_error(
    plan: WindowPlan, row: EnteredRow, more: int, change_log: ChangeLog
) -> UnchangedToastLost:
    table = next(table for table in plan.routes.tables if table.index == row.target)
    subscription, target = plan.session.subscription, table.name
    columns = [f'"{name}"' for name, kind in zip(table.columns, row.kinds, strict=True) if kind == "u"]
    suffix = f" There are {more} more such rows in this window." if more else ""
    table_option = f" --table {target}" if subscription.on_failure is FailurePolicy.TABLE else ""
    resume = f"cdc-replay resume {subscription.name}{table_option}"
    remedies = [
        f"store NULL as a native subscription does: `{resume} --accept-null`",
        f"leave the transaction out: `{resume} --skip {row.commit_lsn}`",
    ]
    if target in _published(subscription, change_log):
        remedies.append(f"copy the table again: `cdc-replay snapshot {subscription.name} --table {target}`")
    error = UnchangedToastLost(
        f'a row enters table "{target.schema}"."{target.name}" without a value of column'
        f" {', '.join(columns)}",
        detail=f"Key {_key(table, row)}, by the transaction that committed at {row.commit_lsn}. An UPDATE"
        " moved the row into the row filter of the publications, and a publisher does not send unchanged"
        " TOAST values. The change log does not have the value, and nothing proves that the publisher still"
        f" has the same row with the same value.{suffix}",
        hint=f"NULL is stored only if `unchanged_toast` is `native`. {_sentence(remedies)}",
        rule="R4.6",
        table=(target.schema, target.name),
    )
    error.commit_lsn = row.commit_lsn.value
    return error


def _sentence(remedies: Sequence[str]) -> str:
    text = "; ".join(remedies)
    return f"{text[0].upper()}{text[1:]}."


def _published(subscription: Subscription, change_log: ChangeLog) -> frozenset[QualifiedName]:
    """The tables that a snapshot can copy, by the log's last catalog."""
    catalog = catalog_history(change_log).at(change_log.end_lsn)
    try:
        return frozenset(table.table.name for table in synced_tables(catalog, subscription.publications))
    except PublicationRefused:
        return frozenset()


def _toast_sources(
    decoded: _DecodedWindow, publisher: PublisherAccess
) -> Iterator[tuple[_DecodedWindow, ChangeHistory, bool]]:
    """(window to apply, history of its unsent values, whether that is the last one)."""
    window, session = decoded.plan.window, decoded.changes.sparkSession
    sources = ToastSources(publisher.source.change_log, decoded.plan.routes, decoded.facts)
    yield decoded, sources.in_window(decoded.changes, window), False
    fence = publisher.fences.fence_for(window)
    yield decoded, sources.at_fence(session, fence, window.after), False
    if publisher.may_extend and fence.complete_upto > window.upto:
        decoded = _extend_window(decoded, publisher, fence.complete_upto)
        sources = ToastSources(publisher.source.change_log, decoded.plan.routes, decoded.facts)
        yield decoded, sources.at_fence(session, fence, window.after), False
    yield decoded, sources.at_fence_with_whole_log(session, fence, window.after), True


def _extend_window(decoded: _DecodedWindow, publisher: PublisherAccess, upto: Lsn) -> _DecodedWindow:
    """The same window, up to `upto`."""
    change_log = ChangeLog.open(publisher.source.change_log)
    content = functools.partial(read_content, change_log)
    plan = plan_window(change_log, content, decoded.plan.session, upto, may_be_cut=False)
    logger.warning(
        "subscription %s: window %s is extended to %s, because rows enter it with unsent values that"
        " have changed since",
        plan.name,
        decoded.plan.window,
        upto,
    )
    changes = decode_window(decoded.changes.sparkSession, change_log, plan.window)
    extended = _DecodedWindow(plan, changes, WindowFacts((), ()))
    return _DecodedWindow(plan, changes, scan_window(extended.route_changes(publisher).changes))
