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


def to_floor(run: str, *, start_seconds: float = 0.0) -> Callable[[Measured], float]:
    """A run's time, without that of a start, as a multiple of what no reader of the slot falls short of.

    That is native replication, or the slot's own decoding speed where native is faster: it decodes less.
    """

    def figure(measured: Measured) -> float:
        runs = measured.runs
        floor = max(runs["native"], SLOT_SHARE * runs["pg_recvlogical"])
        return (runs[run] - start_seconds) / floor

    return figure


def to_slot(run: str) -> Callable[[Measured], float]:
    """A run's time as a multiple of the slot's decoding time."""
    return lambda measured: measured.runs[run] / measured.runs["pg_recvlogical"]


SLOT_SHARE: Final = 1.15
START_SECONDS: Final = 4.0

SINGLE_SUBSCRIPTIONS: Final = (
    "churn", "distinct_keys", "wide_rows", "many_tables", "flights*", "large_transactions", "single_pull_*",
    "selective", "one_key",
)  # fmt: skip
"""Workloads of 300,000 changes and more, for one subscription."""

WARM: Final = "warm / native"
FLOOR: Final = "warm / max(native, 1.15 recvlogical)"
COLD_FLOOR: Final = "(cold - 4 s) / max(native, 1.15 recvlogical)"

BOUNDS: Final[Sequence[Bound]] = (
    *(Bound(name, FLOOR, to_floor("warm"), 1.0) for name in SINGLE_SUBSCRIPTIONS),
    *(
        Bound(name, COLD_FLOOR, to_floor("cold", start_seconds=START_SECONDS), 1.0)
        for name in SINGLE_SUBSCRIPTIONS
    ),
    Bound("hot_keys", WARM, to_native("warm"), 0.6),
    Bound("small_transactions", WARM, to_native("warm"), 1.3),
    Bound("subscriptions_8", "warm / recvlogical", to_slot("warm"), 1.0),
    Bound("subscriptions_8_alike", WARM, to_native("warm"), 0.2),
    Bound("large_transactions_8", WARM, to_native("warm"), 0.4),
    Bound("copy_*", WARM, to_native("warm"), 1.0),
    Bound("empty_window", "warm, seconds", seconds("warm"), 0.3, is_always_judged=True),
    Bound("freshness", "follow, 95 % visible, seconds", seconds("follow"), 1.0),
    Bound("freshness", "Airflow with a warm Spark, 95 % visible, seconds", seconds("airflow_warm"), 8.0),
    Bound("freshness", "Airflow with spark-submit, 95 % visible, seconds", seconds("airflow_submit"), 20.0),
    Bound("backfill", "dry run, seconds", seconds("dry_run"), 10.0),
    Bound("backfill", "into the own subscriber, seconds", seconds("warm"), 10.0),
    Bound("subscriptions_200", "status, seconds", seconds("status"), 2.0),
    Bound("subscriptions_200", "parsing of the slowest DAG file, seconds", seconds("parse"), 1.0),
    Bound("growth_1e7", "memory of cold, GiB", memory_gib("cold"), 3.0),
    Bound("growth_1e7", "memory of warm, GiB", memory_gib("warm"), 3.0),
)


def judged(measured: Measured, size: int) -> Iterator[Verdict]:
    """The bounds that apply to a measurement of `size` changes or rows."""
    for bound in BOUNDS:
        if bound.applies_to(measured, size):
            yield Verdict(measured.workload, bound.what, round(bound.figure(measured), 3), bound.limit)
