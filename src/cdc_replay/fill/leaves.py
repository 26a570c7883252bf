"""Leaves whose rows can be followed, and the columns of the frame that tells how far they were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from cdc_replay.model.change import CHANGES, Frame
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.relation import Relation, RelationId, ReplicaIdentity

FOUND: Final = Frame(
    (
        *CHANGES.columns,
        ("missing", "array<int>"),  # positions in `new` to be read from the row that is at `key` in the end
        ("key", "array<string>"),  # the row's last replica identity, in order of column name
        ("lost", "int"),  # how many wanted values cannot be found
    )
)
"""One row per entry: the change as in CHANGES, with the values that were found in `new` and `new_kinds`."""

_ARROW: Final = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "string": pa.string(),
    "array<string>": pa.list_(pa.string()),
    "array<int>": pa.list_(pa.int32()),
}

FOUND_SCHEMA: Final = pa.schema([(name, _ARROW[kind]) for name, kind in FOUND.columns])
"""FOUND in Arrow's types."""


@dataclass(frozen=True, slots=True)
class FollowedLeaf:
    """A leaf all of whose INSERTs and UPDATEs are in the history, under one replica identity; picklable.

    `key` are the columns of the replica identity in order of name, `wanted` the columns that the subscription
    has of it. Of `renamed` columns a value under the same name may be another column's. What was committed
    up to `since` says nothing of the rows: the publisher has rewritten them there (R11.9).
    """

    id: RelationId
    key: tuple[str, ...]
    relations: tuple[Relation, ...]
    """Its versions in the history."""
    wanted: frozenset[str]
    renamed: frozenset[str] = frozenset()
    since: Lsn = ZERO

    @classmethod
    def of(cls, relations: Iterable[Relation], wanted: frozenset[str]) -> FollowedLeaf | None:
        """The leaf that has these versions; None if its rows have no key, or have had different ones.

        Between changes under different identities nothing tells whether it is the same row. Under REPLICA
        IDENTITY FULL an old tuple has every value, and nothing is ever missing.
        """
        versions = tuple(relations)
        keys = {tuple(sorted(each.name for each in version.columns if each.is_key)) for version in versions}
        is_full = any(version.replica_identity is ReplicaIdentity.FULL for version in versions)
        if is_full or len(keys) != 1 or keys == {()}:
            return None
        return cls(versions[0].id, keys.pop(), versions, wanted)

    def key_positions(self, relation: Relation) -> tuple[int, ...]:
        """Where the tuples of a version hold the key."""
        return tuple(relation.column_names.index(name) for name in self.key)
