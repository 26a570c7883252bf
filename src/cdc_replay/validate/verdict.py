"""Results of a validation: plain values, without Great Expectations.

A table is judged by checks. For a table that the subscriber must mirror, a check that fails or raises fails
the validation. If the publications do not publish all actions, the same checks are made and shown for
information: native replication may differ in the same way.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from cdc_replay.compare.difference import Difference, DifferenceKind
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName


class CheckKind(enum.Enum):
    """A check of one table; the value is its label."""

    ROW_COUNT = "row count"
    CONTENT = "content"
    UNIQUE_KEY = "unique key"
    ROW_FILTER = "row filter"


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
    None if every row is published. Row counts are None if the table could not be read.
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
    filters: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    """The compared columns: those of the differences' values."""

    @property
    def success(self) -> bool:
        """Whether all checks pass."""
        return self.error is None and all(check.passes for check in self.checks)

    @property
    def differs(self) -> bool:
        """Whether rows differ, or the table could not be compared; it may still need not be a mirror."""
        return self.error is not None or bool(self.counts) or not self.success

    @property
    def can_be_repaired(self) -> bool:
        """Whether rows differ that the publications determine."""
        return self.full and self.error is None and not self.success


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

    @property
    def success(self) -> bool:
        """Whether the subscriber is consistent with the publisher."""
        return self.error is None and all(table.success for table in self.tables)

    def left_by_repair(self) -> tuple[str, ...]:
        """The tables that differ and that no repair changes, each with the reason."""
        return tuple(
            f"{table.name}: {table.error or '; '.join(table.notes)}"
            for table in self.tables
            if table.differs and not table.can_be_repaired
        )

    def describe_failures(self, limit: int = 10) -> tuple[str, ...]:
        """One line per failed table: the checks, and the first keys."""
        lines = [] if self.error is None else [self.error]
        lines += [_describe(table) for table in self.tables if not table.success]
        return (*lines[:limit], *([f"… and {len(lines) - limit} more"] if len(lines) > limit else []))


def _describe(table: TableVerdict) -> str:
    if table.error is not None:
        return f"{table.name}: {table.error}"
    failed = "; ".join(
        f"{check.kind.value}: {check.error or check.observed}" for check in table.checks if not check.passes
    )
    keys = ", ".join(f"{difference.kind.value} {difference.key}" for difference in table.differences[:3])
    return f"{table.name}: {failed}" + (f" (first: {keys})" if keys else "")
