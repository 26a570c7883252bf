"""Stages windows of several subscriptions by one Spark job: who shares work, and whom a failure stops."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.lsn import Window
from cdc_replay.replay.apply.session import ApplyRequest, ApplySession
from cdc_replay.replay.apply.staging import StagedTable, Stager
from cdc_replay.replay.compact import WindowFacts, contingent_changes
from cdc_replay.replay.log_window import log_reader
from cdc_replay.replay.window_job import RoutingGroup, WindowJob
from cdc_replay.replay.window_plan import WindowPlan
from cdc_replay.spark.errors import SparkJobFailed, translated_spark_errors
from cdc_replay.spark.progress import report_tasks
from cdc_replay.spark.session import count_cores, spark_session, tune_for

PlannedSession: TypeAlias = tuple[WindowPlan, ApplySession]


@dataclass(frozen=True, slots=True)
class StagedChanges:
    """What is staged for a subscription, by target, the facts of its window, and the counts of its routing.

    If the facts have unsent values (R4.6), what is staged does not count.
    """

    staged: Mapping[int, StagedTable]
    survey: WindowFacts
    counts: Mapping[str, int]


StagingResult: TypeAlias = StagedChanges | CdcReplayError
"""What is staged, or why nothing is."""


def request_of(plan: WindowPlan) -> ApplyRequest:
    """How the plan's window is applied."""
    session, tables = plan.session, plan.routes.tables
    return ApplyRequest(
        *(session.subscription, session.dsn, tables, plan.window.upto, contingent_changes),
        *(plan.relations, session.report),
    )


def stage_windows(
    change_log: ChangeLog, windows: Sequence[PlannedSession], publisher_dsn: str
) -> Mapping[str, StagingResult]:
    """Stage windows that end at one position; by subscription."""
    if not windows:
        return {}
    plans = [plan for plan, _ in windows]
    window = Window(min(plan.window.after for plan in plans), plans[0].window.upto)
    try:
        with translated_spark_errors(f"replay of {', '.join(plan.name for plan in plans)}"):
            job = window_job(change_log, window, publisher_dsn)
    except SparkJobFailed as error:
        return {plan.name: error for plan in plans}
    with report_tasks(plans[0].session.report, "read", f"window up to {window.upto}"):
        return _stage_groups(job, _group_by_routing(windows))


def window_job(change_log: ChangeLog, window: Window, publisher_dsn: str) -> WindowJob:
    """The job of a window of the log, with Spark tuned for it."""
    spark = spark_session("cdc-replay")
    reader = log_reader(change_log, window, cores=count_cores(spark))
    tune_for(spark, reader.rows, is_packed=True)
    return WindowJob(spark, reader, publisher_dsn)


def _group_by_routing(windows: Sequence[PlannedSession]) -> list[list[PlannedSession]]:
    """The windows, those together that see the same changes and apply them alike."""
    groups: list[list[PlannedSession]] = []
    for window in windows:
        same = next((group for group in groups if _share_routing(group[0], window)), None)
        if same is None:
            groups.append([window])
        else:
            same.append(window)
    return groups


def _share_routing(left: PlannedSession, right: PlannedSession) -> bool:
    (plan, session), (other_plan, other_session) = left, right
    subscription, other = plan.session.subscription, other_plan.session.subscription
    same_options = subscription.origin == other.origin and subscription.on_conflict == other.on_conflict
    same_layout = _staging_layout(session) == _staging_layout(other_session)
    return same_options and plan.routes == other_plan.routes and same_layout


def _staging_layout(session: ApplySession) -> list[bool]:
    """What can differ between staging tables of the same routes, apart from names and types."""
    return [table.inserts_in_log_order for table in session.tables]


def _stage_groups(job: WindowJob, groups: Sequence[Sequence[PlannedSession]]) -> dict[str, StagingResult]:
    names = [[plan.name for plan, _ in group] for group in groups]
    try:
        with translated_spark_errors(f"replay of {', '.join(itertools.chain.from_iterable(names))}"):
            results = job.stage([routing_group(group) for group in groups])
    except CdcReplayError as error:
        if len(groups) == 1:
            return dict.fromkeys(names[0], error)
        # Run alone, a group shows whether the error is its own; the error stops that group only.
        return {name: result for group in groups for name, result in _stage_groups(job, [group]).items()}
    return {
        name: staged
        if isinstance(staged, CdcReplayError)
        else StagedChanges(staged, result.facts.window_facts(), result.facts.counts)
        for group_names, result in zip(names, results, strict=True)
        for name, staged in zip(group_names, result.staged, strict=True)
    }


def routing_group(windows: Sequence[PlannedSession]) -> RoutingGroup:
    """Windows that see the same changes and apply them alike, as a group."""
    plan = windows[0][0]
    subscription = plan.session.subscription
    stagers = tuple(Stager.of(session.tables, window_plan.session.dsn) for window_plan, session in windows)
    return RoutingGroup(plan.routes, subscription.origin, subscription.on_conflict, stagers)
