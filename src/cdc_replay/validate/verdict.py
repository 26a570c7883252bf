"""Results of a validation: plain values, without Great Expectations.

A table is judged by checks. For a table that the subscriber must mirror, a check that fails fails the
validation. If the publications do not publish all actions, the same checks are made and shown for
information: native replication may differ in the same way.

| outcome         | a table                                                                                  |
|-----------------|------------------------------------------------------------------------------------------|
| NOT_CONSISTENT  | fails a check, or is missing on the subscriber                                           |
| ERROR           | could not be read, or a check of it raised: nothing is known of it. None differs         |
| TOO_OLD         | has an older proof than it may have. None differs, and there was no error                |
| CONSISTENT      | all that was compared holds                                                              |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdc_replay.compare.difference import Difference, DifferenceKind
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proof import BUCKETS, Evidence, TableProof
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import ValidationOutcome

FAILURES_DESCRIBED: Final = 10
"""Most failed tables in the error of a validation."""


class CheckKind(enum.Enum):
    """A check of one table; the value is its label."""

    ROW_COUNT = "row count"
    CONTENT = "content"
    UNIQUE_KEY = "unique key"
    ROW_FILTER = "row filter"
    PROOF_AGE = "age of the proof"


class LeftReason(enum.Enum):
    """Why nothing of a table was compared."""

    NOT_CHOSEN = "not chosen"
    NOT_DUE = "not due"
    NOT_REACHED = "not reached"
    """The budget was used up before."""


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check; `error` is set if it could not be made."""

    kind: CheckKind
    success: bool
    observed: str
    informational: bool = False
    error: str | None = None

    @property
    def passes(self) -> bool:
        """Whether the check does not fail the validation."""
        return self.success or self.informational


@dataclass(frozen=True, slots=True)
class TableVerdict:
    """The checks and differences of one table.

    `differences` are the first of each kind, `counts` the number of each kind, a lower bound unless
    `counts_exact`. `method` describes the comparison, `notes` its limits. `filters` are combined with OR;
    None if every row is published. Row counts are those of the compared buckets, None if the table could not
    be read. With an `error` nothing was compared; `is_broken` tells that from a table that is not there.
    """

    name: QualifiedName
    full: bool
    checks: tuple[Check, ...]
    method: str
    publisher_rows: int | None = None
    subscriber_rows: int | None = None
    counts: tuple[tuple[DifferenceKind, int], ...] = ()
    counts_exact: bool = True
    differences: tuple[Difference, ...] = ()
    duplicate_keys: tuple[str, ...] = ()
    outside_filter: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None
    is_broken: bool = False
    filters: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    """The compared columns: those of the differences' values."""
    chosen_buckets: int = BUCKETS
    compared_buckets: int = BUCKETS
    bytes: int = 0
    seconds: float = 0.0
    evidence: Evidence | None = None
    """What is proven and what differs; None after an error."""
    proof: TableProof | None = None
    """The table's, after this run."""

    @property
    def success(self) -> bool:
        """Whether all checks pass."""
        return self.error is None and all(check.passes for check in self.checks)

    @property
    def has_error(self) -> bool:
        """Whether the table, or a check of it, could not be judged."""
        return self.is_broken or any(check.error is not None for check in self.checks)

    def check_errors(self) -> tuple[str, ...]:
        """The checks that raised."""
        return tuple(f"{check.kind.value}: {check.error}" for check in self.checks if check.error is not None)

    @property
    def fails(self) -> bool:
        """Whether a check that was made does not pass, or the table is not there."""
        is_absent = self.error is not None and not self.is_broken
        return is_absent or any(
            not check.passes and check.error is None
            for check in self.checks
            if check.kind is not CheckKind.PROOF_AGE
        )

    @property
    def differs(self) -> bool:
        """Whether rows differ, or the table could not be compared; it may still need not be a mirror."""
        return self.error is not None or bool(self.counts) or self.fails or self.has_error

    @property
    def can_be_repaired(self) -> bool:
        """Whether rows differ that the publications determine."""
        return self.full and self.error is None and self.fails

    @property
    def is_partial(self) -> bool:
        """Whether some of its rows were not compared."""
        return self.error is None and self.compared_buckets < BUCKETS

    @property
    def not_reached(self) -> int:
        """Buckets that were chosen, and not compared because the budget was used up."""
        return 0 if self.error is not None else self.chosen_buckets - self.compared_buckets


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A table of which nothing was compared, with its last proof; `age` judges that, if it has a bound."""

    name: QualifiedName
    reason: LeftReason
    proof: TableProof
    age: Check | None = None
    owed: int = 0
    """Buckets that the run had chosen."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a validation of one subscription at `lsn`.

    `report` is the page of this run, `data_docs` the index of the Data Docs. `error` is set if the validation
    itself failed.
    """

    subscription: str
    lsn: Lsn
    tables: tuple[TableVerdict, ...]
    data_docs: Path
    report: Path
    seconds: float
    error: str | None = None
    left_out: tuple[LeftOut, ...] = ()

    @property
    def success(self) -> bool:
        """Whether all that was compared is consistent, and every proof is as young as it must be."""
        return self.outcome is ValidationOutcome.CONSISTENT

    @property
    def outcome(self) -> ValidationOutcome:
        """The outcome of the run."""
        if self.error is not None or any(table.fails for table in self.tables):
            return ValidationOutcome.NOT_CONSISTENT
        if any(table.has_error for table in self.tables) or any(
            left.age is not None and left.age.error is not None for left in self.left_out
        ):
            return ValidationOutcome.ERROR
        if not all(table.success for table in self.tables) or any(
            left.age is not None and not left.age.passes for left in self.left_out
        ):
            return ValidationOutcome.TOO_OLD
        return ValidationOutcome.CONSISTENT

    @property
    def is_partial(self) -> bool:
        """Whether some tables, or some rows of them, were not compared."""
        return bool(self.left_out) or any(table.is_partial for table in self.tables)

    def left_by_repair(self) -> tuple[str, ...]:
        """The tables that differ and that no repair changes, each with the reason."""
        return tuple(
            f"{table.name}: {table.error or '; '.join(table.notes) or '; '.join(table.check_errors())}"
            for table in self.tables
            if table.differs and not table.can_be_repaired
        )

    def describe_failures(self) -> tuple[str, ...]:
        """One line per failed table: the checks, and the first keys."""
        lines = [] if self.error is None else [self.error]
        lines += [_describe(table) for table in self.tables if not table.success]
        lines += [
            f"{left.name}: {left.age.kind.value}: {left.age.error or left.age.observed} ({left.reason.value})"
            for left in self.left_out
            if left.age is not None and not left.age.passes
        ]
        more = len(lines) - FAILURES_DESCRIBED
        return (*lines[:FAILURES_DESCRIBED], *([f"… and {more} more"] if more > 0 else []))

    def describe_not_reached(self) -> tuple[str, ...]:
        """The tables, or parts of them, for which the budget was not enough."""
        parts = [
            f"{table.name}: {table.not_reached} of {table.chosen_buckets} chosen buckets"
            for table in self.tables
            if table.not_reached
        ]
        return (
            *parts,
            *(str(left.name) for left in self.left_out if left.reason is LeftReason.NOT_REACHED),
        )


def _describe(table: TableVerdict) -> str:
    if table.error is not None:
        return f"{table.name}: {table.error}"
    failed = "; ".join(
        f"{check.kind.value}: {f'error: {check.error}' if check.error is not None else check.observed}"
        for check in table.checks
        if not check.passes
    )
    keys = ", ".join(f"{difference.kind.value} {difference.key}" for difference in table.differences[:3])
    return f"{table.name}: {failed}" + (f" (first: {keys})" if keys else "")
