"""Chunks that were read under different snapshots, made exact by the log.

A table is read in ranges of pages. A run that is killed leaves the chunks that were complete, each as of the
consistent point of its run's snapshot. The next run reads only the missing ranges, under a snapshot of its
own at F, the *fence*. What all chunks together hold is not the table at any time: an UPDATE writes the new
version of a row to another page, so that a row can be in two chunks with two versions, or in none.

    pages     0 ……… 100 ……… 200 ……… 300 …
    read at   L1        L1        F               L1 < F

Let *touched* be every key that a change in `(oldest L, F]` has, before or after it: the log tells. Keys are
compared as texts, as their type's output function writes them. The table is put together of

    (1)  the staged rows whose key is not touched, and not the key of a row of (2)
    (2)  the rows of the publisher at F whose key equals a touched one, read by an index

and then holds exactly what the publisher has at F, row by row:

| row                                 | why it is there once, as of F                                       |
|-------------------------------------|---------------------------------------------------------------------|
| its key is not touched, it is at F  | no change since the oldest L: it has been the same tuple, in the    |
|                                     | same page, at every L; the ranges are disjoint and cover all pages, |
|                                     | so exactly one chunk has it, whatever snapshot that was read under  |
| its key is touched, it is at F      | every equality finds a text equal to itself: it is in (2), as of F; |
|                                     | (1) has no row with this key, in whatever version and how often     |
| it is in a chunk, but not at F      | it was updated or deleted since: its key is touched, (1) leaves it  |
|                                     | out; (2) has it only if a row with that key is there again          |
| its key changed                     | both keys are touched: the old is left out, the new one is in (2)   |
| it crossed the filter               | it was updated: touched; (2) is read through the filter, as of F    |
| it moved to another partition       | a DELETE and an INSERT: touched; (2) is read from all partitions    |
| the publisher's equality is coarser | (2) may bring rows that are not touched, such as 1.0 for 1.00:      |
| than equality of texts              | their keys are left out of (1) too                                  |

This needs what is checked before a chunk is used again, and where it is not so the table is copied anew:

- The same definition (`definition.py`): an untouched row reads the same, and no row has moved without a
  change (TRUNCATE, VACUUM FULL and rewrites give the table another file). Each chunk's file is the one that
  the catalog names as of its own snapshot (`chunk.py`), so that none was read from a file newer than that.
- The log holds `(oldest L, F]`, with INSERTs, UPDATEs and DELETEs of every leaf: all are captured, whatever
  the subscription publishes.
- Each change tells the key. The identity of every relation version in the window includes it; an UPDATE that
  sends no old row has not changed it, a key column that was not sent is in the old row (R1.6).

Values do not come from the log at all, so that what it does not send (R1.4) plays no role. Pages that were
added since belong to the last range, which is open; whatever is in them was inserted or updated since.
A table without a key is copied anew.
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

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


@dataclass(frozen=True, slots=True)
class LoggedChanges:
    """All changes of some leaves in a window (CHANGES), which may hold others too.

    `relations` are their relation versions, `catalogs` those in force anywhere in the window.
    """

    frame: DataFrame
    relations: tuple[Relation, ...]
    catalogs: tuple[PublisherCatalog, ...]


ReadLog: TypeAlias = Callable[[Window, Sequence[RelationId]], LoggedChanges | None]
"""Gives the changes of leaves in a window; None if the log does not have all of them."""


def can_tell_keys(logged: LoggedChanges, synced: SyncedTable, key: Sequence[str]) -> bool:
    """Whether every change of the table's leaves has this key, before and after it."""
    leaves = {leaf.id for leaf in synced.leaves}
    identified = (
        set(key) <= {column.name for column in relation.columns if column.is_key}
        for relation in logged.relations
        if relation.id in leaves
    )
    return all(identified) and all(_is_same_key(logged.catalogs, leaf.id, key) for leaf in synced.leaves)


def _is_same_key(catalogs: Iterable[PublisherCatalog], leaf: RelationId, key: Sequence[str]) -> bool:
    """Whether these names have been those of the same columns of the same types all the time."""
    columns = {
        tuple(
            (each.name, each.attnum, each.type_oid, each.typmod) for each in table.columns if each.name in key
        )
        for table in (catalog.tables[leaf] for catalog in catalogs if leaf in catalog.tables)
    }
    return len(columns) <= 1


def touched_keys(logged: LoggedChanges, synced: SyncedTable, key: Sequence[str]) -> DataFrame:
    """The keys (`key`: array of texts, in the order of `key`) that changes have before or after them, once.

    No row has NULL in its key at the fence, whatever it had before: such keys are left out, as such rows are.
    """
    leaves = {leaf.id for leaf in synced.leaves}
    positions: dict[tuple[int, ...], list[int]] = {}
    for relation in logged.relations:
        if relation.id in leaves:
            at = tuple(relation.column_names.index(name) for name in key)
            positions.setdefault(at, []).append(relation.version)
    changes = logged.frame.where(F.col("relation_version").isin([*_flat(positions)]))
    is_row = F.col("kind") != ChangeKind.TRUNCATE.value
    old = F.when(F.col("old").isNotNull(), _key(positions, _old_value))
    new = F.when(F.col("new").isNotNull(), _key(positions, _new_value))
    both = F.explode(F.array_compact(F.array(old, new)))
    is_whole = F.size(F.array_compact("key")) == len(key)
    return changes.where(is_row).select(both.alias("key")).where(is_whole).distinct()


def _flat(positions: Mapping[tuple[int, ...], Sequence[int]]) -> Iterable[int]:
    return (version for versions in positions.values() for version in versions)


def _key(positions: Mapping[tuple[int, ...], Sequence[int]], value: Callable[[int], Column]) -> Column:
    key = F.lit(None).cast("array<string>")
    for at, versions in positions.items():
        values = F.array(*(value(position) for position in at))
        key = F.when(F.col("relation_version").isin([*versions]), values).otherwise(key)
    return key


def _old_value(position: int) -> Column:
    return F.col("old")[position]


def _new_value(position: int) -> Column:
    """A key column that is stored out of line and unchanged is in the old row (R1.6)."""
    is_unsent = F.substring("new_kinds", position + 1, 1) == "u"
    return F.when(is_unsent, F.col("old")[position]).otherwise(F.col("new")[position])
