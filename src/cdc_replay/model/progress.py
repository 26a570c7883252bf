"""How far a stage is: what stages report while they work, and what is said of it.

A stage gets a `Report` like any other option and calls it between pieces of work, never per row. Each call
has the whole state of one item, so calls may be dropped, and may come from several threads.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from cdc_replay.model.count import count_in_words
from cdc_replay.model.duration import duration_in_words
from cdc_replay.model.size import size_in_words


class Unit(enum.Enum):
    """What is counted."""

    BYTES = "bytes"
    TABLES = "tables"
    TASKS = "tasks"
    TRANSACTIONS = "transactions"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class Progress:
    """One item of a stage: `done` of `total` units, and rows so far.

    `action` is a verb, `of` the table, subscription or publisher. `total` is None if it is not known; that of
    a copy is an estimate.
    """

    action: str
    of: str
    done: int
    total: int | None
    unit: Unit = Unit.BYTES
    rows: int | None = None
    current: str | None = None
    """What is worked on now."""

    @property
    def is_done(self) -> bool:
        """Nothing of the item is left."""
        return self.total is not None and self.done >= self.total


Report: TypeAlias = Callable[[Progress], None]


def unreported(_progress: Progress) -> None:
    """The report of a caller that shows nothing."""


_Table = TypeVar("_Table")


def each_table(
    report: Report, action: str, of: str, tables: Sequence[_Table], name: Callable[[_Table], object] = str
) -> Iterator[_Table]:
    """The tables one by one; each is reported when its turn comes."""
    for done, table in enumerate(tables):
        report(Progress(action, of, done, len(tables), Unit.TABLES, current=str(name(table))))
        yield table
    report(Progress(action, of, len(tables), len(tables), Unit.TABLES))


@dataclass(frozen=True, slots=True)
class Pace:
    """The first report of an item, from which its rate is told; `began` in seconds."""

    began: float
    done: int

    def describe(self, progress: Progress, now: float) -> str:
        """Counts, rate and time left, such as `190,234 rows, 24 MB of 42 MB, 3 MB/s, 6 s left`."""
        seconds, done = now - self.began, progress.done - self.done
        rate = done / seconds if seconds > 0 else 0.0
        parts = [] if progress.rows is None else [count_in_words(progress.rows, "row")]
        parts.append(_amounts(progress))
        if progress.current is not None:
            parts.append(progress.current)
        if progress.unit is Unit.BYTES and rate >= 1:
            parts.append(f"{size_in_words(round(rate))}/s")
        # Tables differ in size: those that are done say nothing about the others.
        is_even = progress.unit is not Unit.TABLES
        if is_even and progress.total is not None and rate > 0 and not progress.is_done:
            parts.append(f"{duration_in_words((progress.total - progress.done) / rate)} left")
        return ", ".join(parts)


def _amounts(progress: Progress) -> str:
    if progress.unit is Unit.BYTES:
        done = size_in_words(progress.done)
        return done if progress.total is None else f"{done} of {size_in_words(progress.total)}"
    noun = progress.unit.value.removesuffix("s")
    if progress.total is None:
        return count_in_words(progress.done, noun)
    return f"{progress.done:,} of {count_in_words(progress.total, noun)}"
