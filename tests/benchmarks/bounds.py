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
    """The most that the `figure` of a run may be; of workloads whose name matches, at their full size.

    `floor`: a run of the same steps without us. Where there is one, and its figure exceeds the limit, the
    limit is `FLOOR_SHARE` of it.
    `is_always_judged`: whatever the size.
    """

    workloads: str
    what: str
    run: str
    figure: Callable[[Measured, str], float]
    limit: float
    floor: str | None = None
    is_always_judged: bool = False

    def applies_to(self, measured: Measured, size: int) -> bool:
        """Whether that measurement is judged by this."""
        is_full = self.is_always_judged or size >= WORKLOADS[measured.workload].size
        return is_full and fnmatchcase(measured.workload, self.workloads)

    def judge(self, measured: Measured) -> Verdict:
        """Judge a measurement that it applies to."""
        figure, limit, floor = self.figure(measured, self.run), self.limit, None
        if self.floor is not None and self.floor in measured.runs:
            floor = self.figure(measured, self.floor)
            limit = FLOOR_SHARE * floor if floor > limit else limit
        return Verdict(measured.workload, self.what, round(figure, 3), round(limit, 3), floor)


@dataclass(frozen=True)
class Verdict:
    """A bound that was judged."""

    workload: str
    what: str
    figure: float
    limit: float
    floor: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the figure is within it."""
        return self.figure <= self.limit


def to_native(measured: Measured, run: str) -> float:
    """A run's time as a multiple of the native one."""
    return measured.runs[run] / measured.runs["native"]


def seconds(measured: Measured, run: str) -> float:
    """A run's time."""
    return measured.runs[run]


def memory_gib(measured: Measured, run: str) -> float:
    """The peak of driver, JVM and workers."""
    return measured.peaks[run].ours / MIB_PER_GIB


def to_reader(measured: Measured, run: str) -> float:
    """A run's time as a multiple of native replication's, or of the slot's decoding time if that is more.

    Native replication is faster than that where it decodes less.
    """
    return measured.runs[run] / _reader_seconds(measured)


def to_reader_after_start(measured: Measured, run: str) -> float:
    """The same, of a run without what its start may take."""
    return (measured.runs[run] - START_SECONDS) / _reader_seconds(measured)


def _reader_seconds(measured: Measured) -> float:
    return max(measured.runs["native"], SLOT_SHARE * measured.runs["pg_recvlogical"])


def to_slot(measured: Measured, run: str) -> float:
    """A run's time as a multiple of the slot's decoding time."""
    return measured.runs[run] / measured.runs["pg_recvlogical"]


SLOT_SHARE: Final = 1.15
START_SECONDS: Final = 4.0
FLOOR_SHARE: Final = 1.5

SINGLE_SUBSCRIPTIONS: Final = (
    "churn", "distinct_keys", "wide_rows", "many_tables", "flights*", "large_transactions", "single_pull_*",
    "selective", "one_key",
)  # fmt: skip
"""Workloads of 300,000 changes and more, for one subscription."""

WARM: Final = "warm / native"
WARM_READER: Final = "warm / max(native, 1.15 recvlogical)"
COLD_READER: Final = "(cold - 4 s) / max(native, 1.15 recvlogical)"

BOUNDS: Final[Sequence[Bound]] = (
    *(Bound(name, WARM_READER, "warm", to_reader, 1.0, floor="floor") for name in SINGLE_SUBSCRIPTIONS),
    *(
        Bound(name, COLD_READER, "cold", to_reader_after_start, 1.0, floor="cold floor")
        for name in SINGLE_SUBSCRIPTIONS
    ),
    Bound("hot_keys", WARM, "warm", to_native, 0.6),
    Bound("small_transactions", WARM, "warm", to_native, 1.3),
    Bound("subscriptions_8", "warm / recvlogical", "warm", to_slot, 1.0),
    Bound("subscriptions_8_alike", WARM, "warm", to_native, 0.2),
    Bound("large_transactions_8", WARM, "warm", to_native, 0.4),
    Bound("copy_*", WARM, "warm", to_native, 1.0),
    Bound("empty_window", "warm, seconds", "warm", seconds, 0.3, is_always_judged=True),
    Bound("freshness", "follow, 95 % visible, seconds", "follow", seconds, 1.0),
    Bound("freshness", "Airflow with a warm Spark, 95 % visible, seconds", "airflow_warm", seconds, 8.0),
    Bound("freshness", "Airflow with spark-submit, 95 % visible, seconds", "airflow_submit", seconds, 20.0),
    Bound("backfill", "dry run, seconds", "dry_run", seconds, 10.0),
    Bound("backfill", "into the own subscriber, seconds", "warm", seconds, 10.0),
    Bound("subscriptions_200", "status, seconds", "status", seconds, 2.0, floor="floor"),
    Bound("subscriptions_200", "parsing of the slowest DAG file, seconds", "parse", seconds, 1.0),
    Bound("growth_1e7", "memory of cold, GiB", "cold", memory_gib, 3.0),
    Bound("growth_1e7", "memory of warm, GiB", "warm", memory_gib, 3.0),
)


def judged(measured: Measured, size: int) -> Iterator[Verdict]:
    """The bounds that apply to a measurement of `size` changes or rows."""
    for bound in BOUNDS:
        if bound.applies_to(measured, size):
            yield bound.judge(measured)
