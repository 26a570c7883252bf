"""Changes on their way to their lineage, as packed batches: these are shuffled in place of rows.

    executor, one run of row groups     ROUTED batch → lineage of each row → one piece per part, and facts
    Spark                               shuffles the pieces of a part to one task
    executor, one part                  pieces → sorted by lineage → folded (`replay.compact.fold`) → NET

A piece is a compressed Arrow batch, so that Spark moves few values: four times faster than a shuffle and a
sort of rows. Its rows are sorted by lineage, those of one lineage are in log order, and `chunk` orders the
pieces. Several changes of the same key in one chunk are folded first, so that a key with a million changes
is a handful of rows per chunk.

The lineage of a key is its hash, but keys that are linked by a move need a common lineage, which requires
knowledge of the whole window. A chunk's facts hold what it contributes: moves, TRUNCATEs, rows that enter
with unsent values.

Changes to keys that an UPDATE in any chunk renames are deferred, and folded once all renames are known:

| in                          | are deferred                   | because                                     |
|-----------------------------|--------------------------------|---------------------------------------------|
| a chunk that moves the keys | as they are, in order          | they depend on each other                   |
| another chunk, by the part  | as they arrive, maybe folded   | there the keys are independent of each      |
| that receives them          |                                | other, and their order does not matter      |

Usually that is a few rows of a window. If it is many, the round is void: the task that notices it sends no
more pieces, and tells all parts to fold none. Another round follows with what is known by then, the
`WindowFacts`. The round is also void if unsent values have to be looked for.

Changes before a TRUNCATE of their table do not count. The chunk of the TRUNCATE drops its own; the parts are
told which chunk that is, and drop those of earlier chunks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import (
    Bools,
    Float64s,
    Int64s,
    ascii_bytes,
    int_array,
    offsets_from_lengths,
)
from cdc_replay.arrow.take import take_rows
from cdc_replay.model.frames import ChangeKind, Truncation
from cdc_replay.model.key_links import TableKey
from cdc_replay.replay.compact.chunk_facts import ChunkFacts, add_last_truncates
from cdc_replay.replay.compact.fold import RunFolder, combine_map_side
from cdc_replay.replay.compact.fold_frames import INPUT, FoldRules
from cdc_replay.replay.compact.window_facts import WindowFacts, truncations_in_order
from cdc_replay.replay.contingent_changes import dump_batch, load_batch

PIECES: Final = pa.schema([("part", pa.int32()), ("chunk", pa.int32()), ("piece", pa.binary())])
"""Rows with a negative `chunk` are no changes: -1 has facts, -2 voids the round, -3 has the hashes of moved
keys, -4 the last chunk with a TRUNCATE by target."""

_ROWS_PER_FOLD: Final = 50_000
_BYTES_PER_FOLD: Final = 32 << 20
_MAX_CONCAT_BYTES: Final = 1 << 30
"""Offsets of an Arrow array reach twice as far."""
_ROW_BITS: Final = 32
_SINGLE_LINEAGE: Final = np.int64(0x5DEECE66D1CE4E5B)
"""The lineage of all changes of a target; it must not be the hash of a key that is moved."""
_FACTS: Final = -1
_VOID: Final = -2
_MOVED: Final = -3
_TRUNCATED: Final = -4

_TRUNCATE: Final = ord(ChangeKind.TRUNCATE.value)


@dataclass(frozen=True, slots=True)
class PartitionAssignment:
    """How the changes of a window are distributed over `parts`; picklable.

    The lineages of a target are spread over a range of parts, `widths[target]` wide from `firsts[target]` on:
    as wide as its share of the changes, so that a part has many rows of few targets. A part makes one COPY
    per target, which costs as much as hundreds of rows.
    """

    parts: int
    firsts: Float64s
    widths: Float64s

    @classmethod
    def from_weights(cls, parts: int, weights: Mapping[int, int]) -> Self:
        """By the weight of each target; there must be one, and weights must not be 0."""
        shares = np.zeros(max(weights) + 1, dtype=np.float64)
        for target, weight in weights.items():
            shares[target] = weight
        widths = shares * (parts / shares.sum())
        return cls(parts, np.cumsum(widths) - widths, widths)

    def parts_of(self, targets: Int64s, lineages: Int64s) -> Int64s:
        """The part of each change."""
        # By the high bits: a part gets a contiguous range of hashes; its rows are sorted by the whole hash.
        share = (lineages.view(np.uint64) >> np.uint64(32)).astype(np.float64) / 2**32
        part_numbers = (self.firsts[targets] + self.widths[targets] * share).astype(np.int64)
        return np.minimum(part_numbers, self.parts - 1)


@dataclass(frozen=True, slots=True)
class ShuffleWriter:
    """Makes the pieces of one window; picklable.

    `facts` is what is known of the window so far. `first_part` is the number of the first part of
    `assignment`. The limit of deferred changes is shared by `groups`.
    """

    rules: FoldRules
    facts: WindowFacts
    first_part: int
    assignment: PartitionAssignment
    groups: int = 1

    def is_void(self, notes: ChunkFacts) -> bool:
        """Whether this round's pieces do not count, because more facts are needed first."""
        return self.facts.is_empty and (bool(notes.unsent) or notes.exceeds_defer_limit(self.groups))

    def write_partitions(self, routed: pa.RecordBatch, chunk: int, notes: ChunkFacts) -> pa.RecordBatch:
        """The pieces (PIECES) of a chunk's changes (ROUTED), which are in log order.

        `notes` are the chunk's own facts. Unless the window's moves are known, changes of moved keys are
        deferred into them.
        """
        remaining = _not_truncated(routed, notes.truncations | {*self.facts.truncations})
        changes = self._with_lineage(routed if remaining.all() else routed.filter(pa.array(remaining)), chunk)
        if self.facts.is_empty and notes.moves:
            changes = notes.defer(chunk, changes, _moved_hashes(notes.moves))
        lineages = int_array(changes["lineage"])
        order = np.argsort(lineages, kind="stable")
        if (combined := self._combine(changes, order)) is not None:
            changes, lineages = combined, int_array(combined["lineage"])
            order = np.argsort(lineages, kind="stable")
        parts = self.assignment.parts_of(int_array(changes["target"]), lineages)
        parts = parts.astype(np.min_scalar_type(self.assignment.parts))
        # Sorted pieces are merged faster, and read sequentially.
        order = order[np.argsort(parts[order], kind="stable")]
        changes = take_rows(changes, order)
        counts = np.bincount(parts, minlength=self.assignment.parts)
        ends = np.cumsum(counts)
        non_empty = np.flatnonzero(counts)
        pieces = [changes.slice(int(ends[part] - counts[part]), int(counts[part])) for part in non_empty]
        return _pieces((self.first_part + non_empty).tolist(), chunk, [dump_batch(piece) for piece in pieces])

    def _combine(self, changes: pa.RecordBatch, order: Int64s) -> pa.RecordBatch | None:
        """Fewer changes with the same effect; None if that is not worth it."""
        if self.rules.revision is not None:
            return None
        return combine_map_side(changes, order, self.rules, self._lineages)

    def write_facts(self, notes: ChunkFacts) -> Iterator[pa.RecordBatch]:
        """Facts (PIECES) of a task, and what each part must know of them."""
        if self.is_void(notes):
            notes.invalidate_round()
            yield self._broadcast(_VOID, b"")
        elif self.facts.is_empty:
            if notes.moves:
                yield self._broadcast(_MOVED, _moved_hashes(notes.moves).tobytes())
            if notes.last_truncates:
                yield self._broadcast(
                    _TRUNCATED, np.array([*notes.last_truncates.items()], dtype=np.int64).tobytes()
                )
        yield facts_row(notes, self.first_part)

    def _broadcast(self, kind: int, content: bytes) -> pa.RecordBatch:
        parts = range(self.first_part, self.first_part + self.assignment.parts)
        return _pieces(parts, kind, [content] * len(parts))

    def _with_lineage(self, routed: pa.RecordBatch, chunk: int) -> pa.RecordBatch:
        key = pc.coalesce(routed["search_key"], routed["new_key"])
        lineages = self._lineages(int_array(routed["target"]), key)
        columns_by_name = {name: routed[name] for name in INPUT.names if name in routed.schema.names}
        if self.rules.nulls is None:
            # Chunks are numbered in log order, and none has more rows than these bits can count.
            ordinals = np.arange(routed.num_rows, dtype=np.int64) + (chunk << _ROW_BITS)
        else:
            ordinals = self.rules.nulls.ordinals(routed)
        weights = np.ones(routed.num_rows, dtype=np.int32)
        added = {"lineage": lineages, "ordinal": ordinals, "weight": weights}
        columns = columns_by_name | {name: pa.array(array) for name, array in added.items()}
        return pa.RecordBatch.from_arrays([columns[name] for name in INPUT.names], schema=INPUT)

    def _lineages(self, targets: Int64s, keys: pa.ListArray) -> Int64s:
        lineages = _common_lineages(_key_hashes(targets, keys), self.facts)
        if self.rules.by_leaf:
            # Only the target's partitions tell which keys are one row's.
            lineages = np.where(np.isin(targets, list(self.rules.by_leaf)), _SINGLE_LINEAGE, lineages)
        return lineages


def _not_truncated(routed: pa.RecordBatch, truncations: Iterable[Truncation]) -> Bools:
    """Row changes (of ROUTED) that precede no TRUNCATE of their table."""
    remaining: Bools = ascii_bytes(routed["kind"]) != _TRUNCATE
    last = {truncation.target: truncation for truncation in truncations_in_order(truncations)}
    targets, lsns, seqs = (int_array(routed[name]) for name in ("target", "commit_lsn", "seq"))
    for truncation in last.values():
        earlier = (lsns < truncation.commit_lsn) | (
            (lsns == truncation.commit_lsn) & (seqs <= truncation.seq)
        )
        remaining &= ~((targets == truncation.target) & earlier)
    return remaining


def _without_truncated(
    changes: pa.RecordBatch, chunk: int, last_truncates: Mapping[int, int]
) -> pa.RecordBatch:
    """The changes (INPUT) of a chunk that precede no TRUNCATE in a later chunk."""
    void = [target for target, last in last_truncates.items() if chunk < last]
    if not void:
        return changes
    is_void = np.isin(int_array(changes["target"]), void)
    return take_rows(changes, np.flatnonzero(~is_void)) if is_void.any() else changes


def _common_lineages(key_hashes: Int64s, facts: WindowFacts) -> Int64s:
    if not facts.lineages:
        return key_hashes
    moved, common = _linked_hashes(facts)
    index = np.minimum(np.searchsorted(moved, key_hashes), len(moved) - 1)
    return np.where(moved[index] == key_hashes, common[index], key_hashes)


def _moved_hashes(moves: Iterable[tuple[TableKey, TableKey]]) -> Int64s:
    """Hashes of keys that a row has left or reached; there must be one."""
    targets, keys = zip(*itertools.chain.from_iterable(moves), strict=True)
    return _key_hashes(np.array(targets, np.int64), pa.array(keys, pa.list_(pa.string())))


@functools.lru_cache(maxsize=1)
def _linked_hashes(facts: WindowFacts) -> tuple[Int64s, Int64s]:
    """Hashes of keys that are linked to others, ascending, and their common lineage."""
    targets, keys, groups = zip(*facts.lineages, strict=True)
    key_hashes = _key_hashes(np.array(targets, np.int64), pa.array(keys, pa.list_(pa.string())))
    first: dict[int, int] = {}
    common = np.array(
        [first.setdefault(group, int(key_hash)) for group, key_hash in zip(groups, key_hashes, strict=True)]
    )
    order = np.argsort(key_hashes)
    return key_hashes[order], common[order]


def facts_row(facts: ChunkFacts, part: int) -> pa.RecordBatch:
    """Facts as a row of PIECES for a part."""
    return _pieces([part], _FACTS, [facts.dump()])


def _pieces(parts: Sequence[int], chunk: int, contents: Sequence[bytes | pa.Buffer]) -> pa.RecordBatch:
    # `pa.array` keeps the buffers that it copies alive.
    offsets = offsets_from_lengths(np.array([len(content) for content in contents], dtype=np.int64))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(contents))]
    arrays = [
        pa.array(parts, pa.int32()),
        pa.array(np.full(len(parts), chunk, dtype=np.int32)),
        pa.Array.from_buffers(pa.binary(), len(contents), buffers),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=PIECES)


@dataclass(slots=True)
class ShufflePartition:
    """The pieces and facts of one part."""

    notes: ChunkFacts = field(default_factory=ChunkFacts)
    is_void: bool = False
    moved: list[Int64s] = field(default_factory=list)
    """Hashes of keys that chunks have moved."""
    last_truncates: dict[int, int] = field(default_factory=dict)
    """The last chunk with a TRUNCATE, by target."""
    pieces: list[tuple[int, pa.Buffer]] = field(default_factory=list)
    """Changes (INPUT) by the number of their chunk, in any order; compressed until they are folded."""

    def net(self, rules: FoldRules, *, groups: int = 1) -> Iterator[pa.RecordBatch]:
        """The net changes (NET) of the part, ordered by target; can be called once; none in a void round.

        Changes of moved keys are not folded but deferred into the part's facts, which are complete
        afterwards. The limit of deferred changes is shared by `groups`.
        """
        if self.is_void or not self.pieces:
            return
        self.pieces.sort(key=lambda piece: piece[0])
        ordered = [
            (chunk, _without_truncated(load_batch(piece), chunk, self.last_truncates))
            for chunk, piece in self.pieces
        ]
        self.pieces.clear()
        if self.moved:
            moved = np.concatenate(self.moved)
            ordered = [(chunk, self.notes.defer(chunk, piece, moved)) for chunk, piece in ordered]
            if self.notes.exceeds_defer_limit(groups):
                self.notes.invalidate_round()
                return
        net = _fold([piece for _, piece in ordered], rules.with_truncated(self.last_truncates))
        yield from net if rules.nulls is None else rules.nulls.apply(net, self.notes.missing)


def fold_deferred(
    notes: ChunkFacts, facts: WindowFacts, rules: FoldRules, *, share: int = 0, shares: int = 1
) -> Iterator[pa.RecordBatch]:
    """The net changes (NET) of a share of a window's deferred changes, ordered by target.

    `notes` are those of all chunks, and `facts` the window's.
    """
    ordered = [
        _without_truncated(load_batch(pa.py_buffer(changes.piece)), changes.chunk, notes.last_truncates)
        for changes in sorted(notes.deferred, key=lambda changes: changes.chunk)
    ]
    changes = pa.concat_batches(ordered)
    # Folded changes have the position of the last one.
    order = np.argsort(int_array(changes["commit_lsn"]), kind="stable")
    lineages = _common_lineages(int_array(changes["lineage"]), facts)[order]
    in_share = (lineages.view(np.uint64) % np.uint64(shares)) == share
    changes, lineages = take_rows(changes, order[in_share]), lineages[in_share]
    column = INPUT.get_field_index("lineage")
    changes = changes.set_column(column, "lineage", pa.array(lineages))
    yield from _fold([changes], rules.with_truncated(notes.last_truncates))


def _fold(ordered: list[pa.RecordBatch], rules: FoldRules) -> Iterator[pa.RecordBatch]:
    if rules.revision is None:
        return _fold_ordered(ordered, rules)
    return rules.revision.revise(ordered, rules, _fold_ordered)


def _fold_ordered(ordered: list[pa.RecordBatch], rules: FoldRules) -> Iterator[pa.RecordBatch]:
    """The net changes (NET) of changes (INPUT) in order within each lineage; empties the list."""
    lineages, targets = (
        np.concatenate([int_array(piece[name]) for piece in ordered]) for name in ("lineage", "target")
    )
    order = np.argsort(lineages, kind="stable")
    if len(targets) and (targets[0] != targets).any():
        order = order[np.argsort(targets[order], kind="stable")]
    folder = RunFolder(rules)
    for batch in _take_in_order(ordered, order):
        yield from folder.feed(batch)
    yield from folder.finish()


def _take_in_order(pieces: list[pa.RecordBatch], order: Int64s) -> Iterator[pa.RecordBatch]:
    """The rows of all `pieces`, concatenated, in `order`; empties the list."""
    size = sum(piece.nbytes for piece in pieces)
    rows = max(1, min(_ROWS_PER_FOLD, _BYTES_PER_FOLD * len(order) // max(1, size)))
    slices = [order[start : start + rows] for start in range(0, len(order), rows)]
    if size > _MAX_CONCAT_BYTES:
        table = pa.Table.from_batches(pieces)
        pieces.clear()
        for rows_taken in slices:
            yield from table.take(pa.array(rows_taken)).combine_chunks().to_batches()
        return
    whole = pa.concat_batches(pieces)
    pieces.clear()
    for rows_taken in slices:
        yield take_rows(whole, rows_taken)


def read_partitions(batches: Iterable[pa.RecordBatch]) -> dict[int, ShufflePartition]:
    """The parts by their numbers, from all of their batches (PIECES)."""
    partitions: dict[int, ShufflePartition] = {}
    for batch in batches:
        columns = (batch["part"].to_pylist(), batch["chunk"].to_pylist(), batch["piece"])
        for part_number, chunk, piece in zip(*columns, strict=True):
            partition = partitions.setdefault(part_number, ShufflePartition())
            if chunk == _FACTS:
                partition.notes.add(ChunkFacts.load(piece.as_py()))
            elif chunk == _VOID:
                partition.is_void = True
            elif chunk == _MOVED:
                partition.moved.append(np.frombuffer(piece.as_py(), dtype=np.int64))
            elif chunk == _TRUNCATED:
                pairs = np.frombuffer(piece.as_py(), dtype=np.int64).reshape(-1, 2)
                add_last_truncates(
                    partition.last_truncates, {int(target): int(last) for target, last in pairs}
                )
            else:
                partition.pieces.append((chunk, piece.as_buffer()))
    return partitions


def _key_hashes(targets: Int64s, keys: pa.ListArray) -> Int64s:
    # Here, not at the top: the driver, which only plans, need not load or compile the kernel.
    from cdc_replay.arrow.key_hash import hash_keys  # noqa: PLC0415

    return hash_keys(targets, keys)
