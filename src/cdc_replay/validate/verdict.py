"""What a validation finds: plain values, without Great Expectations.

A table is judged by checks. For a table that the subscriber must mirror, a check that fails or cannot be made
fails the validation. For one whose publications withhold actions, the same observations are made and shown,
but native replication would differ in the same way, so they decide nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from cdc_replay.compare.difference import Difference, DifferenceKind
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName


class CheckKind(enum.Enum):
    """What is checked of one table; the value is what people read."""

    ROW_COUNT = "row count"
    CONTENT = "content"
    UNIQUE_KEY = "unique key"
    ROW_FILTER = "row filter"


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check; `error` says why it could not be made."""

    kind: CheckKind
    success: bool
    observed: str
    informational: bool = False
    error: str | None = None

    @property
    def passes(self) -> bool:
        """Whether the verdict can still be success."""
        return self.success or self.informational


@dataclass(frozen=True, slots=True)
class TableVerdict:
    """What was found in one table.

    `differences` are the first of each kind, `counts` how many there are of each kind; where `counts_exact`
    is False there are more. `method` says how the content was compared, `notes` what limits the comparison.
    Row counts are None where the table could not be read.
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

    @property
    def success(self) -> bool:
        """Nothing was found that must not be."""
        return self.error is None and all(check.passes for check in self.checks)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a validation of one subscription at `lsn`.

    `report` is the page of this run, `data_docs` the index of the Data Docs. `error` is set where the
    validation itself failed, which is never a success.
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
        """The subscriber holds what it must."""
        return self.error is None and all(table.success for table in self.tables)

    def describe_failures(self, limit: int = 10) -> tuple[str, ...]:
        """One line per table that fails: what, and the first keys."""
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
