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

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import CdcReplayError, PublicationRefused, UnchangedToastLost
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import FailurePolicy, SubscribedTable, Subscription, UnchangedToast
from cdc_replay.postgres.connection import Connection
from cdc_replay.publication.resolve import synced_tables
from cdc_replay.replay.apply.session import Applied, ApplySession, BeforeCommit, open_apply_session
from cdc_replay.replay.compact import EnteredRow, MissingValues, NullRule, WindowFacts
from cdc_replay.replay.log_window import catalog_history
from cdc_replay.replay.publisher_fence import FenceProvider
from cdc_replay.replay.routing_groups import request_of, routing_group, window_job
from cdc_replay.replay.toast import ChangeHistory, resolve_values
from cdc_replay.replay.toast.sources import ToastSources
from cdc_replay.replay.window_job import RoutingGroup, StagedGroup, WindowJob
from cdc_replay.replay.window_plan import WindowPlan, plan_window, read_content
from cdc_replay.spark.session import spark_session
from cdc_replay.subscriber import null_acceptance

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
class _Window:
    """A window with unsent values, and the session that applies it."""

    plan: WindowPlan
    session: ApplySession
    facts: WindowFacts

    def stage(self, history: ChangeHistory, publisher: PublisherAccess) -> tuple[StagedGroup, int]:
        """What is staged with the values of the history, and the number of values that it does not have."""
        plan = self.plan
        job = window_job(ChangeLog.open(publisher.source.change_log), plan.window, publisher.source.dsn)
        group = routing_group([(plan, self.session)])
        nulls = NullRule(plan.window, self.facts.unsent_targets, _accepted(plan))
        return stage_with_values(job, group, self.facts, history, nulls)

    def sources(self, publisher: PublisherAccess) -> ToastSources:
        """The histories that may have the values."""
        spark = spark_session("cdc-replay")
        return ToastSources(spark, publisher.source.change_log, self.plan.routes, self.facts)


def stage_with_values(
    job: WindowJob, group: RoutingGroup, facts: WindowFacts, history: ChangeHistory, nulls: NullRule
) -> tuple[StagedGroup, int]:
    """Stage the changes of a window with these facts, with the values that its history has.

    Returns what is staged, and the number of values that are unknown or given up.
    """
    entries = [(commit_lsn, seq) for _, commit_lsn, seq in facts.unsent]
    with resolve_values(history, entries) as values:
        failpoint("fill.after_read")
        completed = dataclasses.replace(job, entries=values.entries)
        (staged,) = completed.stage([dataclasses.replace(group, facts=facts, nulls=nulls)])
        return staged, values.unknown


def apply_with_toast(
    plan: WindowPlan,
    session: ApplySession,
    facts: WindowFacts,
    publisher: PublisherAccess,
    record: RecordResult,
) -> None:
    """Apply the window with the values of the first history that has all of them.

    Raises:
        UnchangedToastLost: if none has, and NULL is not accepted.
        CdcReplayError: as `ApplySession.apply`, and if there is no fence.
    """
    with contextlib.ExitStack() as resources:
        for window, history, is_last in _toast_sources(_Window(plan, session, facts), publisher, resources):
            staged, unknown = window.stage(history, publisher)
            # A row that leaves again, or gets another value, does not need the unsent one.
            if is_last or unknown == 0 or staged.facts.missing.rows == 0:
                _apply(window, staged, record, publisher)
                return


def _apply(window: _Window, staged: StagedGroup, record: RecordResult, publisher: PublisherAccess) -> None:
    """Apply the staged changes, with NULL for missing values where that is accepted."""
    plan, missing, (tables,) = window.plan, staged.facts.missing, staged.staged
    if missing.first_unknown:
        change_log = ChangeLog.open(publisher.source.change_log)
        raise _lost_value_error(plan, missing.first_unknown[0], missing.unknown - 1, change_log)
    if isinstance(tables, CdcReplayError):
        raise tables

    def before_commit(connection: Connection, applied: Applied) -> None:
        null_acceptance.clear_null_acceptance(connection, plan.name, plan.window.upto)
        counts = {**staged.facts.counts, UNSENT_NULLS: missing.nulls.total()}
        record(plan, lambda: counts)(connection, applied)

    failpoint("replay.after_staging")
    window.session.apply(tables, window.facts.truncations, before_commit=before_commit)
    _log_nulls(plan, missing)


def _accepted(plan: WindowPlan) -> dict[int, Lsn]:
    """By target, the commit up to which a row may enter with NULL for a lost value."""
    if plan.session.subscription.unchanged_toast is UnchangedToast.NATIVE:
        return {table.index: plan.window.upto for table in plan.routes.tables}
    accepted = null_acceptance.read_null_acceptance(plan.session.connection, plan.name)
    return {table.index: accepted[table.name] for table in plan.routes.tables if table.name in accepted}


def _log_nulls(plan: WindowPlan, missing: MissingValues) -> None:
    tables = {table.index: table for table in plan.routes.tables}
    for target, count in sorted((+missing.nulls).items()):
        keys = ", ".join(_key(tables[target], row) for row in missing.first[target])
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
    table_option = f" --table {target.argument}" if subscription.on_failure is FailurePolicy.TABLE else ""
    resume = f"cdc-replay resume {subscription.name}{table_option}"
    remedies = [
        f"store NULL as a native subscription does: `{resume} --accept-null`",
        f"leave the transaction out: `{resume} --skip {row.commit_lsn}`",
    ]
    if target in _published(subscription, change_log):
        remedies.append(
            f"copy the table again: `cdc-replay snapshot {subscription.name} --table {target.argument}`"
        )
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
    window: _Window, publisher: PublisherAccess, resources: contextlib.ExitStack
) -> Iterator[tuple[_Window, ChangeHistory, bool]]:
    """(window to apply, history of its unsent values, whether that is the last one)."""
    after, upto = window.plan.window.after, window.plan.window.upto
    sources = window.sources(publisher)
    yield window, sources.in_window(window.plan.window), False
    fence = publisher.fences.fence_for(window.plan.window)
    yield window, sources.at_fence(fence, after), False
    if publisher.may_extend and fence.complete_upto > upto:
        window = _extend_window(window, publisher, fence.complete_upto, resources)
        sources = window.sources(publisher)
        yield window, sources.at_fence(fence, after), False
    yield window, sources.at_fence_with_whole_log(fence, after), True


def _extend_window(
    window: _Window, publisher: PublisherAccess, upto: Lsn, resources: contextlib.ExitStack
) -> _Window:
    """The same window, up to `upto`."""
    change_log = ChangeLog.open(publisher.source.change_log)
    content = functools.partial(read_content, change_log)
    plan = plan_window(change_log, content, window.plan.session, upto, may_be_cut=False)
    logger.warning(
        "subscription %s: window %s is extended to %s, because rows enter it with unsent values that"
        " have changed since",
        plan.name,
        window.plan.window,
        upto,
    )
    session = resources.enter_context(open_apply_session(request_of(plan), previous=window.session))
    job = window_job(change_log, plan.window, publisher.source.dsn)
    (staged,) = job.stage([routing_group([(plan, session)])])
    return _Window(plan, session, staged.facts.window_facts())
