"""Our Expectations of each table of a subscription, judged by Great Expectations.

They read one data frame, the comparison of both sides at a fence (`suites.comparison_frame`). Great
Expectations runs no SQL: a row filter may contain `%`, which a query asset doubles. The frame has, per table,
one row per compared bucket and one summary row, and for `proof_expectation` one of its proof:

| column                                  | rows    |                                              |
|-----------------------------------------|---------|----------------------------------------------|
| relation, bucket                        | all     | the table's name; the bucket id or -1        |
| publisher_rows, subscriber_rows         | buckets | number of rows                               |
| publisher_digest, subscriber_digest     | buckets | sum of the rows' hashes                      |
| outside_filter                          | buckets | subscriber's rows outside the filter         |
| missing, unexpected, outside, different | summary | number of differing rows, by kind            |
| duplicates                              | summary | number of keys that occur more than once     |
| keys                                    | summary | JSON: the first keys of each kind, by name   |
| error                                   | summary | why the table could not be compared, or None |

For a table that could not be compared, the metric raises. Great Expectations records the exception, which the
report shows as an error, not as a difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from cdc_replay.compare.difference import DifferenceKind
from cdc_replay.model.count import count_in_words
from cdc_replay.validate.gx import BatchExpectation, PandasExecutionEngine, TableMetricProvider, metric_value
from cdc_replay.validate.verdict import CheckKind

if TYPE_CHECKING:
    import pandas as pd

METRIC: Final = "cdc_replay.table_comparison"

SUMMARY: Final = -1
"""The bucket id of a table's summary row."""

COUNTS: Final = ("missing", "unexpected", "outside", "different", "duplicates")
"""Columns of counts in the summary row."""

LISTED: Final = 20
"""Most keys in an Expectation's result."""


class TableNotCompared(Exception):
    """The table could not be compared, or is not in the frame."""


@dataclass(frozen=True, slots=True)
class TableComparison:
    """The totals of one table in the frame."""

    publisher_rows: int
    subscriber_rows: int
    unequal_buckets: int
    missing: int
    unexpected: int
    outside: int
    different: int
    duplicates: int
    outside_filter: int
    keys: dict[str, list[str]]


def table_comparison(frame: pd.DataFrame, relation: str) -> TableComparison:
    """Sum the rows of `relation` in the frame.

    Raises:
        TableNotCompared: if the frame has no summary of the table, or its `error` is set.
    """
    rows = frame[frame["relation"] == relation]
    summaries = rows[rows["bucket"] == SUMMARY].to_dict("records")
    if len(summaries) != 1:
        raise TableNotCompared(f"{relation} is not in the comparison")
    summary = summaries[0]
    if summary["error"] is not None:
        raise TableNotCompared(summary["error"])
    buckets = rows[rows["bucket"] >= 0]
    unequal = (buckets["publisher_rows"] != buckets["subscriber_rows"]) | (
        buckets["publisher_digest"] != buckets["subscriber_digest"]
    )
    counts = {name: int(summary[name]) for name in COUNTS}
    return TableComparison(
        publisher_rows=int(buckets["publisher_rows"].sum()),
        subscriber_rows=int(buckets["subscriber_rows"].sum()),
        unequal_buckets=int(unequal.sum()),
        outside_filter=int(buckets["outside_filter"].sum()),
        keys=json.loads(summary["keys"]),
        **counts,
    )


def of_frame(read: Callable[[pd.DataFrame, str], object]) -> Callable[..., object]:
    """The value of a metric of Great Expectations: what `read` finds in the frame about a table."""

    def evaluate(
        execution_engine: PandasExecutionEngine,
        metric_domain_kwargs: Mapping[str, object],
        metric_value_kwargs: Mapping[str, str],
        **_: object,
    ) -> object:
        frame, _, _ = execution_engine.get_compute_domain(metric_domain_kwargs, domain_type="table")
        return read(frame, metric_value_kwargs["relation"])

    return evaluate


class TableComparisonMetric(TableMetricProvider):  # type: ignore[misc] # no types for Great Expectations
    """`table_comparison` as the metric that all our Expectations read."""

    metric_name = METRIC
    value_keys = ("relation",)
    _pandas = metric_value(engine=PandasExecutionEngine)(of_frame(table_comparison))


@dataclass(frozen=True, slots=True)
class Judgement:
    """An Expectation's outcome: an observation, and the keys of `unexpected` among `rows` rows."""

    success: bool
    observed: str
    unexpected: int = 0
    rows: int = 0
    keys: tuple[str, ...] = ()

    def as_result(self) -> dict[str, Any]:
        """The result for Great Expectations; Data Docs show the keys as a table."""
        result: dict[str, Any] = {"observed_value": self.observed}
        if self.keys:
            result["element_count"] = self.rows
            result["unexpected_count"] = self.unexpected
            result["unexpected_percent"] = 100 * self.unexpected / max(self.rows, self.unexpected)
            result["partial_unexpected_list"] = list(self.keys[:LISTED])
        return {"success": self.success, "result": result}


class ComparisonExpectation(BatchExpectation):  # type: ignore[misc] # no types for Great Expectations
    """Base of our Expectations: `relation` is the table's name as in the frame."""

    relation: str

    metric_dependencies = (METRIC,)
    success_keys = ("relation",)
    args_keys = ("relation",)
    kind: ClassVar[CheckKind]

    def _validate(
        self,
        metrics: dict[str, TableComparison],
        runtime_configuration: object = None,
        execution_engine: object = None,
    ) -> dict[str, Any]:
        del runtime_configuration, execution_engine  # arguments of Great Expectations
        return self.judge(metrics[METRIC]).as_result()

    @classmethod
    def judge(cls, comparison: TableComparison) -> Judgement:
        """Whether the Expectation holds for one table."""
        raise NotImplementedError


class ExpectRowCountToEqualPublisher(ComparisonExpectation):
    """The subscriber has as many rows as the publisher has rows that pass the effective filter."""

    kind = CheckKind.ROW_COUNT

    @classmethod
    def judge(cls, comparison: TableComparison) -> Judgement:
        """Compare the sums over the buckets."""
        equal = comparison.publisher_rows == comparison.subscriber_rows
        return Judgement(
            equal, f"publisher {comparison.publisher_rows:,}, subscriber {comparison.subscriber_rows:,}"
        )


class ExpectContentToEqualPublisher(ComparisonExpectation):
    """Every bucket of keys has the publisher's rows: nothing missing, unexpected or different."""

    kind = CheckKind.CONTENT

    @classmethod
    def judge(cls, comparison: TableComparison) -> Judgement:
        """Compare digests; counts and keys explain unequal ones."""
        counts = {
            DifferenceKind.MISSING: comparison.missing,
            DifferenceKind.UNEXPECTED: comparison.unexpected,
            DifferenceKind.OUTSIDE_FILTER: comparison.outside,
            DifferenceKind.DIFFERENT: comparison.different,
        }
        observed = ", ".join(f"{count:,} {kind.value}" for kind, count in counts.items() if count)
        keys = [f"{kind.value}: {key}" for kind in counts for key in comparison.keys.get(kind.value, ())]
        return Judgement(
            success=comparison.unequal_buckets == 0,
            observed=observed or f"no difference in {count_in_words(comparison.publisher_rows, 'row')}",
            unexpected=sum(counts.values()),
            rows=max(comparison.publisher_rows, comparison.subscriber_rows),
            keys=tuple(keys),
        )


class ExpectKeysToBeUnique(ComparisonExpectation):
    """No key occurs more than once on the subscriber."""

    kind = CheckKind.UNIQUE_KEY

    @classmethod
    def judge(cls, comparison: TableComparison) -> Judgement:
        """Check the number of duplicate keys."""
        count = comparison.duplicates
        observed = count_in_words(count, "duplicate key") if count else "no duplicate key"
        keys = tuple(comparison.keys.get("duplicates", ()))
        return Judgement(count == 0, observed, count, comparison.subscriber_rows, keys)


class ExpectRowsToSatisfyRowFilter(ComparisonExpectation):
    """The effective filter is true for every row on the subscriber.

    Other rows remain from a changed filter (R9.12, R11.7), or are damage.
    """

    kind = CheckKind.ROW_FILTER

    @classmethod
    def judge(cls, comparison: TableComparison) -> Judgement:
        """Check the number of rows that the subscriber finds outside the filter."""
        count = comparison.outside_filter
        observed = (
            f"{count_in_words(count, 'row')} outside the present filter"
            if count
            else "all rows satisfy the filter"
        )
        keys = tuple(comparison.keys.get("outside_filter", ()))
        return Judgement(count == 0, observed, count, comparison.subscriber_rows, keys)
