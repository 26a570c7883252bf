"""Keys that belong together because UPDATEs moved a row from one to the other.

Changes of one key are grouped without knowing other rows. Only an UPDATE that changes a key links two keys;
directly or indirectly linked keys must be processed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

KeyText: TypeAlias = tuple[str | None, ...]
"""The identity columns' values as text."""

TableKey: TypeAlias = tuple[int, KeyText]
"""The index of a table, and one of its keys."""


def linked(moves: Iterable[tuple[TableKey, TableKey]]) -> Iterator[tuple[int, KeyText, int]]:
    """Every key of `moves` with the id of its lineage, equal for linked keys (union-find)."""
    parents: dict[TableKey, TableKey] = {}

    def root(key: TableKey) -> TableKey:
        parents.setdefault(key, key)
        while (parent := parents[key]) != key:
            parents[key] = key = parents[parent]
        return key

    for old, new in moves:
        parents[root(old)] = root(new)
    lineage_ids: dict[TableKey, int] = {}
    for key in list(parents):
        lineage_id = lineage_ids.setdefault(root(key), len(lineage_ids))
        yield *key, lineage_id
