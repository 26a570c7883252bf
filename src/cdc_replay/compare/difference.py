"""How rows differ between publisher and subscriber."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DifferenceKind(enum.Enum):
    """How a row differs between the sides."""

    MISSING = "missing"
    """The publisher has it, the subscriber has not."""
    UNEXPECTED = "unexpected"
    """The subscriber has it, the publisher has not, or outside of what it publishes."""
    OUTSIDE_FILTER = "outside the present filter"
    """As unexpected, and the row does not satisfy the filter: a changed filter removes nothing (R9.12)."""
    DIFFERENT = "different"
    """Both have the key, with other values."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One differing row, by the values of its key."""

    kind: DifferenceKind
    key: str
