"""Leaves into whose rows values are to be put, and the columns of the frame that tells how far they were."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa

from cdc_replay.model.frames import CHANGES, Frame
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.publication import Table
from cdc_replay.model.relation import Relation, RelationId, ReplicaIdentity

FOUND: Final = Frame(
    (
        *CHANGES.columns,
        ("missing", "array<int>"),  # positions in `new` to be read from the row that is at `key` in the end
        ("key", "array<string>"),  # the row's last replica identity; NULL: unknown
        ("lost", "int"),  # how many wanted values cannot be found, those that are `GIVEN_UP` too
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


class TupleColumn(NamedTuple):
    """A column of a tuple: the same as another one if its attribute number is, of one type if all is."""

    attnum: int
    type_oid: int
    typmod: int


Shape: TypeAlias = tuple[int, int]
"""A relation version, and the number of the catalog in force: they tell what a tuple's columns are."""


@dataclass(frozen=True, slots=True)
class TrackedLeaf:
    """A leaf into which rows enter; picklable.

    `columns` are those of its tuples by shape; None is one of which it is not certain which it is. `wanted`
    are the names that the subscription has of it. `rewrites` are the ends of the commits in which the
    publisher has rewritten its rows without sending them (R11.9): what is known of a row ends there.

    `key` are the columns of the replica identity, where all INSERTs and UPDATEs of the leaf are in the
    history under this one, as far as that was committed after `begins`; otherwise its rows cannot be
    followed, and it is empty.
    """

    id: RelationId
    relations: tuple[Relation, ...]
    """Its versions in the history."""
    columns: Mapping[Shape, tuple[TupleColumn | None, ...]]
    wanted: frozenset[str]
    key: tuple[int, ...] = ()
    rewrites: tuple[int, ...] = ()
    begins: Lsn = ZERO

    @classmethod
    def of(
        cls,
        relations: Iterable[Relation],
        columns: Mapping[Shape, tuple[TupleColumn | None, ...]],
        wanted: frozenset[str],
    ) -> TrackedLeaf:
        """The leaf with these versions and shapes; without a key if its rows have none, or different ones.

        Between changes under different identities nothing tells whether it is the same row. Under REPLICA
        IDENTITY FULL an old tuple has every value, and nothing is ever missing.
        """
        versions = {each.version: each for each in relations}
        known = {shape: found for shape, found in columns.items() if shape[0] in versions}
        keys = {_key(versions[version], found) for (version, _), found in known.items()}
        is_full = any(each.replica_identity is ReplicaIdentity.FULL for each in versions.values())
        key = next(iter(keys)) if len(keys) == 1 and not is_full else ()
        return cls(next(iter(versions.values())).id, tuple(versions.values()), known, wanted, key)

    def columns_of(self, shape: Shape, width: int) -> tuple[TupleColumn | None, ...]:
        """What the columns of a tuple are, which has so many."""
        return self.columns.get(shape, (None,) * width)

    def rewrites_before(self, commit_lsn: int) -> int:
        """How many of them come before the commit."""
        return bisect.bisect_left(self.rewrites, commit_lsn)


def key_positions(relation: Relation) -> tuple[int, ...]:
    """Where the tuples of a version hold the key: in order of attribute number, as all their columns."""
    return tuple(position for position, column in enumerate(relation.columns) if column.is_key)


def _key(relation: Relation, columns: tuple[TupleColumn | None, ...]) -> tuple[int, ...]:
    found = [columns[position] for position in key_positions(relation)]
    known = [column.attnum for column in found if column is not None]
    return tuple(known) if len(known) == len(found) else ()


def tuple_columns(
    relation: Relation, table: Table | None, uncertain: frozenset[str] = frozenset()
) -> tuple[TupleColumn | None, ...]:
    """What the columns of a version are in the table as the catalog has it.

    Tuples hold columns in order of attribute number. Where a catalog was read later than the version was in
    force, that or a type may not fit; then it is not certain which columns these are.
    """
    known = {} if table is None else {column.name: column for column in table.columns}
    found = [
        TupleColumn(known[column.name].attnum, column.type_oid, column.typmod)
        if column.name in known and known[column.name].type_oid == column.type_oid
        else None
        for column in relation.columns
    ]
    numbers = [column.attnum for column in found if column is not None]
    if numbers != sorted(numbers):
        return (None,) * len(found)
    return tuple(
        None if each.name in uncertain else column
        for each, column in zip(relation.columns, found, strict=True)
    )
