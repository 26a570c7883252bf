"""Make chunks of different snapshots consistent, by the change log.

A table is read in ranges of pages. A killed run leaves its complete chunks, each as of the consistent point
of its run's snapshot. The next run reads only the missing ranges, under its own snapshot at F, the *fence*.
Together the chunks are not the table at any time: an UPDATE writes the new version of a row to another page,
so a row can be in two chunks with two versions, or in none.

    pages     0 ……… 100 ……… 200 ……… 300 …
    read at   L1        L1        F               L1 < F

*Touched* are all keys that a change in `(oldest L, F]` has, before or after it. Keys are compared as texts of
their type's output function. The table is assembled from

    (1)  the staged rows whose key is not touched, and not the key of a row of (2)
    (2)  the rows of the publisher at F whose key equals a touched one, read by an index

and then holds exactly what the publisher has at F:

| row                                 | why it occurs once, as of F                                         |
|-------------------------------------|---------------------------------------------------------------------|
| key not touched, exists at F        | no change since the oldest L: the same tuple is in the same page at |
|                                     | every L; the ranges are disjoint and cover all pages, so exactly    |
|                                     | one chunk has it, whatever its snapshot                             |
| key touched, exists at F            | equality is reflexive for texts: it is in (2), as of F; (1) has no  |
|                                     | row with this key in any version                                    |
| in a chunk, but not at F            | updated or deleted since: its key is touched and left out of (1);   |
|                                     | (2) has it only if a row with that key exists again                 |
| its key changed                     | both keys are touched: the old is left out, the new one is in (2)   |
| it crossed the filter               | updated, so touched; (2) is read through the filter, as of F        |
| moved to another partition          | a DELETE and an INSERT: touched; (2) is read from all partitions    |
| the publisher's equality is coarser | (2) may contain rows that are not touched, such as 1.0 for 1.00:    |
| than equality of texts              | their keys are left out of (1) too                                  |

Conditions for reuse of a chunk; if one fails, the whole table is copied again:

- The same fingerprint (`fingerprint.py`): an untouched row reads the same, and no row has moved without a
  change (TRUNCATE, VACUUM FULL and rewrites create another file). A chunk's file is the one in the catalog of
  its own snapshot (`copy_chunk.py`), so none was read from a newer file.
- The log has all INSERTs, UPDATEs and DELETEs of every leaf in `(oldest L, F]`, whatever the subscription
  publishes.
- Each change has the key. The identity of every relation version in the window includes it; an UPDATE without
  an old row did not change it, an unsent key column is in the old row (R1.6).
- The table has a key.

No values come from the log, so unchanged TOAST values (R1.4) do not matter. Pages added since belong to the
last range, which is open; their rows were inserted or updated since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pyspark.sql import functions as F

from cdc_replay.model.frames import ChangeKind
from cdc_replay.model.lsn import Window
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import Relation, RelationId
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.replay.change_keys import key_column, new_value, old_value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class LoggedChanges:
    """All changes of some leaves in a window (CHANGES), possibly with changes of other tables.

    `relations` are the leaves' relation versions, `catalogs` those in force anywhere in the window.
    """

    frame: DataFrame
    relations: tuple[Relation, ...]
    catalogs: tuple[PublisherCatalog, ...]


ReadLog: TypeAlias = Callable[[Window, Sequence[RelationId]], LoggedChanges | None]
"""Reads the changes of leaves in a window; None if the log does not have all of them."""


def can_tell_keys(changes: LoggedChanges, synced: SyncedTable, key: Sequence[str]) -> bool:
    """Whether every change of the table's leaves has the old and the new values of this key."""
    leaves = {leaf.id for leaf in synced.leaves}
    identified = (
        set(key) <= {column.name for column in relation.columns if column.is_key}
        for relation in changes.relations
        if relation.id in leaves
    )
    return all(identified) and all(_is_same_key(changes.catalogs, leaf.id, key) for leaf in synced.leaves)


def _is_same_key(catalogs: Iterable[PublisherCatalog], leaf: RelationId, key: Sequence[str]) -> bool:
    """Whether these names denote the same columns of the same types in all catalogs."""
    columns = {
        tuple(
            (column.name, column.attnum, column.type_oid, column.typmod)
            for column in table.columns
            if column.name in key
        )
        for table in (catalog.tables[leaf] for catalog in catalogs if leaf in catalog.tables)
    }
    return len(columns) <= 1


def touched_keys(changes: LoggedChanges, synced: SyncedTable, key: Sequence[str]) -> DataFrame:
    """The distinct old and new keys of all changes (`key`: array of texts, in the order of `key`).

    No row has NULL in its key at the fence: keys with NULL are left out, as such rows are.
    """
    leaves = {leaf.id for leaf in synced.leaves}
    positions: dict[tuple[int, ...], list[int]] = {}
    for relation in changes.relations:
        if relation.id in leaves:
            indexes = tuple(relation.column_names.index(name) for name in key)
            positions.setdefault(indexes, []).append(relation.version)
    rows = changes.frame.where(F.col("relation_version").isin([*_flat(positions)]))
    is_row = F.col("kind") != ChangeKind.TRUNCATE.value
    old = F.when(F.col("old").isNotNull(), key_column(positions, old_value))
    new = F.when(F.col("new").isNotNull(), key_column(positions, new_value))
    both = F.explode(F.array_compact(F.array(old, new)))
    is_whole = F.size(F.array_compact("key")) == len(key)
    return rows.where(is_row).select(both.alias("key")).where(is_whole).distinct()


def _flat(positions: Mapping[tuple[int, ...], Sequence[int]]) -> Iterable[int]:
    return (version for versions in positions.values() for version in versions)
