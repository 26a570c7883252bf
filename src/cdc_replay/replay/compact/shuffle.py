"""Changes on their way to their lineage, as packed batches: what is shuffled in place of rows.

    executor, one run of row groups     ROUTED batch → lineage of each row → one piece per part, and a note
    Spark                               brings the pieces of a part together
    executor, one part                  pieces → sorted by lineage → folded (`replay.compact.fold`) → NET
    batches

A piece is a batch in Arrow's own form, compressed, so Spark moves a few values in place of many: four times
faster than a shuffle and a sort of rows. Its rows are sorted by lineage, those of one in the order of the
log, and `chunk` tells the order of the pieces.

Before they leave, the changes of a chunk that has several of the same key are folded once. So a key with a
million changes is a handful of rows per chunk for the executor that it comes to.

The lineage of a key is its number, but keys that are linked by a move need a common one, which takes
knowledge of the whole window. A note says what a chunk has of that: moves, TRUNCATEs, rows that enter with
values that were not sent.

Changes of keys that some chunk moves are *set aside*, and folded together when all moves are known:

| in                          | are set aside                  | because                                     |
|-----------------------------|--------------------------------|---------------------------------------------|
| a chunk that moves the keys | as they are, in order          | they depend on each other                   |
| another chunk, by the part  | as they came, perhaps folded   | there the keys have nothing to do with each |
| that they have come to      |                                | other, so their order does not matter       |

That is a few rows of a window, as a rule. Where it is many, the round is void: a task that notes it makes no
more pieces, and tells all parts that none are to be folded. They are made again with what is known then, the
`WindowFacts`. Where values were not sent that somebody has to look for, the round is void too.

What came before a TRUNCATE of its table does not count. The chunk of the TRUNCATE leaves it out; the parts
are told which chunk that is, and leave out what earlier ones have.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections import Counter
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
    booleans,
    int_array,
    is_valid,
    offsets_from_lengths,
)
from cdc_replay.arrow.take import take_rows
from cdc_replay.model.frames import ChangeKind, Truncation
from cdc_replay.model.key_links import TableKey, linked
from cdc_replay.replay.compact.fold import RunFolder, combine_map_side
from cdc_replay.replay.compact.fold_frames import INPUT, FoldRules
from cdc_replay.replay.compact.key_lineage import RESTART_IDENTITY, WindowFacts, truncations_in_order
from cdc_replay.replay.contingent_changes import dumped, loaded

PIECES: Final = pa.schema([("part", pa.int32()), ("chunk", pa.int32()), ("piece", pa.binary())])
PIECES_DDL: Final = "part int, chunk int, piece binary"
"""A note is a row with chunk -1; one with chunk -2 says that the round is void, one with chunk -3 has the
numbers of keys that are moved, one with chunk -4 the chunks in which targets are truncated."""

ROWS_PER_PART: Final = 200_000
BYTES_PER_PART: Final = 64 << 20
_ROWS_PER_FOLD: Final = 50_000
_BYTES_PER_FOLD: Final = 32 << 20
_MOST_JOINED_BYTES: Final = 1 << 30
"""Offsets of an array reach twice as far."""
_ROW_BITS: Final = 32
_MOST_ROWS_ASIDE: Final = 10_000
_MOST_BYTES_ASIDE: Final = 4 << 20
"""What a task or a part may set aside, for all lanes together; with more, the round is void."""
_ALL_TOGETHER: Final = np.int64(0x5DEECE66D1CE4E5B)
"""The lineage of all changes of a target; it must not be the number of a key that is moved."""
_NOTE: Final = -1
_VOID: Final = -2
_MOVED: Final = -3
_EMPTIED: Final = -4

_I, _U, _D, _T = (ord(kind.value) for kind in ChangeKind)


@dataclass(frozen=True, slots=True)
class DeferredChanges:
    """Changes (INPUT) of a chunk, dumped, that wait until all moves of the window are known."""

    chunk: int
    rows: int
    piece: bytes


@dataclass(slots=True)
class ChunkFacts:
    """What the chunks of a window say of it; `counts` are those of its routing.

    `emptied` has the last chunk with a TRUNCATE of each target that has any. In a void round what is staged
    does not count, and nothing is set aside.
    """

    truncations: set[Truncation] = field(default_factory=set)
    emptied: dict[int, int] = field(default_factory=dict)
    moves: set[tuple[TableKey, TableKey]] = field(default_factory=set)
    unsent: set[tuple[int, int, int]] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    aside: list[DeferredChanges] = field(default_factory=list)
    is_void: bool = False

    def add(self, other: ChunkFacts) -> None:
        """Take over what another chunk, or several, have said."""
        self.truncations |= other.truncations
        _add_emptied(self.emptied, other.emptied)
        self.moves |= other.moves
        self.unsent |= other.unsent
        self.counts += other.counts
        self.aside += other.aside
        if self.is_void or other.is_void:
            self.make_void()

    def make_void(self) -> None:
        """Say that the round counts for nothing."""
        self.is_void = True
        self.aside.clear()

    def exceeds_defer_limit(self, lanes: int) -> bool:
        """More than one of so many lanes may send by the driver."""
        rows = sum(each.rows for each in self.aside)
        size_bytes = sum(len(each.piece) for each in self.aside)
        return rows * lanes > _MOST_ROWS_ASIDE or size_bytes * lanes > _MOST_BYTES_ASIDE

    def defer(self, chunk: int, changes: pa.RecordBatch, moved: Int64s) -> pa.RecordBatch:
        """Keep the changes (INPUT) of a chunk whose keys have these numbers; the others."""
        is_moved = np.isin(int_array(changes["lineage"]), moved)
        if not is_moved.any():
            return changes
        kept = take_rows(changes, np.flatnonzero(is_moved))
        self.aside.append(DeferredChanges(chunk, kept.num_rows, dumped(kept).to_pybytes()))
        return take_rows(changes, np.flatnonzero(~is_moved))

    def dumped(self) -> bytes:
        """These notes, for another process of the same job."""
        return pickle.dumps(self)

    @classmethod
    def joined(cls, dumped: Iterable[bytes]) -> Self:
        """The notes of all chunks together."""
        notes = cls()
        for each in dumped:
            notes.add(cls.of(each))
        return notes

    @classmethod
    def of(cls, dumped: bytes) -> ChunkFacts:
        """Notes that another process of this job has dumped."""
        notes: ChunkFacts = pickle.loads(dumped)  # noqa: S301 - written by `dumped`, in this job
        return notes

    def survey(self) -> WindowFacts:
        """What has to be known of the window."""
        # NULL has no order.
        moves = sorted(self.moves, key=repr)
        return WindowFacts(
            truncations_in_order(self.truncations), tuple(linked(moves)), tuple(sorted(self.unsent))
        )


@dataclass(frozen=True, slots=True)
class PartitionAssignment:
    """How the changes of a window are shared out to `parts`; picklable.

    Each target has a range of the parts, `widths[target]` wide from `firsts[target]` on, over which its
    lineages are spread: as wide as its share of the changes, so that a part has many rows of few targets. For
    each target a part makes a COPY of its own, which costs as much as hundreds of rows.
    """

    parts: int
    firsts: Float64s
    widths: Float64s

    @classmethod
    def of(cls, parts: int, weights: Mapping[int, int]) -> Self:
        """By what each target weighs; there must be one, and each must weigh something."""
        shares = np.zeros(max(weights) + 1, dtype=np.float64)
        for target, weight in weights.items():
            shares[target] = weight
        widths = shares * (parts / shares.sum())
        return cls(parts, np.cumsum(widths) - widths, widths)

    def parts_of(self, targets: Int64s, lineages: Int64s) -> Int64s:
        """The part of each change."""
        # The high bits: a lineage's number is sorted by as a whole.
        share = (lineages.view(np.uint64) >> np.uint64(32)).astype(np.float64) / 2**32
        places = (self.firsts[targets] + self.widths[targets] * share).astype(np.int64)
        return np.minimum(places, self.parts - 1)


@dataclass(frozen=True, slots=True)
class ShuffleWriter:
    """Makes the pieces of one window; picklable.

    `survey` is what is known of the window so far. The first of the parts of `spread` is `first_part`. So
    many `lanes` share the way by the driver.
    """

    rules: FoldRules
    survey: WindowFacts
    first_part: int
    spread: PartitionAssignment
    lanes: int = 1

    def is_void(self, notes: ChunkFacts) -> bool:
        """Whether this round's pieces count for nothing, because something has to be known first."""
        return self.survey.is_empty and (bool(notes.unsent) or notes.exceeds_defer_limit(self.lanes))

    def packed(self, routed: pa.RecordBatch, chunk: int, notes: ChunkFacts) -> pa.RecordBatch:
        """The pieces (PIECES) of a chunk's changes (ROUTED), which are in the order of the log.

        `notes` are the chunk's own. Unless its moves are known already, what they touch is set aside there.
        """
        valid = _still_valid(routed, notes.truncations | {*self.survey.truncations})
        changes = self._with_lineage(routed if valid.all() else routed.filter(pa.array(valid)), chunk)
        if self.survey.is_empty and notes.moves:
            changes = notes.defer(chunk, changes, _moved(notes.moves))
        changes = combine_map_side(changes, self.rules, self._lineages)
        lineages = int_array(changes["lineage"])
        parts = self.spread.parts_of(int_array(changes["target"]), lineages)
        parts = parts.astype(np.min_scalar_type(self.spread.parts))
        # Pieces that are sorted are merged sooner, and read from front to back.
        order = np.argsort(lineages, kind="stable")
        order = order[np.argsort(parts[order], kind="stable")]
        changes = take_rows(changes, order)
        counts = np.bincount(parts, minlength=self.spread.parts)
        ends = np.cumsum(counts)
        there = np.flatnonzero(counts)
        pieces = [changes.slice(int(ends[part] - counts[part]), int(counts[part])) for part in there]
        return _pieces((self.first_part + there).tolist(), chunk, [dumped(piece) for piece in pieces])

    def write_facts(self, notes: ChunkFacts) -> Iterator[pa.RecordBatch]:
        """Notes (PIECES) of a task on this lane, and what each part has to be told of them."""
        if self.is_void(notes):
            notes.make_void()
            yield self._told(_VOID, b"")
        elif self.survey.is_empty:
            if notes.moves:
                yield self._told(_MOVED, _moved(notes.moves).tobytes())
            if notes.emptied:
                yield self._told(_EMPTIED, np.array([*notes.emptied.items()], dtype=np.int64).tobytes())
        yield note_piece(notes, self.first_part)

    def _told(self, what: int, content: bytes) -> pa.RecordBatch:
        parts = range(self.first_part, self.first_part + self.spread.parts)
        return _pieces(parts, what, [content] * len(parts))

    def _with_lineage(self, routed: pa.RecordBatch, chunk: int) -> pa.RecordBatch:
        key = pc.coalesce(routed["search_key"], routed["new_key"])
        lineages = self._lineages(int_array(routed["target"]), key)
        known = {name: routed[name] for name in INPUT.names if name in routed.schema.names}
        # Chunks are numbered in the order of the log, and none has more rows than these bits can count.
        ordinals = np.arange(routed.num_rows, dtype=np.int64) + (chunk << _ROW_BITS)
        weights = np.ones(routed.num_rows, dtype=np.int32)
        made = {"lineage": lineages, "ordinal": ordinals, "weight": weights}
        columns = known | {name: pa.array(array) for name, array in made.items()}
        return pa.RecordBatch.from_arrays([columns[name] for name in INPUT.names], schema=INPUT)

    def _lineages(self, targets: Int64s, keys: pa.ListArray) -> Int64s:
        found = _linked(_key_numbers(targets, keys), self.survey)
        if self.rules.by_leaf:
            # Which keys are one row's is not known here.
            found = np.where(np.isin(targets, list(self.rules.by_leaf)), _ALL_TOGETHER, found)
        return found


def _still_valid(routed: pa.RecordBatch, truncations: Iterable[Truncation]) -> Bools:
    """Row changes (of ROUTED) that no later TRUNCATE of their table has made void."""
    valid: Bools = ascii_bytes(routed["kind"]) != _T
    last = {truncation.target: truncation for truncation in truncations_in_order(truncations)}
    targets, lsns, seqs = (int_array(routed[name]) for name in ("target", "commit_lsn", "seq"))
    for each in last.values():
        earlier = (lsns < each.commit_lsn) | ((lsns == each.commit_lsn) & (seqs <= each.seq))
        valid &= ~((targets == each.target) & earlier)
    return valid


def _counting(changes: pa.RecordBatch, chunk: int, emptied: Mapping[int, int]) -> pa.RecordBatch:
    """Those changes (INPUT) of a chunk that no TRUNCATE in a later one has made void."""
    void = [target for target, last in emptied.items() if chunk < last]
    if not void:
        return changes
    is_void = np.isin(int_array(changes["target"]), void)
    return take_rows(changes, np.flatnonzero(~is_void)) if is_void.any() else changes


def _add_emptied(emptied: dict[int, int], more: Mapping[int, int]) -> None:
    for target, chunk in more.items():
        emptied[target] = max(chunk, emptied.get(target, chunk))


def _linked(own: Int64s, survey: WindowFacts) -> Int64s:
    """The lineages of keys with these numbers."""
    if not survey.lineages:
        return own
    moved, common = _common(survey)
    at = np.minimum(np.searchsorted(moved, own), len(moved) - 1)
    return np.where(moved[at] == own, common[at], own)


def _moved(moves: Iterable[tuple[TableKey, TableKey]]) -> Int64s:
    """The numbers of keys that a row has left or reached; there must be some."""
    targets, keys = zip(*itertools.chain.from_iterable(moves), strict=True)
    return _key_numbers(np.array(targets, np.int64), pa.array(keys, pa.list_(pa.string())))


@functools.lru_cache(maxsize=1)
def _common(survey: WindowFacts) -> tuple[Int64s, Int64s]:
    """The numbers of keys that are linked to others, ascending, and the number that they have in common."""
    targets, keys, groups = zip(*survey.lineages, strict=True)
    own = _key_numbers(np.array(targets, np.int64), pa.array(keys, pa.list_(pa.string())))
    first: dict[int, int] = {}
    common = np.array(
        [first.setdefault(group, int(number)) for group, number in zip(groups, own, strict=True)]
    )
    order = np.argsort(own)
    return own[order], common[order]


def chunk_facts(routed: pa.RecordBatch, chunk: int, counts: Counter[str]) -> ChunkFacts:
    """What a chunk (ROUTED, and the counts of its routing) says of its window."""
    kinds = ascii_bytes(routed["kind"])
    is_update = kinds == _U
    moves = is_update & _differ(routed["search_key"], routed["new_key"])
    entered = (kinds == _I) & routed["transformed"].to_numpy(zero_copy_only=False)
    if entered.any():
        entered &= pc.fill_null(pc.match_substring(routed["kinds"], "u"), False).to_numpy(
            zero_copy_only=False
        )
    wanted = np.flatnonzero(moves | entered | (kinds == _T))
    notes = ChunkFacts(counts=counts)
    columns = ["target", "kind", "commit_lsn", "seq", "truncate_flags", "search_key", "new_key"]
    for row in routed.select(columns).take(pa.array(wanted)).to_pylist():
        target, position = row["target"], (row["commit_lsn"], row["seq"])
        match ChangeKind(row["kind"]):
            case ChangeKind.TRUNCATE:
                restart = bool((row["truncate_flags"] or 0) & RESTART_IDENTITY)
                notes.truncations.add(Truncation(target, *position, restart))
                notes.emptied[target] = chunk
            case ChangeKind.UPDATE:
                notes.moves.add(((target, tuple(row["search_key"])), (target, tuple(row["new_key"]))))
            case _:
                notes.unsent.add((target, *position))
    return notes


def note_piece(notes: ChunkFacts, part: int) -> pa.RecordBatch:
    """Notes on their way to a part, as a row of PIECES."""
    return _pieces([part], _NOTE, [notes.dumped()])


def _pieces(parts: Sequence[int], chunk: int, contents: Sequence[bytes | pa.Buffer]) -> pa.RecordBatch:
    # Arrow never lets go of buffers of which it makes an array by itself.
    offsets = offsets_from_lengths(np.array([len(each) for each in contents], dtype=np.int64))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(contents))]
    arrays = [
        pa.array(parts, pa.int32()),
        pa.array(np.full(len(parts), chunk, dtype=np.int32)),
        pa.Array.from_buffers(pa.binary(), len(contents), buffers),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=PIECES)


@dataclass(slots=True)
class ShufflePartition:
    """What has come to one part."""

    notes: ChunkFacts = field(default_factory=ChunkFacts)
    is_void: bool = False
    moved: list[Int64s] = field(default_factory=list)
    """The numbers of keys that chunks have moved."""
    emptied: dict[int, int] = field(default_factory=dict)
    """The last chunk with a TRUNCATE, by target."""
    pieces: list[tuple[int, pa.Buffer]] = field(default_factory=list)
    """Changes (INPUT), compressed until they are folded, by the number of their chunk, in any order."""

    def net(self, rules: FoldRules, *, lanes: int = 1) -> Iterator[pa.RecordBatch]:
        """The net changes (NET) of the part, ordered by target; can be asked once; none in a void round.

        Changes of moved keys are not folded but set aside in the notes, which are complete then; so many
        `lanes` share the way by the driver.
        """
        if self.is_void or not self.pieces:
            return
        self.pieces.sort(key=lambda each: each[0])
        ordered = [(chunk, _counting(loaded(piece), chunk, self.emptied)) for chunk, piece in self.pieces]
        self.pieces.clear()
        if self.moved:
            moved = np.concatenate(self.moved)
            ordered = [(chunk, self.notes.defer(chunk, piece, moved)) for chunk, piece in ordered]
            if self.notes.exceeds_defer_limit(lanes):
                self.notes.make_void()
                return
        yield from _folded([piece for _, piece in ordered], rules.with_truncated(self.emptied))


def fold_deferred(
    notes: ChunkFacts, survey: WindowFacts, rules: FoldRules, *, share: int = 0, shares: int = 1
) -> Iterator[pa.RecordBatch]:
    """The net changes (NET) of a share of what a whole window has set aside, ordered by target.

    `notes` are all of the window, and `survey` what they come to.
    """
    ordered = [
        _counting(loaded(pa.py_buffer(each.piece)), each.chunk, notes.emptied)
        for each in sorted(notes.aside, key=lambda each: each.chunk)
    ]
    changes = pa.concat_batches(ordered)
    # What was folded has the position of its last change.
    order = np.argsort(int_array(changes["commit_lsn"]), kind="stable")
    lineages = _linked(int_array(changes["lineage"]), survey)[order]
    mine = (lineages.view(np.uint64) % np.uint64(shares)) == share
    changes, lineages = take_rows(changes, order[mine]), lineages[mine]
    place = INPUT.get_field_index("lineage")
    changes = changes.set_column(place, "lineage", pa.array(lineages))
    yield from _folded([changes], rules.with_truncated(notes.emptied))


def _folded(ordered: list[pa.RecordBatch], rules: FoldRules) -> Iterator[pa.RecordBatch]:
    """The net changes (NET) of changes (INPUT) that are in order within each lineage; empties the list."""
    lineages, targets = (
        np.concatenate([int_array(piece[name]) for piece in ordered]) for name in ("lineage", "target")
    )
    order = np.argsort(lineages, kind="stable")
    if len(targets) and (targets[0] != targets).any():
        order = order[np.argsort(targets[order], kind="stable")]
    folder = RunFolder(rules)
    for batch in _in_order(ordered, order):
        yield from folder.feed(batch)
    yield from folder.finish()


def _in_order(pieces: list[pa.RecordBatch], order: Int64s) -> Iterator[pa.RecordBatch]:
    """The rows of all `pieces`, numbered from the first to the last of them, in `order`; empties the list."""
    size = sum(piece.nbytes for piece in pieces)
    rows = max(1, min(_ROWS_PER_FOLD, _BYTES_PER_FOLD * len(order) // max(1, size)))
    slices = [order[start : start + rows] for start in range(0, len(order), rows)]
    if size > _MOST_JOINED_BYTES:
        table = pa.Table.from_batches(pieces)
        pieces.clear()
        for each in slices:
            yield from table.take(pa.array(each)).combine_chunks().to_batches()
        return
    whole = pa.concat_batches(pieces)
    pieces.clear()
    for each in slices:
        yield take_rows(whole, each)


def read_partitions(batches: Iterable[pa.RecordBatch]) -> dict[int, ShufflePartition]:
    """The parts by their numbers, from batches (PIECES) with all that has come to them."""
    found: dict[int, ShufflePartition] = {}
    for batch in batches:
        columns = (batch["part"].to_pylist(), batch["chunk"].to_pylist(), batch["piece"])
        for number, chunk, piece in zip(*columns, strict=True):
            part = found.setdefault(number, ShufflePartition())
            if chunk == _NOTE:
                part.notes.add(ChunkFacts.of(piece.as_py()))
            elif chunk == _VOID:
                part.is_void = True
            elif chunk == _MOVED:
                part.moved.append(np.frombuffer(piece.as_py(), dtype=np.int64))
            elif chunk == _EMPTIED:
                pairs = np.frombuffer(piece.as_py(), dtype=np.int64).reshape(-1, 2)
                _add_emptied(part.emptied, {int(target): int(last) for target, last in pairs})
            else:
                part.pieces.append((chunk, piece.as_buffer()))
    return found


def _key_numbers(targets: Int64s, keys: pa.ListArray) -> Int64s:
    # Here, not at the top: the driver, which only plans, need not load or compile the kernel.
    from cdc_replay.arrow.key_hash import key_numbers  # noqa: PLC0415

    return key_numbers(targets, keys)


def _differ(left: pa.ListArray, right: pa.ListArray) -> Bools:
    """Whether two lists of one length differ, where neither is NULL; NULL elements count as equal."""
    both = is_valid(left) & is_valid(right)
    rows = pa.array(np.flatnonzero(both))
    lists, others = left.take(rows), right.take(rows)
    ours, theirs = lists.flatten(), others.flatten()
    unequal = booleans(pc.not_equal(ours, theirs)) | (is_valid(ours) != is_valid(theirs))
    count = offsets_from_lengths(unequal)
    ends = offsets_from_lengths(int_array(pc.list_value_length(lists)))
    differ = np.zeros(len(left), dtype=np.bool_)
    differ[both] = count[ends[1:]] > count[ends[:-1]]
    return differ
