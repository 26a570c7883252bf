"""How rows differ between publisher and subscriber."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

RowValues: TypeAlias = tuple[str | None, ...]
"""Values of a row as texts, in the order of the compared columns; long ones are cut."""


class DifferenceKind(enum.Enum):
    """How a row differs between the sides."""

    MISSING = "missing"
    """Only the publisher has the row."""
    UNEXPECTED = "unexpected"
    """Only the subscriber has the row, or the publisher does not publish it."""
    OUTSIDE_FILTER = "outside the present filter"
    """Unexpected, and outside the filter: a changed filter deletes nothing (R9.12)."""
    DIFFERENT = "different"
    """Both have the key, with different values."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One differing row, by the values of its key, and if they were read, the rows with that key."""

    kind: DifferenceKind
    key: str
    key_hash: str
    publisher: tuple[RowValues, ...] = ()
    subscriber: tuple[RowValues, ...] = ()
