"""Which tables and buckets a run compares, in which order, and when its budget is used up.

| run              | tables                           | rows of each                               |
|------------------|----------------------------------|--------------------------------------------|
| by default       | all                              | all                                        |
| with tables      | these                            | all                                        |
| with a sample    | all, or these                    | the buckets that were compared longest ago |
| what is due      | those whose interval has passed, | as planned for the table; only the owed    |
|                  | or that are owed buckets         | ones, if its interval has not passed       |

With a budget, tables that are owed buckets come first, then those that were compared longest ago. A table is
compared in steps, each of which reads it once; the budget is looked at before each step but the first of the
run, which always makes some progress. What was not reached is owed to the next run.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.compare.comparison import ValidatedTable
from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.proof import BUCKETS, TableProof, buckets_of_share
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.suggestion import did_you_mean
from cdc_replay.model.validation_scope import TablePlan, ValidationPlan, ValidationScope
from cdc_replay.validate.verdict import LeftReason

STEP_BYTES: Final = 256 << 20
MOST_STEPS: Final = 8
"""Each step of a table reads all of it, so that both servers find the rows of some buckets."""


@dataclass(frozen=True, slots=True)
class ChosenTable:
    """A table to compare: these buckets, the first to compare first; its proof so far, and its plan."""

    validated: ValidatedTable
    buckets: tuple[int, ...] = tuple(range(BUCKETS))
    proof: TableProof = field(default_factory=TableProof.nothing)
    plan: TablePlan = field(default_factory=TablePlan)

    @property
    def name(self) -> QualifiedName:
        """The table's."""
        return self.validated.table.table.name

    def steps(self, table_bytes: int, *, has_budget: bool) -> tuple[tuple[int, ...], ...]:
        """The buckets in steps, between which a budget can end the run."""
        count = max(1, min(MOST_STEPS, table_bytes // STEP_BYTES, len(self.buckets))) if has_budget else 1
        size = -(-len(self.buckets) // count)
        return tuple(self.buckets[start : start + size] for start in range(0, len(self.buckets), size))


@dataclass(frozen=True, slots=True)
class LeftTable:
    """A table of which nothing is compared, and why."""

    name: QualifiedName
    reason: LeftReason
    proof: TableProof
    plan: TablePlan


@dataclass(frozen=True, slots=True)
class Selection:
    """The tables of a run; `unknown` names are configured, but no tables of the subscription."""

    chosen: tuple[ChosenTable, ...]
    left: tuple[LeftTable, ...] = ()
    max_seconds: float | None = None
    max_bytes: int | None = None
    unknown: tuple[str, ...] = ()

    def again(
        self, tables: Iterable[ValidatedTable], proofs: Mapping[QualifiedName, TableProof]
    ) -> Selection:
        """The same buckets of the same tables once more, with the proofs of now, and without a budget."""
        present = {table.table.table.name: table for table in tables}
        chosen = tuple(
            ChosenTable(present[table.name], table.buckets, proofs.get(table.name, table.proof), table.plan)
            for table in self.chosen
            if table.name in present
        )
        left = tuple(
            LeftTable(table.name, table.reason, proofs.get(table.name, table.proof), table.plan)
            for table in self.left
        )
        return Selection(chosen, left, unknown=self.unknown)


@dataclass(slots=True)
class Budget:
    """What a run may use, and has used since it was made."""

    max_seconds: float | None = None
    max_bytes: int | None = None
    used_bytes: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def is_limited(self) -> bool:
        """Whether there is a bound at all."""
        return self.max_seconds is not None or self.max_bytes is not None

    @property
    def is_used_up(self) -> bool:
        """Whether no further step may begin."""
        seconds = time.monotonic() - self.began
        return (self.max_seconds is not None and seconds >= self.max_seconds) or (
            self.max_bytes is not None and self.used_bytes >= self.max_bytes
        )


def select_tables(
    tables: Sequence[ValidatedTable],
    proofs: Mapping[QualifiedName, TableProof],
    plan: ValidationPlan,
    scope: ValidationScope,
    now: dt.datetime,
) -> Selection:
    """What a run at `now` compares of the subscription's `tables`.

    Raises:
        InvalidConfiguration: if a chosen table is not among them.
    """
    names = [table.table.table.name for table in tables]
    wanted = frozenset(match_tables(scope.tables, names) if scope.tables else names)
    chosen, left = list[ChosenTable](), list[LeftTable]()
    for table in tables:
        name = table.table.table.name
        proof, table_plan = proofs.get(name, TableProof.nothing()), plan.of_table(name)
        if name not in wanted:
            left.append(LeftTable(name, LeftReason.NOT_CHOSEN, proof, table_plan))
        elif count := _bucket_count(proof, table_plan, scope, now):
            chosen.append(ChosenTable(table, proof.choose(count), proof, table_plan))
        else:
            left.append(LeftTable(name, LeftReason.NOT_DUE, proof, table_plan))
    max_seconds, max_bytes = scope.max_seconds, scope.max_bytes
    if scope.is_due and max_seconds is None and max_bytes is None:
        max_seconds, max_bytes = plan.max_seconds, plan.max_bytes
    if max_seconds is not None or max_bytes is not None:
        chosen.sort(key=_waits)
    known = {str(name) for name in names}
    unknown = tuple(name for name in plan.tables if name not in known)
    return Selection(tuple(chosen), tuple(left), max_seconds, max_bytes, unknown)


def match_tables(texts: Iterable[str], names: Iterable[QualifiedName]) -> tuple[QualifiedName, ...]:
    """The tables that are meant: each text is SCHEMA.TABLE, or a list of them with commas.

    A text that is a table's name as a whole means that table, also if it has commas or further dots.

    Raises:
        InvalidConfiguration: naming the first that is none of `names`.
    """
    by_text: dict[str, list[QualifiedName]] = {}
    for name in names:
        by_text.setdefault(str(name), []).append(name)
    matched = dict[QualifiedName, None]()
    for text in texts:
        for part in [text] if text in by_text else [part.strip() for part in text.split(",")]:
            if part not in by_text:
                QualifiedName.parse(part)
                raise InvalidConfiguration(
                    f'"{part}" is not a published table of the subscription',
                    detail=f"It has: {', '.join(sorted(by_text)) or 'none'}.",
                    hint=did_you_mean(part, by_text),
                )
            matched.update(dict.fromkeys(by_text[part]))
    return tuple(matched)


def _bucket_count(proof: TableProof, plan: TablePlan, scope: ValidationScope, now: dt.datetime) -> int:
    """How many buckets of a table the run compares; 0 if the table is not due."""
    share = 1.0 if scope.sample is None else scope.sample
    if not scope.is_due:
        return buckets_of_share(share)
    if not plan.is_due(proof.summary.last_compared, now):
        return proof.owed
    planned = plan.sample if scope.sample is None else scope.sample
    return max(proof.owed, buckets_of_share(planned))


def _waits(table: ChosenTable) -> tuple[bool, dt.datetime]:
    never = dt.datetime.min.replace(tzinfo=dt.UTC)
    return table.proof.owed == 0, table.proof.summary.last_compared or never
