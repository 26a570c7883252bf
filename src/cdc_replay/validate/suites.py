"""The suite of a subscription, and the data frame that it judges.

| check      | Expectation                    | in the suite for                                |
|------------|--------------------------------|-------------------------------------------------|
| row count  | ExpectRowCountToEqualPublisher | every table                                     |
| content    | ExpectContentToEqualPublisher  | every table                                     |
| unique key | ExpectKeysToBeUnique           | tables with a key                               |
| row filter | ExpectRowsToSatisfyRowFilter   | tables whose filter the subscriber can evaluate |

Expectations of tables that the subscriber need not mirror have severity `info`, all others `critical`.

Great Expectations copies descriptions, keys and errors into its pages unescaped. Names, row filters and
values are user input, so all text is escaped once, here.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd

from cdc_replay.compare.comparison import Comparison, NotCompared, ValidatedTable
from cdc_replay.compare.difference import DifferenceKind
from cdc_replay.validate.expectations import (
    SUMMARY,
    ComparisonExpectation,
    ExpectContentToEqualPublisher,
    ExpectKeysToBeUnique,
    ExpectRowCountToEqualPublisher,
    ExpectRowsToSatisfyRowFilter,
)
from cdc_replay.validate.gx import ExpectationSuite, FailureSeverity
from cdc_replay.validate.verdict import CheckKind

EXPECTATIONS: Final[Mapping[CheckKind, type[ComparisonExpectation]]] = {
    expectation.kind: expectation
    for expectation in (
        ExpectRowCountToEqualPublisher,
        ExpectContentToEqualPublisher,
        ExpectKeysToBeUnique,
        ExpectRowsToSatisfyRowFilter,
    )
}
"""The Expectation of each check."""

COLUMNS: Final = (
    *("relation", "bucket", "publisher_rows", "subscriber_rows", "publisher_digest", "subscriber_digest"),
    *("outside_filter", "missing", "unexpected", "outside", "different", "duplicates", "keys", "error"),
)


@dataclass(frozen=True, slots=True)
class ObservedTable:
    """A table and its comparison."""

    validated: ValidatedTable
    observed: Comparison | NotCompared

    @property
    def relation(self) -> str:
        """The table's escaped name in the frame, the suite and the results."""
        return html.escape(str(self.validated.table.table.name))

    def checks(self) -> tuple[CheckKind, ...]:
        """The applicable checks; a table that was not compared has two, which fail."""
        checks = [CheckKind.ROW_COUNT, CheckKind.CONTENT]
        if isinstance(self.observed, Comparison):
            if self.observed.duplicates is not None:
                checks.append(CheckKind.UNIQUE_KEY)
            if self.observed.outside is not None and self.observed.outside.unknown is None:
                checks.append(CheckKind.ROW_FILTER)
        return tuple(checks)


def build_suite(name: str, tables: Sequence[ObservedTable]) -> ExpectationSuite:
    """The suite of a subscription."""
    return ExpectationSuite(
        name=name, expectations=[_expectation(table, kind) for table in tables for kind in table.checks()]
    )


def _expectation(table: ObservedTable, kind: CheckKind) -> ComparisonExpectation:
    full = table.validated.full
    return EXPECTATIONS[kind](
        relation=table.relation,
        description=_template_text(f"{table.validated.table.table.name}: {_describe(table.validated, kind)}"),
        notes=None if full else _template_text(table.validated.note),
        severity=FailureSeverity.CRITICAL if full else FailureSeverity.INFO,
    )


def _template_text(text: str) -> str:
    # Data Docs substitute $names.
    return html.escape(text).replace("$", "$$")


def _describe(validated: ValidatedTable, kind: CheckKind) -> str:
    match kind:
        case CheckKind.ROW_COUNT:
            return "the row count equals the publisher's"
        case CheckKind.CONTENT:
            return (
                "the content equals the publisher's" if validated.full else "the keys equal the publisher's"
            )
        case CheckKind.UNIQUE_KEY:
            return "no key occurs twice"
        case CheckKind.ROW_FILTER:
            filters = validated.table.filters or ()
            return "every row satisfies " + " or ".join(row_filter.sql for row_filter in filters)


def comparison_frame(tables: Sequence[ObservedTable]) -> pd.DataFrame:
    """The frame that `expectations` describes: per table its buckets and a summary row."""
    rows = [row for table in tables for row in _frame_rows(table)]
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)


def _frame_rows(table: ObservedTable) -> Iterator[dict[str, object]]:
    observed = table.observed
    if isinstance(observed, NotCompared):
        yield {"relation": table.relation, "bucket": SUMMARY, "error": html.escape(observed.reason)}
        return
    yield _summary(table.relation, observed)
    for bucket in observed.buckets:
        yield {
            "relation": table.relation,
            "bucket": bucket.bucket_id,
            "publisher_rows": bucket.publisher.rows,
            "subscriber_rows": bucket.subscriber.rows,
            "publisher_digest": bucket.publisher.text,
            "subscriber_digest": bucket.subscriber.text,
            "outside_filter": bucket.subscriber.outside_filter,
        }


def _summary(relation: str, observed: Comparison) -> dict[str, object]:
    counts = observed.differences.counts
    keys = {
        kind.value: _markup([difference.key for difference in kept])
        for kind, kept in observed.differences.kept.items()
        if kept
    }
    duplicates, outside = observed.duplicates, observed.outside
    return {
        "relation": relation,
        "bucket": SUMMARY,
        "missing": counts[DifferenceKind.MISSING],
        "unexpected": counts[DifferenceKind.UNEXPECTED],
        "outside": counts[DifferenceKind.OUTSIDE_FILTER],
        "different": counts[DifferenceKind.DIFFERENT],
        "duplicates": 0 if duplicates is None else duplicates.count,
        "keys": json.dumps(
            {
                **keys,
                "duplicates": [] if duplicates is None else _markup(duplicates.first),
                "outside_filter": [] if outside is None else _markup(outside.first),
            }
        ),
        "error": None,
    }


def _markup(keys: Iterable[str]) -> list[str]:
    return [html.escape(key) for key in keys]
