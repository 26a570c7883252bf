"""The columns by which a published row is found on the subscriber.

Native replication uses the target's index, whose columns must be key columns of the *published* relation
(R8.6, R8.7). But the content of an old tuple depends on the leaf's replica identity (R1.6, R1.7), and a
partitioned target is searched in the one partition that the old tuple leads to (R8.12). If root and leaf, or
publisher and subscriber, differ, native replication refuses the change, or finds no row and continues
(R8.11). The log has the leaf's identity, and SQL searches all partitions, so here:

| the leaves send of an old row                | rows are found by                                        |
|----------------------------------------------|----------------------------------------------------------|
| all, or the target's key                     | the target's key                                         |
| one key, another than the target's, and      | that key: among the leaf's own rows it is unique, and so |
| either side is partitioned                   | `is_per_leaf`                                            |
| all, and the target has no key               | the whole row (R8.10)                                    |
| anything else, but the target's key is in    | the target's key in the new row, if the leaf has sent no |
| that of the partitioned published relation   | old one (R8.3); with an old one the change is refused    |
| anything else                                | nothing: an UPDATE or DELETE is refused, as natively     |

Two leaves can have equal keys if the partition key is not part of them. Their changes are distinguished by
leaf; on the subscriber a key that two rows have is a conflict, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cdc_replay.model.publication import Table
from cdc_replay.model.relation import Relation, ReplicaIdentity

LeafVersion: TypeAlias = tuple[Relation, Table]
"""A leaf's relation version, and the table as which it is published."""


@dataclass(frozen=True, slots=True)
class RowIdentity:
    """The fields of `SubscribedTable` that say how rows are found."""

    columns: tuple[str, ...]
    is_keyed: bool
    is_per_leaf: bool = False


def key_of(relation: Relation) -> tuple[str, ...]:
    """The columns that an old tuple of this version always has (R1.5)."""
    return tuple(column.name for column in relation.columns if column.is_key)


def row_identity(
    target_key: tuple[str, ...],
    columns: tuple[str, ...],
    leaves: Sequence[LeafVersion],
    *,
    is_partitioned: bool,
) -> RowIdentity:
    """How the rows of a target are found whose published columns are `columns`.

    `leaves` are those whose UPDATEs or DELETEs are published; `is_partitioned` is about the target.
    """
    keys = {key_of(relation) for relation, _ in leaves if not _is_full(relation)}
    has_target_key = bool(target_key) and set(target_key) <= set(columns)
    if has_target_key and all(set(target_key) <= set(key) for key in keys):
        return RowIdentity(target_key, is_keyed=True)
    has_partitions = is_partitioned or any(table.id != relation.id for relation, table in leaves)
    sends_one_key = len({frozenset(key) for key in keys}) == 1 and not any(
        _is_full(relation) for relation, _ in leaves
    )
    if has_partitions and sends_one_key and (key := min(keys)) and set(key) <= set(columns):
        return RowIdentity(key, is_keyed=True, is_per_leaf=True)
    if has_target_key:
        return RowIdentity(target_key, is_keyed=True)
    return RowIdentity(columns, is_keyed=False)


def _is_full(relation: Relation) -> bool:
    return relation.replica_identity is ReplicaIdentity.FULL
