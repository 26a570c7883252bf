"""Spark: entries of a history, found in three steps.

    look at      all changes of the leaves: which keys are linked by moves, where a TRUNCATE is; one job
    follow       the changes of the keys that entries have had, in commit order (`replay.toast.row_history`)
    read         what is still waiting, from the publisher at the fence (`replay.toast.publisher_rows`)

Only changes of rows that enter are moved between executors, and only if there are entries at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_replay.model.frames import CHANGES, ChangeKind
from cdc_replay.model.key_links import KeyText, TableKey, linked
from cdc_replay.model.lsn import ZERO
from cdc_replay.postgres.exported_snapshot import SharedSnapshot
from cdc_replay.replay.toast.publisher_rows import FencedTables, PublisherRowReader
from cdc_replay.replay.toast.row_history import FOLLOWED, follow, unfollowed
from cdc_replay.replay.toast.tracked_leaf import FOUND, TrackedLeaf, key_positions
from cdc_replay.spark.nullable_lists import map_in_arrow

ChangePosition: TypeAlias = tuple[int, int]
"""Commit LSN and seq of a row change, which no other row change has."""

_POSITION: Final = ("commit_lsn", "seq")


@dataclass(frozen=True, slots=True)
class ChangeHistory:
    """Unfiltered changes (CHANGES), and the `leaves` into which rows enter.

    With a `fence` they are those that have led to the rows in it, exactly.
    """

    changes: DataFrame
    leaves: tuple[TrackedLeaf, ...]
    fence: SharedSnapshot | None = None


@dataclass(frozen=True, slots=True)
class ResolvedValues:
    """Entries (FOUND), kept until the context that made them ends; `unknown` values are left in them.

    Those that are `GIVEN_UP` are among them.
    """

    rows: DataFrame
    unknown: int

    def merge_into(self, changes: DataFrame) -> DataFrame:
        """`changes` (CHANGES), which hold the entries, with the entries as they were found."""
        places = F.broadcast(self.rows.select(*_POSITION))
        others = changes.join(places, list(_POSITION), "left_anti").select(*CHANGES.names)
        return others.unionByName(self.rows.select(*CHANGES.names))


@contextlib.contextmanager
def resolve_values(history: ChangeHistory, entries: Sequence[ChangePosition]) -> Iterator[ResolvedValues]:
    """The values that the UPDATEs at `entries` did not send, as far as they can be proved.

    Entries of other leaves than the history's are not among the rows, and count as one unknown value each.

    Raises:
        PublisherNotReady, ServerUnavailable, MissingPrivilege: if the publisher cannot be read; from a task
            as text inside Spark's own exception.
    """
    rows = _found(history, entries).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        totals = rows.agg(F.count("*"), F.sum(F.col("lost") + F.size("missing"))).collect()[0]
        elsewhere = len(entries) - int(totals[0])
        yield ResolvedValues(rows, elsewhere + int(totals[1] or 0))
    finally:
        rows.unpersist()


def _found(history: ChangeHistory, entries: Sequence[ChangePosition]) -> DataFrame:
    leaves = {int(leaf.id): leaf for leaf in history.leaves}
    marked = _marked(history, entries)
    keyed = _with_keys(history, marked)
    seen = _look_at(keyed)
    columns = zip(*seen.lineages, strict=True) if seen.lineages else ((), (), ())
    table = pa.table(
        [pa.array(column, kind) for column, kind in zip(columns, _LINEAGE.types, strict=True)],
        schema=_LINEAGE,
    )
    lineages = F.broadcast(history.changes.sparkSession.createDataFrame(table))
    key = F.coalesce("key_before", "key_after")
    same = (F.col("relation_id") == F.col("linked_leaf")) & (key == F.col("linked_key"))
    ordered = (
        keyed.where(F.col("kind") != ChangeKind.TRUNCATE.value)
        .join(lineages, same)
        .repartition("lineage")
        .sortWithinPartitions("lineage", *_POSITION)
        .select(*FOLLOWED)
    )
    truncated = seen.truncated

    def follow_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from follow(batches, leaves, truncated)

    def take_unfollowed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from unfollowed(batches, leaves)

    known = F.col("relation_id").isin(list(leaves))
    aside = marked.where(known & F.col("is_entry") & ~_is_followed(history)).select(*CHANGES.names)
    found = map_in_arrow(ordered, follow_partition, FOUND.ddl).unionByName(
        map_in_arrow(aside, take_unfollowed, FOUND.ddl)
    )
    if history.fence is None:
        return found
    reader = PublisherRowReader(FencedTables.of(history.fence, history.leaves), leaves)
    return map_in_arrow(found, reader.read, FOUND.ddl)


_LINEAGE: Final = pa.schema(
    [("linked_leaf", pa.int64()), ("linked_key", pa.list_(pa.string())), ("lineage", pa.int64())]
)


def _is_followed(history: ChangeHistory) -> Column:
    """Whether a change is one by which rows are followed."""
    followed = [leaf for leaf in history.leaves if leaf.key]
    versions = [relation.version for leaf in followed for relation in leaf.relations]
    is_truncate = F.col("kind") == ChangeKind.TRUNCATE.value
    ours = F.col("relation_id").isin([int(leaf.id) for leaf in followed])
    ours &= is_truncate | F.col("relation_version").isin(versions)
    for leaf in followed:
        if leaf.begins > ZERO:
            ours &= (F.col("relation_id") != int(leaf.id)) | (F.col("commit_lsn") > leaf.begins.value)
        if leaf.rewrites:
            # What comes before the rewrite in its transaction, and what after it, is not told apart.
            is_rewriting = F.col("commit_lsn").isin(list(leaf.rewrites))
            ours &= (F.col("relation_id") != int(leaf.id)) | ~is_rewriting
    return F.coalesce(ours, F.lit(False))


def _marked(history: ChangeHistory, entries: Sequence[ChangePosition]) -> DataFrame:
    """The changes, and whether they are entries."""
    columns = list(zip(*entries, strict=True))
    types = (pa.int64(), pa.int32())
    table = pa.table(
        [pa.array(each, kind) for each, kind in zip(columns, types, strict=True)], list(_POSITION)
    )
    wanted = history.changes.sparkSession.createDataFrame(table).withColumn("entered", F.lit(True))
    is_entry = F.coalesce(F.col("entered") & (F.col("kind") == ChangeKind.UPDATE.value), F.lit(False))
    marked = history.changes.join(F.broadcast(wanted), list(_POSITION), "left")
    return marked.withColumn("is_entry", is_entry)


def _with_keys(history: ChangeHistory, marked: DataFrame) -> DataFrame:
    """The changes by which rows are followed, with the rows' keys before and after."""
    old_key, new_key = _key(history.leaves, _old_value), _key(history.leaves, _new_value)
    # An UPDATE without an old tuple has not changed its key (R1.6).
    before = F.when(F.col("old").isNotNull(), old_key).when(F.col("kind") == ChangeKind.UPDATE.value, new_key)
    after = F.when(F.col("new").isNotNull(), new_key)
    followed = marked.where(_is_followed(history))
    return followed.withColumn("key_before", before).withColumn("key_after", after)


def _old_value(position: int) -> Column:
    return F.col("old")[position]


def _new_value(position: int) -> Column:
    """A key column that is stored out of line and unchanged is in the old tuple (R1.6)."""
    is_unsent = F.substring("new_kinds", position + 1, 1) == "u"
    return F.when(is_unsent, F.col("old")[position]).otherwise(F.col("new")[position])


def _key(leaves: Sequence[TrackedLeaf], value_of: Callable[[int], Column]) -> Column:
    """The values of the replica identity in order of attribute number."""
    versions: dict[tuple[int, ...], list[int]] = {}
    for relation in (relation for leaf in leaves if leaf.key for relation in leaf.relations):
        versions.setdefault(key_positions(relation), []).append(relation.version)
    key = F.lit(None).cast("array<string>")
    for positions, alike in versions.items():
        values = F.array(*(value_of(position) for position in positions))
        key = F.when(F.col("relation_version").isin(alike), values).otherwise(key)
    return key


@dataclass(frozen=True, slots=True)
class _KeyScan:
    """(leaf, key, lineage) of every key that a row with an entry has had, and each leaf's last TRUNCATE."""

    lineages: tuple[tuple[int, KeyText, int], ...]
    truncated: Mapping[int, ChangePosition]


def _look_at(keyed: DataFrame) -> _KeyScan:
    is_truncate = F.col("kind") == ChangeKind.TRUNCATE.value
    is_move = (F.col("kind") == ChangeKind.UPDATE.value) & (F.col("key_before") != F.col("key_after"))
    rows = keyed.where(is_truncate | is_move | F.col("is_entry")).select(
        "relation_id", "kind", *_POSITION, "key_before", "key_after", "is_entry"
    )
    moves: list[tuple[TableKey, TableKey]] = []
    entered: set[TableKey] = set()
    truncated: dict[int, ChangePosition] = {}
    for row in rows.toArrow().to_pylist():
        leaf, position = row["relation_id"], (row["commit_lsn"], row["seq"])
        if row["kind"] == ChangeKind.TRUNCATE.value:
            truncated[leaf] = max(position, truncated.get(leaf, position))
            continue
        before, after = (leaf, tuple(row["key_before"])), (leaf, tuple(row["key_after"]))
        moves.append((before, after))
        if row["is_entry"]:
            entered.add(after)
    found = list(linked(moves))
    wanted = {lineage for leaf, key, lineage in found if (leaf, key) in entered}
    return _KeyScan(tuple(each for each in found if each[-1] in wanted), truncated)
