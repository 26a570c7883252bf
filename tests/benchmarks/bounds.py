"""What the figures must not exceed, on two cores in one run.

A fresh process pays seconds for Spark's start. At five million changes that is part of what is judged;
smaller workloads are judged by the process that has its Spark already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from benchmarks.measures import Measured
from benchmarks.workloads import WORKLOADS

MIB_PER_GIB: Final = 1024


@dataclass(frozen=True)
class Bound:
    """The most that `figure` may be; of workloads whose name matches, at their full size.

    `is_always_judged`: whatever the size.
    """

    workloads: str
    what: str
    figure: Callable[[Measured], float]
    limit: float
    is_always_judged: bool = False

    def applies_to(self, measured: Measured, size: int) -> bool:
        """Whether that measurement is judged by this."""
        is_full = self.is_always_judged or size >= WORKLOADS[measured.workload].size
        return is_full and fnmatchcase(measured.workload, self.workloads)


@dataclass(frozen=True)
class Verdict:
    """A bound that was judged."""

    workload: str
    what: str
    figure: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the figure is within it."""
        return self.figure <= self.limit


def to_native(run: str) -> Callable[[Measured], float]:
    """A run's time as a multiple of the native one."""
    return lambda measured: measured.runs[run] / measured.runs["native"]


def seconds(run: str) -> Callable[[Measured], float]:
    """A run's time."""
    return lambda measured: measured.runs[run]


def memory_gib(run: str) -> Callable[[Measured], float]:
    """The peak of driver, JVM and workers."""
    return lambda measured: measured.peaks[run].ours / MIB_PER_GIB


COLD: Final = "cold / native"
WARM: Final = "warm / native"

BOUNDS: Final[Sequence[Bound]] = (
    Bound("churn", COLD, to_native("cold"), 1.3),
    Bound("distinct_keys", COLD, to_native("cold"), 1.3),
    Bound("wide_rows", COLD, to_native("cold"), 1.3),
    Bound("many_tables", COLD, to_native("cold"), 1.3),
    Bound("hot_keys", COLD, to_native("cold"), 1.0),
    Bound("small_transactions", WARM, to_native("warm"), 1.3),
    Bound("flights*", WARM, to_native("warm"), 1.3),
    Bound("subscriptions_8*", WARM, to_native("warm"), 0.2),
    Bound("copy_1", WARM, to_native("warm"), 1.0),
    Bound("copy_20", WARM, to_native("warm"), 1.1),
    Bound("empty_window", "warm, seconds", seconds("warm"), 1.0, is_always_judged=True),
    Bound("empty_window", "cold, seconds", seconds("cold"), 10.0, is_always_judged=True),
    Bound("growth_1e7", "memory of cold, GiB", memory_gib("cold"), 3.0),
    Bound("growth_1e7", "memory of warm, GiB", memory_gib("warm"), 3.0),
)


def judged(measured: Measured, size: int) -> Iterator[Verdict]:
    """The bounds that apply to a measurement of `size` changes or rows."""
    for bound in BOUNDS:
        if bound.applies_to(measured, size):
            yield Verdict(measured.workload, bound.what, round(bound.figure(measured), 3), bound.limit)
