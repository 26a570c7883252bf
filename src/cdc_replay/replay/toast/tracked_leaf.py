"""Leaves whose rows get values that were not sent, and the columns of the frame of resolved entries."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from cdc_replay.arrow.frame_schema import arrow_schema
from cdc_replay.model.frames import CHANGES, Frame
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.publication import Table
from cdc_replay.model.relation import Relation, RelationId, ReplicaIdentity

RESOLVED: Final = Frame(
    (
        *CHANGES.columns,
        ("missing", "array<int>"),  # positions in `new` to read from the row that is at `key` at the fence
        ("key", "array<string>"),  # the row's last replica identity; NULL: unknown
        ("lost", "int"),  # number of unresolvable values, including those that are `GIVEN_UP`
    )
)
"""One row per entry: the change as in CHANGES, with the resolved values in `new` and `new_kinds`."""

RESOLVED_SCHEMA: Final = arrow_schema(RESOLVED)
"""RESOLVED in Arrow's types."""


class TupleColumn(NamedTuple):
    """A column of a tuple: the same column if `attnum` is equal, of the same type if all fields are."""

    attnum: int
    type_oid: int
    typmod: int


Shape: TypeAlias = tuple[int, int]
"""A relation version and a catalog version, which determine the columns of a tuple."""


@dataclass(frozen=True, slots=True)
class TrackedLeaf:
    """A leaf into which rows enter; picklable.

    `columns` are the columns of its tuples by shape; None stands for an ambiguous one. `subscribed_columns`
    are names. `rewrites` are the commits in which the publisher rewrote its rows without sending them
    (R11.9): what is known of a row ends there.

    `key` are the columns of the replica identity, if the history has all INSERTs and UPDATEs of the leaf that
    committed after `valid_after`, under this identity; otherwise the key is empty, and rows cannot be
    tracked.
    """

    id: RelationId
    relations: tuple[Relation, ...]
    """Its versions in the history."""
    columns: Mapping[Shape, tuple[TupleColumn | None, ...]]
    subscribed_columns: frozenset[str]
    key: tuple[int, ...] = ()
    rewrites: tuple[int, ...] = ()
    valid_after: Lsn = ZERO

    @classmethod
    def from_versions(
        cls,
        relations: Iterable[Relation],
        columns: Mapping[Shape, tuple[TupleColumn | None, ...]],
        subscribed_columns: frozenset[str],
    ) -> TrackedLeaf:
        """The leaf with these versions and shapes; without a key if they have none, or different ones.

        Across different replica identities nothing tells whether two changes are of one row. Under REPLICA
        IDENTITY FULL an old tuple has every value, and nothing is ever missing.
        """
        versions = {relation.version: relation for relation in relations}
        shapes = {shape: names for shape, names in columns.items() if shape[0] in versions}
        keys = {_key(versions[version], names) for (version, _), names in shapes.items()}
        is_full = any(version.replica_identity is ReplicaIdentity.FULL for version in versions.values())
        key = next(iter(keys)) if len(keys) == 1 and not is_full else ()
        return cls(
            next(iter(versions.values())).id, tuple(versions.values()), shapes, subscribed_columns, key
        )

    def columns_of(self, shape: Shape, width: int) -> tuple[TupleColumn | None, ...]:
        """The columns of a tuple of this shape and width."""
        return self.columns.get(shape, (None,) * width)

    def rewrites_before(self, commit_lsn: int) -> int:
        """The number of rewrites before the commit."""
        return bisect.bisect_left(self.rewrites, commit_lsn)


def key_positions(relation: Relation) -> tuple[int, ...]:
    """Positions of the key columns in tuples, in order of attribute number, as in the tuples."""
    return tuple(position for position, column in enumerate(relation.columns) if column.is_key)


def _key(relation: Relation, columns: tuple[TupleColumn | None, ...]) -> tuple[int, ...]:
    key_columns = [columns[position] for position in key_positions(relation)]
    attnums = [column.attnum for column in key_columns if column is not None]
    return tuple(attnums) if len(attnums) == len(key_columns) else ()


def tuple_columns(
    relation: Relation, table: Table | None, uncertain: frozenset[str] = frozenset()
) -> tuple[TupleColumn | None, ...]:
    """The columns of a relation version's tuples, by the catalog's table.

    Tuples hold columns in order of attribute number. If a catalog was read later than the version was in
    force, the order or a type may not fit; then it is ambiguous which columns these are.
    """
    table_columns = {} if table is None else {column.name: column for column in table.columns}
    columns = [
        TupleColumn(table_columns[column.name].attnum, column.type_oid, column.typmod)
        if column.name in table_columns and table_columns[column.name].type_oid == column.type_oid
        else None
        for column in relation.columns
    ]
    attnums = [column.attnum for column in columns if column is not None]
    if attnums != sorted(attnums):
        return (None,) * len(columns)
    return tuple(
        None if relation_column.name in uncertain else column
        for relation_column, column in zip(relation.columns, columns, strict=True)
    )
