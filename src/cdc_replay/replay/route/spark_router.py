"""CHANGES → ROUTED, as frames.

`replay.route.router` says what becomes of a change. Here the batches of a frame go through it on the
executors, with Spark's answers to row filters beside them. The counts of a batch travel as a row of their
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from cdc_replay.arrow.arrays import is_valid
from cdc_replay.model.frames import CHANGES, ROUTED
from cdc_replay.model.subscription import OriginPolicy
from cdc_replay.replay.route.filter_evaluation import (
    FilterEvaluator,
    RouteFilters,
    SparkFilterInput,
    SparkFilterPlan,
    SparkFilterResults,
)
from cdc_replay.replay.route.router import (
    FILTERED_OUT,
    ROUTED_SCHEMA,
    TO_DELETE,
    TO_INSERT,
    FilterResults,
    RouteIndex,
    Router,
)
from cdc_replay.replay.route.routes import Routes
from cdc_replay.replay.route.tuples import Tuples
from cdc_replay.spark.nullable_lists import map_in_arrow

_COUNTS: Final = (FILTERED_OUT, TO_INSERT, TO_DELETE)
_COUNTED: Final = pa.schema([*ROUTED_SCHEMA, *((name, pa.int64()) for name in _COUNTS)])
_COUNTED_DDL: Final = ", ".join([ROUTED.ddl, *(f"{name} bigint" for name in _COUNTS)])
_ASKED_DDL: Final = (
    f"{CHANGES.ddl}, number int, place int, asked array<boolean>, old_read array<string>,"
    " new_read array<string>"
)


@dataclass(frozen=True, slots=True)
class Routed:
    """The frame, and its counts, which are there once an action has run on it.

    `counts` holds `filtered_out`, `updates_to_insert` and `updates_to_delete`.
    """

    changes: DataFrame
    counts: Observation


def route(changes: DataFrame, routes: Routes, *, origin: OriginPolicy, publisher_dsn: str) -> Routed:
    """What of `changes` (CHANGES) the subscription must see (ROUTED), in the published relations' columns.

    Args:
        changes: decoded changes of the window.
        routes: from `plan_routes`; must not be empty.
        origin: the subscription's option.
        publisher_dsn: where filters are evaluated that Spark cannot answer exactly.
    """
    filters, places = RouteFilters(routes), RouteIndex.of(routes.routes)
    questionnaire = SparkFilterPlan([filters], places)
    router = Router.of(routes, origin, places)
    work = _Work(places, router, questionnaire.inquiry(), filters.evaluator(), publisher_dsn)
    if work.evaluator.uses_spark:
        old, new = questionnaire.answers()
        asked = map_in_arrow(changes, work.ask, _ASKED_DDL)
        changes = asked.select(*CHANGES.names, "number", old.alias("old_passes"), new.alias("new_passes"))
    counts = Observation()
    found = map_in_arrow(changes, work.route, _COUNTED_DDL)
    found = found.observe(counts, *(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in _COUNTS))
    return Routed(found.where(F.col("kind").isNotNull()).select(*ROUTED.names), counts)


@dataclass(frozen=True, slots=True)
class _Work:
    """What the executors do with batches; picklable."""

    places: RouteIndex
    router: Router
    inquiry: SparkFilterInput
    evaluator: FilterEvaluator
    publisher_dsn: str

    def ask(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """CHANGES with the questions about them: the columns of QUESTIONS, NULL where nothing is asked."""
        for batch in batches:
            places = self.places.found(batch)
            asked = self.evaluator.asked(batch, self.router.routes_of(batch, places))
            questions = self.inquiry.questions(batch, Tuples.of(batch), places, [asked])
            rows = np.full(batch.num_rows, -1)
            rows[questions["number"].to_numpy()] = np.arange(questions.num_rows)
            spread = questions.drop_columns(["kind"]).take(pa.array(rows, mask=rows < 0))
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, *spread.columns], names=[*batch.schema.names, *spread.schema.names]
            )

    def route(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """ROUTED, with the counts of each batch in a row of their own, whose kind is NULL."""
        with self.evaluator.session(self.publisher_dsn) as session:
            for batch in batches:
                changes = batch.select(list(CHANGES.names))
                tuples, routes = (
                    Tuples.of(changes),
                    self.router.routes_of(changes, self.places.found(changes)),
                )
                verdicts = self.evaluator.verdicts(changes, tuples, routes, _answers(batch), session)
                routed, counts = self.router.routed(changes, tuples, routes, verdicts)
                nothing = [pa.nulls(routed.num_rows, pa.int64()) for _ in _COUNTS]
                yield pa.RecordBatch.from_arrays([*routed.columns, *nothing], schema=_COUNTED)
                yield pa.RecordBatch.from_pylist([dict(counts)], schema=_COUNTED)


def _answers(batch: pa.RecordBatch) -> FilterResults:
    """What Spark says of a batch, if it was asked; `number` is the row's."""
    if "number" not in batch.schema.names:
        return FilterResults.all_pass(batch.num_rows)
    rows = np.flatnonzero(is_valid(batch["number"]))
    answered = batch.select(["old_passes", "new_passes"]).take(pa.array(rows))
    found = pa.Table.from_batches([answered.append_column("number", pa.array(rows, pa.int32()))])
    return SparkFilterResults.of(found, 1).verdicts(0, batch.num_rows)
