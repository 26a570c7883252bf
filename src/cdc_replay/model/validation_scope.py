"""What a validation compares: what the configuration plans for each table, and what one run was asked."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.model.relation import QualifiedName

_SHARE: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) *%")

EARLY: Final = 0.02
"""A table is due this part of its interval early: a run that starts some seconds sooner than the last one did
would otherwise leave it for the next."""


@dataclass(frozen=True, slots=True)
class TablePlan:
    """How often a table is compared, which share of its rows at a time, and how old its proof may be.

    Without `every`, in each run; without `max_proof_age`, as old as it likes.
    """

    every: dt.timedelta | None = None
    sample: float = 1.0
    max_proof_age: dt.timedelta | None = None

    def is_due(self, last_compared: dt.datetime | None, now: dt.datetime) -> bool:
        """Whether a table that was last compared at that time is due."""
        if self.every is None or last_compared is None:
            return True
        # Also if that time is to come: the clock was set back since.
        return abs(now - last_compared) >= self.every * (1 - EARLY)


@dataclass(frozen=True, slots=True)
class ValidationPlan:
    """The plans of a subscription's tables, by name as SCHEMA.TABLE, and the budget of a run by them."""

    default: TablePlan = TablePlan()
    tables: Mapping[str, TablePlan] = field(default_factory=dict)
    max_seconds: float | None = None
    max_bytes: int | None = None

    def of_table(self, name: QualifiedName) -> TablePlan:
        """The plan of one table."""
        return self.tables.get(str(name), self.default)


@dataclass(frozen=True, slots=True)
class ValidationScope:
    """What one run was asked to compare: everything, unless it is said.

    `tables` are texts of SCHEMA.TABLE, or lists of them with commas. `is_due`: only tables that are due, with
    the samples and the budget that the configuration plans. `sample` is a share of the rows, greater than 0
    and at most 1. A budget ends the run between two steps: it may be exceeded by one.
    """

    tables: tuple[str, ...] = ()
    sample: float | None = None
    max_seconds: float | None = None
    max_bytes: int | None = None
    is_due: bool = False


def parse_share(text: str) -> float:
    """The share of a percentage such as `5%` or `0.5%`.

    Raises:
        ValueError: if it has another form, or is not above 0 and at most 100.
    """
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share <= 1:
        raise ValueError("not a share: give a percentage above 0 and at most 100, such as 5%")
    return share
