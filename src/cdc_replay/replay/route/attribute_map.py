"""Leaf columns → the published relation's columns, by name (R2.12).

A partition may have its columns in another order than its root, and a relation version may lack a column that
the subscription knows from another version. A position is an index into the leaf's tuple, or None where this
version does not have the column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from cdc_replay.model.relation import Relation

Positions: TypeAlias = tuple[int | None, ...]

NOT_SENT: Final = "-"
"""The kind of a value whose column the relation version does not have."""


def positions(relation: Relation, columns: Sequence[str | None]) -> Positions:
    """Where the leaf's tuple holds each of `columns`; None is a column that is not sent."""
    found = {name: index for index, name in enumerate(relation.column_names)}
    return tuple(None if name is None else found.get(name) for name in columns)
