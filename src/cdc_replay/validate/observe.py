"""Compare the selected tables at the fence, in steps, until all are compared or the budget is used up."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cdc_replay.compare.comparison import Comparison, NotCompared, compare_table, join_comparisons
from cdc_replay.compare.fence import ComparisonFence
from cdc_replay.compare.table_size import read_table_size
from cdc_replay.model.progress import Report, each_table
from cdc_replay.model.proof import Evidence
from cdc_replay.validate.selection import Budget, ChosenTable, LeftTable, Selection
from cdc_replay.validate.suites import ObservedTable
from cdc_replay.validate.verdict import LeftReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Observation:
    """How a run compares: at the fence, which existed at the time `at`; per table, the listed keys."""

    subscription: str
    fence: ComparisonFence
    at: dt.datetime
    listed_keys: int
    with_values: bool
    report: Report


def observe_tables(
    observation: Observation, selection: Selection
) -> tuple[tuple[ObservedTable, ...], tuple[LeftTable, ...]]:
    """The compared tables, and those of which nothing was: chosen, but not reached, ones too.

    Raises:
        ServerUnavailable: if a server is lost.
    """
    budget = Budget(selection.max_seconds, selection.max_bytes)
    observed, not_reached = list[ObservedTable](), list[LeftTable]()
    tables = each_table(
        observation.report,
        "compare",
        observation.subscription,
        selection.chosen,
        lambda table: table.name,
    )
    for position, table in enumerate(tables, start=1):
        if budget.is_used_up and observed:
            not_reached.append(LeftTable(table.name, LeftReason.NOT_REACHED, table.proof, table.plan))
            continue
        observed.append(_observe(observation, table, budget))
        logger.info("compared %s (%d of %d)", table.name, position, len(selection.chosen))
    return tuple(observed), (*not_reached, *selection.left)


def _observe(observation: Observation, table: ChosenTable, budget: Budget) -> ObservedTable:
    began = time.monotonic()
    size = read_table_size(observation.fence.publisher, table.validated.table.table)
    steps = table.steps(size, has_budget=budget.is_limited)
    compared, read_bytes = _compare_step(observation, table, steps[0], size)
    budget.used_bytes += read_bytes
    for step in steps[1:]:
        if budget.is_used_up or isinstance(compared, NotCompared):
            break
        following, step_bytes = _compare_step(observation, table, step, size)
        read_bytes += step_bytes
        budget.used_bytes += step_bytes
        compared = (
            join_comparisons(compared, following) if not isinstance(following, NotCompared) else following
        )
    evidence = None if isinstance(compared, NotCompared) else _evidence(observation, table, compared)
    return ObservedTable(
        table.validated,
        compared,
        chosen_buckets=len(table.buckets),
        bytes=read_bytes,
        seconds=time.monotonic() - began,
        evidence=evidence,
        proof_before=table.proof,
        max_proof_age=table.plan.max_proof_age,
    )


def _compare_step(
    observation: Observation, table: ChosenTable, buckets: Sequence[int], table_bytes: int
) -> tuple[Comparison | NotCompared, int]:
    """The comparison, and the bytes of the publisher's table that it read: again for rows that it lists."""
    compared = compare_table(
        observation.fence,
        table.validated,
        observation.listed_keys,
        with_values=observation.with_values,
        chosen=buckets,
    )
    if isinstance(compared, NotCompared):
        return compared, 0
    is_listed = any(not bucket.is_equal for bucket in compared.buckets)
    return compared, table_bytes * (2 if is_listed else 1)


def _evidence(observation: Observation, table: ChosenTable, compared: Comparison) -> Evidence:
    return Evidence(
        definition=compared.definition,
        turn=table.proof.next_turn,
        lsn=observation.fence.lsn,
        at=observation.at,
        compared=compared.chosen,
        # Of a table that need not mirror the publisher nothing is claimed that could differ.
        differing=compared.differing if table.validated.full else frozenset(),
        owed=len(table.buckets) - len(compared.chosen),
    )
