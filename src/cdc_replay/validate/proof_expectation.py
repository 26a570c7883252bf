"""The Expectation of a maximum age of a table's proof, also of one that the run did not compare.

It fails by itself when the table is never reached, not due for too long, or differs: none of these makes a
younger proof. The comparison frame (`suites.comparison_frame`) has one row for each table with a bound: its
`bucket` is `PROOF`, and `proof_age` the seconds since the fence of the oldest part, None without a proof.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from cdc_replay.model.duration import duration_in_words
from cdc_replay.validate.expectations import Judgement, TableNotCompared, of_frame
from cdc_replay.validate.gx import BatchExpectation, PandasExecutionEngine, TableMetricProvider, metric_value
from cdc_replay.validate.verdict import CheckKind

if TYPE_CHECKING:
    import pandas as pd

METRIC: Final = "cdc_replay.table_proof_age"

PROOF: Final = -2
"""The bucket id of the row with a table's proof."""

NEVER: Final = math.inf
"""The age of a proof that does not exist."""


def proof_age(frame: pd.DataFrame, relation: str) -> float:
    """The age of the proof of `relation` in seconds, `NEVER` without one.

    Raises:
        TableNotCompared: if the frame has no such row.
    """
    rows = frame[(frame["relation"] == relation) & (frame["bucket"] == PROOF)].to_dict("records")
    if len(rows) != 1:
        raise TableNotCompared(f"{relation} has no proof in the comparison")
    age = rows[0]["proof_age"]
    return NEVER if age is None else float(age)


def judge_age(age: float, max_age_seconds: float) -> Judgement:
    """Whether a proof of that age is young enough."""
    allowed = f"at most {duration_in_words(max_age_seconds)} are allowed"
    if age == NEVER:
        return Judgement(success=False, observed=f"there is no proof of all its rows, {allowed}")
    return Judgement(
        success=age <= max_age_seconds, observed=f"the proof is {duration_in_words(age)} old, {allowed}"
    )


class ProofAgeMetric(TableMetricProvider):  # type: ignore[misc] # no types for Great Expectations
    """`proof_age` as a metric."""

    metric_name = METRIC
    value_keys = ("relation",)
    _pandas = metric_value(engine=PandasExecutionEngine)(of_frame(proof_age))


class ExpectProofToBeRecent(BatchExpectation):  # type: ignore[misc] # no types for Great Expectations
    """All rows of the table were proven equal not longer than `max_age_seconds` ago."""

    relation: str
    max_age_seconds: float

    metric_dependencies = (METRIC,)
    success_keys = ("relation", "max_age_seconds")
    args_keys = ("relation", "max_age_seconds")
    kind = CheckKind.PROOF_AGE

    def _validate(
        self,
        metrics: dict[str, float],
        runtime_configuration: object = None,
        execution_engine: object = None,
    ) -> dict[str, Any]:
        del runtime_configuration, execution_engine  # arguments of Great Expectations
        return judge_age(metrics[METRIC], self.max_age_seconds).as_result()
