"""The suite of a subscription, and the data frame that it judges.

| check      | Expectation                    | in the suite for                                |
|------------|--------------------------------|-------------------------------------------------|
| row count  | ExpectRowCountToEqualPublisher | every table                                     |
| content    | ExpectContentToEqualPublisher  | every table                                     |
| unique key | ExpectKeysToBeUnique           | tables with a key                               |
| row filter | ExpectRowsToSatisfyRowFilter   | tables whose filter the subscriber can evaluate |
| proof age  | ExpectProofToBeRecent          | tables with a bound, also if not compared       |

A run may compare a part of the tables, and of the rows of each; the suite is about that part. Expectations of
tables that the subscriber need not mirror have severity `info`, all others `critical`.

Great Expectations copies descriptions, keys and errors into its pages unescaped. Names, row filters and
values are user input, so all text is escaped once, here.
"""

from __future__ import annotations

import datetime as dt
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pandas as pd

from cdc_replay.compare.comparison import Comparison, NotCompared, ValidatedTable
from cdc_replay.compare.difference import DifferenceKind
from cdc_replay.model.duration import duration_in_words
from cdc_replay.model.proof import BUCKETS, Evidence, TableProof
from cdc_replay.model.relation import QualifiedName
from cdc_replay.validate.expectations import (
    SUMMARY,
    ComparisonExpectation,
    ExpectContentToEqualPublisher,
    ExpectKeysToBeUnique,
    ExpectRowCountToEqualPublisher,
    ExpectRowsToSatisfyRowFilter,
)
from cdc_replay.validate.gx import BatchExpectation, ExpectationSuite, FailureSeverity
from cdc_replay.validate.proof_expectation import PROOF, ExpectProofToBeRecent
from cdc_replay.validate.selection import LeftTable
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
    "proof_age",
)


@dataclass(frozen=True, slots=True)
class ObservedTable:
    """A table and its comparison, which read `bytes` of the publisher."""

    validated: ValidatedTable
    observed: Comparison | NotCompared
    chosen_buckets: int = BUCKETS
    bytes: int = 0
    seconds: float = 0.0
    evidence: Evidence | None = None
    proof_before: TableProof = field(default_factory=TableProof.nothing)
    max_proof_age: dt.timedelta | None = None

    @property
    def proof(self) -> TableProof:
        """The table's proof after this comparison."""
        return self.proof_before if self.evidence is None else self.proof_before.add(self.evidence)

    @property
    def relation(self) -> str:
        """The table's escaped name in the frame, the suite and the results."""
        return escaped(self.validated.table.table.name)

    def checks(self) -> tuple[CheckKind, ...]:
        """The applicable checks; a table that was not compared has two, which fail."""
        checks = [CheckKind.ROW_COUNT, CheckKind.CONTENT]
        if isinstance(self.observed, Comparison):
            if self.observed.duplicates is not None:
                checks.append(CheckKind.UNIQUE_KEY)
            if self.observed.outside is not None and self.observed.outside.unknown is None:
                checks.append(CheckKind.ROW_FILTER)
        return tuple(checks)


@dataclass(frozen=True, slots=True)
class BoundedProof:
    """The proof of a table, compared or not, and how old it may be."""

    relation: str
    proof: TableProof
    max_age: dt.timedelta

    def age(self, now: dt.datetime) -> float | None:
        """Seconds since the oldest part was proven."""
        proven = self.proof.summary.proven
        return None if proven is None else max(0.0, (now - proven.at).total_seconds())


def escaped(name: QualifiedName) -> str:
    """A table's name in the frame, the suite and the results."""
    return html.escape(str(name))


def bounded_proofs(tables: Iterable[ObservedTable], left: Iterable[LeftTable]) -> tuple[BoundedProof, ...]:
    """The proofs of all tables that have a bound."""
    compared = ((table.relation, table.proof, table.max_proof_age) for table in tables)
    others = ((escaped(table.name), table.proof, table.plan.max_proof_age) for table in left)
    return tuple(
        BoundedProof(relation, proof, max_age)
        for relation, proof, max_age in (*compared, *others)
        if max_age is not None
    )


def build_suite(
    name: str, tables: Sequence[ObservedTable], proofs: Sequence[BoundedProof] = ()
) -> ExpectationSuite:
    """The suite of a subscription."""
    expectations: list[BatchExpectation] = [
        _expectation(table, kind) for table in tables for kind in table.checks()
    ]
    expectations += [_proof_expectation(bounded) for bounded in proofs]
    return ExpectationSuite(name=name, expectations=expectations)


def _proof_expectation(bounded: BoundedProof) -> ExpectProofToBeRecent:
    seconds = bounded.max_age.total_seconds()
    # The relation is escaped already.
    return ExpectProofToBeRecent(
        relation=bounded.relation,
        max_age_seconds=seconds,
        description=f"{bounded.relation}: the proof is at most {duration_in_words(seconds)} old".replace(
            "$", "$$"
        ),
        severity=FailureSeverity.CRITICAL,
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
        case CheckKind.PROOF_AGE:
            return "its proof is young enough"


def comparison_frame(
    tables: Sequence[ObservedTable], proofs: Sequence[BoundedProof], now: dt.datetime
) -> pd.DataFrame:
    """The frame that `expectations` describes: per table its buckets, a summary row, and its proof's age."""
    rows: list[dict[str, object]] = [row for table in tables for row in _frame_rows(table)]
    rows += [
        {"relation": bounded.relation, "bucket": PROOF, "proof_age": bounded.age(now)} for bounded in proofs
    ]
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
