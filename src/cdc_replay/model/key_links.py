"""Keys that belong together, because UPDATEs have moved a row from one to the other.

The changes of one key are brought together without knowing any other row. Only an UPDATE that changes a key
links two of them; keys that are linked, directly or through others, must be looked at together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

Key: TypeAlias = tuple[str | None, ...]
"""Values of the columns by which a row is found, as text."""

Slot: TypeAlias = tuple[int, Key]
"""A table, by a number, and one of its keys."""


def linked(moves: Iterable[tuple[Slot, Slot]]) -> Iterator[tuple[int, Key, int]]:
    """Every slot of `moves` with the number of its lineage: equal where slots are linked (union-find)."""
    parents: dict[Slot, Slot] = {}

    def root(slot: Slot) -> Slot:
        parents.setdefault(slot, slot)
        while (parent := parents[slot]) != slot:
            parents[slot] = slot = parents[parent]
        return slot

    for old, new in moves:
        parents[root(old)] = root(new)
    numbers: dict[Slot, int] = {}
    for slot in list(parents):
        number = numbers.setdefault(root(slot), len(numbers))
        yield *slot, number
