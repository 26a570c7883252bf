"""What is measured: every workload with the size at which its bounds are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from benchmarks.backlogs import (
    BACKLOGS,
    CHURN,
    FULL_ROWS,
    LARGE_TRANSACTIONS,
    SIX_COLUMNS,
    WIDE_TABLE,
    Backlog,
    Procedure,
    filled,
    numbered_tables,
    overlapping,
    shares,
    wide_rows,
)

MILLION: Final = 1_000_000
SMALLEST: Final = 1000
COPIED_TABLES: Final = 20
SMALL_TABLES: Final = 500
ONE: Final = (("p",),)


@dataclass(frozen=True)
class CatchUp:
    """A backlog that is drained; `shows_capture`: by `capture` alone too.

    `shows_floor`: what it costs to pass its bytes through the same steps, without us.
    """

    name: str
    about: str
    size: int
    backlog: Backlog
    subscriptions: tuple[tuple[str, ...], ...] = ONE
    shows_capture: bool = False
    shows_floor: bool = False


@dataclass(frozen=True)
class InitialCopy:
    """Tables that are copied; `shows_readers`: with more and more of them."""

    name: str
    about: str
    size: int
    tables: str
    table_names: tuple[str, ...]
    shows_readers: bool = False
    fill_table: Callable[[str, str], str] = filled
    subscriptions: tuple[tuple[str, ...], ...] = ONE

    @property
    def publisher_script(self) -> str:
        """Tables and publication."""
        return f"{self.tables}; create publication p for all tables"

    def fill(self, rows: int) -> tuple[str, ...]:
        """Statements that give the tables so many rows in all."""
        share = str(rows // len(self.table_names))
        return tuple(self.fill_table(table, share) for table in self.table_names)


@dataclass(frozen=True)
class EmptyWindow:
    """Nothing has happened since the last sync."""

    name: str
    about: str
    size: int
    backlog: Backlog
    subscriptions: tuple[tuple[str, ...], ...] = ONE


@dataclass(frozen=True)
class Freshness:
    """Commits that are to be seen soon; the size is for how many seconds."""

    name: str
    about: str
    size: int
    subscriptions: tuple[tuple[str, ...], ...] = ONE


@dataclass(frozen=True)
class Validation:
    """A table with equal rows on both sides is proven: all rows, and a sample of them."""

    name: str
    about: str
    size: int
    subscriptions: tuple[tuple[str, ...], ...] = ONE


@dataclass(frozen=True)
class Backfill:
    """A range of so many changes that a subscriber has applied is applied again, after a dry run."""

    name: str
    about: str
    size: int
    subscriptions: tuple[tuple[str, ...], ...] = ONE


@dataclass(frozen=True)
class ManySubscriptions:
    """`status` and the parsing of the DAGs; the size is the number of subscriptions."""

    name: str
    about: str
    size: int
    subscriptions: tuple[tuple[str, ...], ...] = ONE


Workload: TypeAlias = (
    CatchUp | InitialCopy | EmptyWindow | Freshness | Validation | Backfill | ManySubscriptions
)


def _churn_for(count: int) -> Backlog:
    return Procedure("churn", SIX_COLUMNS, shares(count), CHURN)


def _large_transactions_for(count: int) -> Backlog:
    return Procedure("large_transactions", SIX_COLUMNS, overlapping(count), LARGE_TRANSACTIONS)


def _filters(count: int) -> tuple[tuple[str, ...], ...]:
    return tuple((f"p_{number}",) for number in range(count))


_ALL: Final[tuple[Workload, ...]] = (
    CatchUp("churn", "inserts, filter-crossing updates, deletes", 5 * MILLION, BACKLOGS["churn"],
            shows_capture=True),
    CatchUp("hot_keys", "updates of a thousand rows", 5 * MILLION, BACKLOGS["hot_keys"]),
    CatchUp("distinct_keys", "every row changes once", 5 * MILLION, BACKLOGS["distinct_keys"]),
    CatchUp("wide_rows", "30 columns, 3 kB out of line", 5 * MILLION, BACKLOGS["wide_rows"]),
    CatchUp("many_tables", "200 tables", 5 * MILLION, BACKLOGS["many_tables"]),
    CatchUp("small_transactions", "inserts, each committed alone", 100_000, BACKLOGS["small_transactions"],
            shows_capture=True),
    CatchUp("large_transactions", "five transactions, 40 % of the rows", 1_800_000,
            BACKLOGS["large_transactions"], shows_capture=True),
    CatchUp("large_transactions_8", "five transactions, half of the rows for each", 450_000,
            _large_transactions_for(8), _filters(8)),
    CatchUp("single_pull_3e5", "churn", 300_000, BACKLOGS["churn"]),
    CatchUp("single_pull_1e6", "churn", MILLION, BACKLOGS["churn"]),
    CatchUp("single_pull_2e6", "churn", 2 * MILLION, BACKLOGS["churn"]),
    CatchUp("selective", "churn, one row of a hundred", MILLION, BACKLOGS["selective"], shows_floor=True),
    CatchUp("one_key", "updates of one row", MILLION, BACKLOGS["one_key"]),
    CatchUp("flights", "the demo's year, all of it", 1_500_000, BACKLOGS["flights"],
            (("analytics_flights", "analytics_weather"),)),
    CatchUp("flights_filtered", "the demo's year through two row filters", 1_500_000, BACKLOGS["flights"],
            (("late_flights", "one_airline"),), shows_floor=True),
    CatchUp("subscriptions_8", "each with a filter of its own", MILLION, _churn_for(8), _filters(8)),
    CatchUp("subscriptions_8_alike", "each to all rows", MILLION, BACKLOGS["churn"], ONE * 8),
    CatchUp("subscriptions_32", "each with a filter of its own", MILLION, _churn_for(32), _filters(32)),
    InitialCopy("copy_1", "one table", 5 * MILLION, SIX_COLUMNS, ("t",), shows_readers=True),
    InitialCopy("copy_20", "20 tables", 5 * MILLION, numbered_tables(COPIED_TABLES),
                tuple(f"t_{number}" for number in range(1, COPIED_TABLES + 1))),
    InitialCopy("copy_wide", "30 columns, 3 kB out of line", 500_000, WIDE_TABLE, ("t",),
                fill_table=wide_rows),
    InitialCopy("copy_many", "500 tables of a hundred rows", 50_000, numbered_tables(SMALL_TABLES),
                tuple(f"t_{number}" for number in range(1, SMALL_TABLES + 1))),
    EmptyWindow("empty_window", "nothing to do", 10_000, BACKLOGS["churn"]),
    Freshness("freshness", "50 commits a second, seconds from commit to visible", 120),
    Validation("validate_1e7", "a validation of one table, all rows and 5 %", 10 * MILLION),
    Backfill("backfill", "a range into the own subscriber", 9001),
    ManySubscriptions("subscriptions_200", "status, and parsing of the DAGs", 200),
    CatchUp("growth_1e5", "churn", 100_000, BACKLOGS["churn"]),
    CatchUp("growth_1e6", "churn", MILLION, BACKLOGS["churn"]),
    CatchUp("growth_1e7", "churn", 10 * MILLION, BACKLOGS["churn"]),
)  # fmt: skip

WORKLOADS: Final[Mapping[str, Workload]] = {workload.name: workload for workload in _ALL}

QUICK_SHARE: Final = 0.01
QUICK_LEAST: Final = 5
"""Seconds, or subscriptions."""


def size_of(workload: Workload, *, rows: int | None, is_quick: bool) -> int:
    """How many changes or rows; `rows` replaces the size of the large ones, a quick run has a hundredth."""
    if is_quick:
        smallest = QUICK_LEAST if isinstance(workload, Freshness | ManySubscriptions) else SMALLEST
        return max(smallest, int(workload.size * QUICK_SHARE))
    if rows is not None and not workload.name.startswith("growth"):
        return min(rows, workload.size) if workload.size < MILLION else rows
    return workload.size


__all__ = [
    "FULL_ROWS",
    "WORKLOADS",
    "Backfill",
    "CatchUp",
    "EmptyWindow",
    "Freshness",
    "InitialCopy",
    "ManySubscriptions",
    "Validation",
    "Workload",
    "size_of",
]
