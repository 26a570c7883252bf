"""Keys that belong together, because UPDATEs have moved a row from one to the other.

The changes of one key are brought together without knowing any other row. Only an UPDATE that changes a key
links two of them; keys that are linked, directly or through others, must be looked at together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

KeyText: TypeAlias = tuple[str | None, ...]
"""Values of the columns by which a row is found, as text."""

TableKey: TypeAlias = tuple[int, KeyText]
"""A table, by a number, and one of its keys."""


def linked(moves: Iterable[tuple[TableKey, TableKey]]) -> Iterator[tuple[int, KeyText, int]]:
    """Every slot of `moves` with the number of its lineage: equal where slots are linked (union-find)."""
    parents: dict[TableKey, TableKey] = {}

    def root(slot: TableKey) -> TableKey:
        parents.setdefault(slot, slot)
        while (parent := parents[slot]) != slot:
            parents[slot] = slot = parents[parent]
        return slot

    for old, new in moves:
        parents[root(old)] = root(new)
    numbers: dict[TableKey, int] = {}
    for slot in list(parents):
        number = numbers.setdefault(root(slot), len(numbers))
        yield *slot, number
