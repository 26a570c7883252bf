"""Spark: the entries of a history, resolved in three steps.

    scan         all changes of the leaves: which keys are linked by moves, where a TRUNCATE is; one job
    track        the changes of the keys that entering rows had, in commit order (`replay.toast.row_history`)
    read         missing values, from the publisher at the fence (`replay.toast.publisher_rows`)

Only changes of rows that enter are shuffled, and only if there are entries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_replay.model.frames import CHANGES, ChangeKind
from cdc_replay.model.key_links import KeyText, TableKey, linked
from cdc_replay.model.lsn import ZERO
from cdc_replay.postgres.exported_snapshot import SharedSnapshot
from cdc_replay.replay.change_keys import key_column, new_value, old_value
from cdc_replay.replay.decode import ChangePosition
from cdc_replay.replay.entered_values import ResolvedEntries
from cdc_replay.replay.toast.publisher_rows import PublisherRowReader, PublisherTables
from cdc_replay.replay.toast.row_history import TRACKED, track, untracked
from cdc_replay.replay.toast.tracked_leaf import RESOLVED, TrackedLeaf, key_positions
from cdc_replay.spark.nullable_lists import map_in_arrow

_POSITION: Final = ("commit_lsn", "seq")


@dataclass(frozen=True, slots=True)
class ChangeHistory:
    """Unfiltered changes (CHANGES), and the `leaves` into which rows enter.

    With a `fence` they are exactly the changes that the rows in it come from.
    """

    changes: DataFrame
    leaves: tuple[TrackedLeaf, ...]
    fence: SharedSnapshot | None = None


@dataclass(frozen=True, slots=True)
class ResolvedValues:
    """Entries (RESOLVED), persisted until the context ends; `unknown` values are left in them.

    `GIVEN_UP` values are among these.
    """

    entries: ResolvedEntries
    unknown: int


@contextlib.contextmanager
def resolve_values(history: ChangeHistory, entries: Sequence[ChangePosition]) -> Iterator[ResolvedValues]:
    """The values that the UPDATEs at `entries` did not send, as far as they can be proved.

    Entries of leaves outside the history are not among the rows, and count as one unknown value each.

    Raises:
        PublisherNotReady, ServerUnavailable, MissingPrivilege: if the publisher cannot be read; from a task
            as text inside Spark's own exception.
    """
    rows = _resolve(history, entries).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        unknown, size = F.col("lost") + F.size("missing"), F.octet_length(F.array_join("new", ""))
        totals = rows.agg(F.count("*"), F.sum(unknown), F.sum(size)).collect()[0]
        of_other_leaves = len(entries) - int(totals[0])
        resolved = ResolvedEntries(rows, entries, int(totals[2] or 0))
        yield ResolvedValues(resolved, of_other_leaves + int(totals[1] or 0))
    finally:
        rows.unpersist()


def _resolve(history: ChangeHistory, entries: Sequence[ChangePosition]) -> DataFrame:
    leaves = {int(leaf.id): leaf for leaf in history.leaves}
    marked = _mark_entries(history, entries)
    keyed = _with_keys(history, marked)
    scan = _scan_keys(keyed)
    columns = zip(*scan.lineages, strict=True) if scan.lineages else ((), (), ())
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
        .select(*TRACKED)
    )
    truncated = scan.truncated

    def track_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from track(batches, leaves, truncated)

    def pass_untracked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from untracked(batches, leaves)

    is_of_leaf = F.col("relation_id").isin(list(leaves))
    untracked_entries = marked.where(is_of_leaf & F.col("is_entry") & ~_is_tracked(history)).select(
        *CHANGES.names
    )
    resolved = map_in_arrow(ordered, track_partition, RESOLVED.ddl).unionByName(
        map_in_arrow(untracked_entries, pass_untracked, RESOLVED.ddl)
    )
    if history.fence is None:
        return resolved
    reader = PublisherRowReader(PublisherTables.at_fence(history.fence, history.leaves), leaves)
    return map_in_arrow(resolved, reader.read, RESOLVED.ddl)


_LINEAGE: Final = pa.schema(
    [("linked_leaf", pa.int64()), ("linked_key", pa.list_(pa.string())), ("lineage", pa.int64())]
)


def _is_tracked(history: ChangeHistory) -> Column:
    tracked = [leaf for leaf in history.leaves if leaf.key]
    versions = [relation.version for leaf in tracked for relation in leaf.relations]
    is_truncate = F.col("kind") == ChangeKind.TRUNCATE.value
    ours = F.col("relation_id").isin([int(leaf.id) for leaf in tracked])
    ours &= is_truncate | F.col("relation_version").isin(versions)
    for leaf in tracked:
        if leaf.valid_after > ZERO:
            ours &= (F.col("relation_id") != int(leaf.id)) | (F.col("commit_lsn") > leaf.valid_after.value)
        if leaf.rewrites:
            # A change in the rewriting transaction may be before or after the rewrite.
            is_rewriting = F.col("commit_lsn").isin(list(leaf.rewrites))
            ours &= (F.col("relation_id") != int(leaf.id)) | ~is_rewriting
    return F.coalesce(ours, F.lit(False))


def _mark_entries(history: ChangeHistory, entries: Sequence[ChangePosition]) -> DataFrame:
    columns = list(zip(*entries, strict=True))
    types = (pa.int64(), pa.int32())
    table = pa.table(
        [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)], list(_POSITION)
    )
    entry_frame = history.changes.sparkSession.createDataFrame(table).withColumn("entered", F.lit(True))
    is_entry = F.coalesce(F.col("entered") & (F.col("kind") == ChangeKind.UPDATE.value), F.lit(False))
    marked = history.changes.join(F.broadcast(entry_frame), list(_POSITION), "left")
    return marked.withColumn("is_entry", is_entry)


def _with_keys(history: ChangeHistory, marked: DataFrame) -> DataFrame:
    """The changes by which rows are tracked, with the rows' keys before and after."""
    old_key, new_key = _key(history.leaves, old_value), _key(history.leaves, new_value)
    # An UPDATE without an old tuple has not changed its key (R1.6).
    before = F.when(F.col("old").isNotNull(), old_key).when(F.col("kind") == ChangeKind.UPDATE.value, new_key)
    after = F.when(F.col("new").isNotNull(), new_key)
    tracked = marked.where(_is_tracked(history))
    return tracked.withColumn("key_before", before).withColumn("key_after", after)


def _key(leaves: Sequence[TrackedLeaf], value_of: Callable[[int], Column]) -> Column:
    """The replica identity's values in order of attribute number."""
    versions: dict[tuple[int, ...], list[int]] = {}
    for relation in (relation for leaf in leaves if leaf.key for relation in leaf.relations):
        versions.setdefault(key_positions(relation), []).append(relation.version)
    return key_column(versions, value_of)


@dataclass(frozen=True, slots=True)
class _KeyScan:
    """(leaf, key, lineage) of every key that an entering row has had, and each leaf's last TRUNCATE."""

    lineages: tuple[tuple[int, KeyText, int], ...]
    truncated: Mapping[int, ChangePosition]


def _scan_keys(keyed: DataFrame) -> _KeyScan:
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
    links = list(linked(moves))
    entered_lineages = {lineage for leaf, key, lineage in links if (leaf, key) in entered}
    return _KeyScan(tuple(link for link in links if link[-1] in entered_lineages), truncated)
