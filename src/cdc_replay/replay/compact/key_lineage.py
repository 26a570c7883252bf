"""Routed changes to net changes on Spark: scan the window, group by lineage, fold.

    scan_window  one job over the window: TRUNCATEs, moved keys, rows that enter with unsent values
    fold_frame   drop changes before a TRUNCATE, group each lineage's changes in order, fold them

The lineage of a key is its hash. Only UPDATEs that change a key link two keys; they are collected, and keys
that are linked, directly or through others, get one common lineage. Different lineages may have the same
hash: the fold compares keys, never hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_replay.model.frames import NET, ChangeKind, Truncation
from cdc_replay.model.key_links import linked
from cdc_replay.model.lsn import Window
from cdc_replay.model.subscription import ConflictPolicy, SubscribedTable
from cdc_replay.replay.compact.fold import RunFolder
from cdc_replay.replay.compact.fold_frames import INPUT, FoldRules
from cdc_replay.replay.compact.fold_reference import Key
from cdc_replay.spark.nullable_lists import map_in_arrow

RESTART_IDENTITY: Final = 2
"""Bit of a Truncate message's flags (R1.1)."""


@dataclass(frozen=True, slots=True)
class WindowFacts:
    """What must be known of a whole window before its changes can be grouped.

    `truncations` are all of the window, in order. `lineages` maps (target, key) to the lineage, for keys that
    an UPDATE has left or reached. `unsent` are (target, commit LSN, seq) of UPDATEs that became an INSERT
    with an unsent value (R4.6).
    """

    truncations: tuple[Truncation, ...]
    lineages: tuple[tuple[int, Key, int], ...]
    unsent: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Grouping by key hash alone is right."""
        return not (self.truncations or self.lineages or self.unsent)


def scan_window(routed: DataFrame) -> WindowFacts:
    """One pass over `routed` (ROUTED): its truncations, moved keys and INSERTs that lack a value.

    The pass evaluates `routed`; persist it first if that costs more than reading it back.
    """
    moved = (F.col("kind") == ChangeKind.UPDATE.value) & (F.col("search_key") != F.col("new_key"))
    truncated = F.col("kind") == ChangeKind.TRUNCATE.value
    unsent = (F.col("kind") == ChangeKind.INSERT.value) & F.col("transformed") & F.col("kinds").contains("u")
    # Only moved rows use it; a run of NULL lists is slow (`spark.nullable_lists`).
    search_key = F.coalesce("search_key", F.array().cast("array<string>")).alias("search_key")
    rows = routed.where(truncated | moved | unsent).select(
        "target", "kind", "commit_lsn", "seq", "truncate_flags", search_key, "new_key"
    )
    facts = rows.toArrow().to_pylist()
    truncations = {
        Truncation(
            row["target"],
            row["commit_lsn"],
            row["seq"],
            bool((row["truncate_flags"] or 0) & RESTART_IDENTITY),
        )
        for row in facts
        if row["kind"] == ChangeKind.TRUNCATE.value
    }
    moves = [
        ((row["target"], tuple(row["search_key"])), (row["target"], tuple(row["new_key"])))
        for row in facts
        if row["kind"] == ChangeKind.UPDATE.value
    ]
    lacking = [
        (row["target"], row["commit_lsn"], row["seq"])
        for row in facts
        if row["kind"] == ChangeKind.INSERT.value
    ]
    return WindowFacts(truncations_in_order(truncations), tuple(linked(moves)), tuple(lacking))


def truncations_in_order(truncations: Iterable[Truncation]) -> tuple[Truncation, ...]:
    """Truncations of a window, in log order."""
    return tuple(
        sorted(truncations, key=lambda truncation: (truncation.commit_lsn, truncation.seq, truncation.target))
    )


def fold_frame(
    routed: DataFrame,
    facts: WindowFacts,
    tables: Sequence[SubscribedTable],
    window: Window,
    *,
    policy: ConflictPolicy = ConflictPolicy.ERROR,
) -> DataFrame:
    """The net changes (NET) of `routed` (ROUTED) for `tables`, after the truncations of `facts`.

    All changes are in `window`. Rows are ordered by target in each partition; a row of the subscriber is the
    base of at most one of them, apart from an INSERT after its DELETE. `policy` decides between two rows of
    the window itself with the same key.
    """
    # This frame carries no changes to fold again: such a table is folded by whole rows.
    rules = replace(fold_rules(tables, facts, policy), by_leaf=frozenset())
    names = [name for name in INPUT.names if name != "weight"]
    ordered = (
        _with_lineage(_not_truncated(routed, facts.truncations), facts)
        .repartition("target", "lineage")
        .sortWithinPartitions("target", "lineage", "commit_lsn", "seq")
        .withColumn("ordinal", _ordinal(window))
        .select(*names)
    )

    def fold_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        folder = RunFolder(rules)
        for batch in batches:
            yield from folder.feed(_with_weights(batch))
        yield from folder.finish()

    return map_in_arrow(ordered, fold_partition, NET.ddl)


def fold_rules(tables: Sequence[SubscribedTable], facts: WindowFacts, policy: ConflictPolicy) -> FoldRules:
    """The fold's rules for the tables of a window."""
    return FoldRules(
        policy,
        frozenset(table.index for table in tables if not table.is_keyed),
        frozenset(truncation.target for truncation in facts.truncations),
        frozenset(table.index for table in tables if table.is_by_leaf),
    )


def _ordinal(window: Window) -> Column:
    """A change's position in the window as one number: the commit, then the position in its transaction.

    The bits that the commit leaves are enough for a billion changes of one transaction in a window of less
    than 8 GiB of WAL, and for eight million in one of less than 1 TiB. Changes beyond that share one number.
    """
    commit = F.col("commit_lsn") - F.lit(window.after.value)
    bits = ordinal_seq_bits(window)
    return F.shiftleft(commit, bits) + F.least(F.col("seq").cast("bigint"), F.lit((1 << bits) - 1))


def ordinal_seq_bits(window: Window) -> int:
    """The number of low bits of an ordinal that hold the position in the transaction."""
    return 63 - (window.upto.value - window.after.value).bit_length()


def _with_weights(batch: pa.RecordBatch) -> pa.RecordBatch:
    ones = pa.repeat(pa.scalar(1, pa.int32()), batch.num_rows)
    return pa.RecordBatch.from_arrays([*batch.columns, ones], schema=INPUT)


def _not_truncated(routed: DataFrame, truncations: Sequence[Truncation]) -> DataFrame:
    """Row changes that precede no TRUNCATE of their table."""
    last = {truncation.target: truncation for truncation in truncations}
    void = reduce(Column.__or__, (_before(truncation) for truncation in last.values()), F.lit(False))
    return routed.where((F.col("kind") != ChangeKind.TRUNCATE.value) & ~void)


def _before(truncation: Truncation) -> Column:
    lsn, seq = F.col("commit_lsn"), F.col("seq")
    earlier = (lsn < truncation.commit_lsn) | ((lsn == truncation.commit_lsn) & (seq <= truncation.seq))
    return (F.col("target") == truncation.target) & earlier


def _with_lineage(changes: DataFrame, facts: WindowFacts) -> DataFrame:
    key = F.coalesce("search_key", "new_key")
    key_hash = F.xxhash64("target", key)
    if not facts.lineages:
        return changes.withColumn("lineage", key_hash)
    columns = zip(*facts.lineages, strict=True)
    types = (pa.int32(), pa.list_(pa.string()), pa.int64())
    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    table = pa.Table.from_arrays(arrays, names=["moved_target", "moved_key", "common"])
    common = F.broadcast(changes.sparkSession.createDataFrame(table))
    same = (F.col("target") == F.col("moved_target")) & (key == F.col("moved_key"))
    return changes.join(common, same, "left").withColumn("lineage", F.coalesce("common", key_hash))
