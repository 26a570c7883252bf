"""Windows of several subscriptions, staged by one Spark job: who shares what, and whom a failure stops."""

from __future__ import annotations

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
from cdc_replay.spark.session import spark_session, tune_for

PlannedSession: TypeAlias = tuple[WindowPlan, ApplySession]


@dataclass(frozen=True, slots=True)
class StagedChanges:
    """What is staged for a subscription, by target, what is known of its window, and the routing's counts.

    Where the survey has unsent values (R4.6), nothing that is staged counts.
    """

    staged: Mapping[int, StagedTable]
    survey: WindowFacts
    counts: Mapping[str, int]


StagingResult: TypeAlias = StagedChanges | CdcReplayError
"""Or why nothing is staged for it."""


def request_of(plan: WindowPlan) -> ApplyRequest:
    """Where the plan's window goes."""
    session, tables = plan.session, plan.routes.tables
    return ApplyRequest(
        session.subscription, session.dsn, tables, plan.window.upto, contingent_changes, plan.relations
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
            spark = spark_session("cdc-replay")
            reader = log_reader(change_log, window, cores=spark.sparkContext.defaultParallelism)
            tune_for(spark, reader.rows)
    except SparkJobFailed as error:
        return {plan.name: error for plan in plans}
    return _staged(WindowJob(spark, reader, publisher_dsn), _alike(windows))


def _alike(windows: Sequence[PlannedSession]) -> list[list[PlannedSession]]:
    """The windows, those together that see the same changes and apply them alike."""
    found: list[list[PlannedSession]] = []
    for each in windows:
        like = next((lane for lane in found if _is_alike(lane[0], each)), None)
        if like is None:
            found.append([each])
        else:
            like.append(each)
    return found


def _is_alike(one: PlannedSession, other: PlannedSession) -> bool:
    (plan, window), (other_plan, other_window) = one, other
    mine, theirs = plan.session.subscription, other_plan.session.subscription
    options = mine.origin == theirs.origin and mine.on_conflict == theirs.on_conflict
    return options and plan.routes == other_plan.routes and _layouts(window) == _layouts(other_window)


def _layouts(window: ApplySession) -> list[bool]:
    """What may differ in staging tables of the same routes, besides names and types."""
    return [table.inserts_in_log_order for table in window.tables]


def _staged(flow: WindowJob, lanes: Sequence[Sequence[PlannedSession]]) -> dict[str, StagingResult]:
    names = [[plan.name for plan, _ in lane] for lane in lanes]
    try:
        with translated_spark_errors(f"replay of {', '.join(name for lane in names for name in lane)}"):
            results = flow.staged([_lane(lane) for lane in lanes])
    except CdcReplayError as error:
        if len(lanes) == 1:
            return dict.fromkeys(names[0], error)
        # Whose error it is shows when each is tried alone; what it stops is that one only.
        return {name: one for lane in lanes for name, one in _staged(flow, [lane]).items()}
    return {
        name: staged
        if isinstance(staged, CdcReplayError)
        else StagedChanges(staged, result.notes.window_facts(), result.notes.counts)
        for lane, result in zip(names, results, strict=True)
        for name, staged in zip(lane, result.staged, strict=True)
    }


def _lane(windows: Sequence[PlannedSession]) -> RoutingGroup:
    plan = windows[0][0]
    subscription = plan.session.subscription
    stagers = tuple(Stager.of(window.tables, each.session.dsn) for each, window in windows)
    return RoutingGroup(plan.routes, subscription.origin, subscription.on_conflict, stagers)
