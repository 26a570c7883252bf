"""Leaf columns → the published relation's columns, by name (R2.12).

A partition can have its columns in another order than its root, and a relation version can lack a column that
another version has. A position is an index into the leaf's tuple, or None if this version does not have the
column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from cdc_replay.model.relation import Relation

Positions: TypeAlias = tuple[int | None, ...]

NOT_SENT: Final = "-"
"""The kind of a value whose column the relation version does not have."""


def positions(relation: Relation, columns: Sequence[str | None]) -> Positions:
    """The position of each of `columns` in the leaf's tuple; None is a column that is not sent."""
    position_of = {name: position for position, name in enumerate(relation.column_names)}
    return tuple(None if name is None else position_of.get(name) for name in columns)
