"""The same fold, vectorised: batches of changes sorted by lineage become batches of net changes.

A *run* is the changes of one lineage. Ordinary runs are folded all at once, by position. They have one key,
and every change is possible after the one before it:

| run                   | net             | values merged over |
|-----------------------|-----------------|--------------------|
| U…                    | UPDATE          | all                |
| D or U…D, ending in D | DELETE          |                    |
| D or U…D, then … I U… | DELETE, INSERT  | from the last I    |
| I U…                  | INSERT          | all                |
| I …D, ending in D     | NOTHING         |                    |
| I …D, then … I U…     | NOTHING, INSERT | from the last I    |

where merging takes, per column, the last change that sent it. Every other run (a key that moves, conflicts
inside the window, tables without a key) goes change by change through `replay.compact.fold_reference`, which
defines the result.

The net changes of contingent runs (`replay.compact.fold_reference`) are in batches of their own, with the
changes that they come from (`cdc_replay.replay.contingent_changes`).

A run may span batches. What is carried from one batch to the next is its net effect so far, written as at
most three changes, or the state of its reference fold, with its changes compressed: a key with a million
changes that does not move needs no more memory than one with three.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import Bools, Int64s, ascii_bytes, int_array
from cdc_replay.arrow.take import take_rows
from cdc_replay.model.frames import ChangeKind, ConflictKind, NetKind
from cdc_replay.model.subscription import ConflictPolicy
from cdc_replay.replay.compact.fold_reference import (
    Key,
    KeyedFold,
    KeylessFold,
    NetChange,
    RoutedChange,
    fold,
)
from cdc_replay.replay.contingent_changes import dumped, with_changes

_TEXTS: Final = pa.list_(pa.string())
_LONGEST_EFFECT: Final = 2
"""Changes that it takes at most to have the effect of any ordinary run: I and D, or U and D."""

INPUT: Final = pa.schema(
    [
        ("target", pa.int32()),
        ("lineage", pa.int64()),
        ("commit_lsn", pa.int64()),
        ("kind", pa.string()),
        ("search_key", _TEXTS),
        ("new_key", _TEXTS),
        ("values", _TEXTS),
        ("kinds", pa.string()),
        ("ordinal", pa.int64()),
        ("weight", pa.int32()),
    ]
)
"""What is folded: sorted by target, lineage and position; `weight` is how many UPDATEs a row stands for.

`ordinal` orders the INSERTs of the window as the log does; of other changes it is not looked at.
"""

OUTPUT: Final = pa.schema(
    [
        ("target", pa.int32()),
        ("kind", pa.string()),
        ("base_key", _TEXTS),
        ("values", _TEXTS),
        ("kinds", pa.string()),
        ("update_missing", pa.int32()),
        ("delete_missing", pa.int32()),
        ("last_lsn", pa.int64()),
        ("born", pa.int64()),
        ("conflicts", pa.string()),
    ]
)
"""`model.frames.NET` in Arrow's types. No map: Spark takes 40 µs for each, even for a NULL one."""

_I, _U, _D = (ord(kind.value) for kind in (ChangeKind.INSERT, ChangeKind.UPDATE, ChangeKind.DELETE))
_NULL, _TEXT, _UNKNOWN = b"nt-"


@dataclass(frozen=True, slots=True)
class FoldRules:
    """What the fold needs to know of the targets, by their index; picklable."""

    policy: ConflictPolicy
    keyless: frozenset[int]
    truncated: frozenset[int]
    by_leaf: frozenset[int] = frozenset()
    """Those of which only apply can fold the changes (`SubscribedTable.is_by_leaf`): all are contingent."""

    def with_truncated(self, targets: Iterable[int]) -> FoldRules:
        """The same, where these targets are truncated too."""
        return replace(self, truncated=self.truncated.union(targets))


@dataclass(frozen=True, slots=True)
class _Unfolded:
    """Changes that are left as they are; a net change without effect stands for them."""

    first: NetChange
    last_lsn: int
    is_contingent: bool = True
    conflicts: Mapping[ConflictKind, int] = field(default_factory=dict)

    @classmethod
    def of(cls, changes: pa.RecordBatch) -> _Unfolded:
        """Of these (INPUT); there must be one."""
        first = next(changes_in(changes.slice(0, 1)))
        return cls(NetChange(NetKind.NOTHING, first.search_key or first.new_key or ()), first.commit_lsn)

    def net(self) -> Iterator[NetChange]:
        """What stands for them."""
        yield self.first


_Open: TypeAlias = KeyedFold | KeylessFold | _Unfolded


@dataclass(slots=True)
class RunFolder:
    """Folds a sorted stream of INPUT batches; call `feed` for each batch, then `finish`."""

    rules: FoldRules
    _carried: pa.RecordBatch | None = None
    _open: _Open | None = None
    _open_run: tuple[int, int] = field(default=(0, 0))
    _open_changes: list[pa.Buffer] = field(default_factory=list)
    """The changes of the open run, as they may have to be folded once more."""

    def feed(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The net changes of all lineages that end before the last row of `batch`."""
        if self._carried is not None:
            batch = pa.concat_batches([self._carried, batch])
            self._carried = None
        start = 0
        if self._open is not None:
            start = self._continue_open(self._open, batch)
            if start == batch.num_rows:
                return
            yield self._close_open(self._open)
        last = int(_run_starts(batch)[-1]) if batch.num_rows else 0
        if start < last:
            yield from fold_batch(batch.slice(start, last - start), self.rules)
        self._carry(batch.slice(max(start, last)))

    def finish(self) -> Iterator[pa.RecordBatch]:
        """The net changes of the last lineage."""
        if self._open is not None:
            yield self._close_open(self._open)
        if self._carried is not None:
            yield from fold_batch(self._carried, self.rules)
            self._carried = None

    def _carry(self, run: pa.RecordBatch) -> None:
        if run.num_rows <= 1:
            self._carried = run if run.num_rows else None
            return
        target, lineage = run["target"][0].as_py(), run["lineage"][0].as_py()
        if target in self.rules.by_leaf:
            self._keep_open(_Unfolded.of(run), run, target, lineage)
            return
        piece = _RunBatch.of(run, target in self.rules.truncated, target in self.rules.keyless)
        if piece.ordinary[0]:
            found = [
                change
                for net in fold_batch(run, self.rules)
                for change in _as_changes(net, np.full(net.num_rows, lineage, np.int64))
            ]
            self._carried = _joined(found)
            return
        self._keep_open(_fold_rows(run, target, self.rules), run, target, lineage)

    def _keep_open(self, opened: _Open, run: pa.RecordBatch, target: int, lineage: int) -> None:
        self._open = opened
        self._open_run = (target, lineage)
        self._open_changes = [dumped(run)]

    def _continue_open(self, opened: _Open, batch: pa.RecordBatch) -> int:
        """Feed the rows that still belong to the open run; the number of them."""
        target, lineage = self._open_run
        other = (int_array(batch["target"]) != target) | (int_array(batch["lineage"]) != lineage)
        count = int(other.argmax()) if other.any() else batch.num_rows
        if count:
            self._open_changes.append(dumped(batch.slice(0, count)))
        if not isinstance(opened, _Unfolded):
            for change in changes_in(batch.slice(0, count)):
                opened.apply(change)
        return count

    def _close_open(self, opened: _Open) -> pa.RecordBatch:
        self._open = None
        changes, self._open_changes = self._open_changes, []
        net = net_batch(net_rows(opened, self._open_run[0]))
        return with_changes(net, changes) if opened.is_contingent else net


def fold_batch(batch: pa.RecordBatch, rules: FoldRules) -> Iterator[pa.RecordBatch]:
    """The net changes (OUTPUT) of whole runs (INPUT)."""
    targets = int_array(batch["target"])
    borders = [0, *(np.flatnonzero(np.diff(targets)) + 1).tolist(), len(targets)]
    for start, end in itertools.pairwise(borders):
        if start < end:
            yield from _fold_target(batch.slice(start, end - start), int(targets[start]), rules)


def _fold_target(batch: pa.RecordBatch, target: int, rules: FoldRules) -> Iterator[pa.RecordBatch]:
    if target in rules.by_leaf:
        yield with_changes(net_batch(net_rows(_Unfolded.of(batch), target)), [dumped(batch)])
        return
    piece = _RunBatch.of(batch, target in rules.truncated, target in rules.keyless)
    if piece.ordinary.any():
        yield from _fold_ordinary(piece, target)
    rows: list[dict[str, Any]] = []
    contingent: list[dict[str, Any]] = []
    kept = np.zeros(batch.num_rows, dtype=np.bool_)
    for run in np.flatnonzero(~piece.ordinary):
        start, end = int(piece.starts[run]), int(piece.ends[run])
        folded = _fold_rows(batch.slice(start, end - start), target, rules)
        kept[start:end] = folded.is_contingent
        (contingent if folded.is_contingent else rows).extend(net_rows(folded, target))
    if rows:
        yield net_batch(rows)
    if contingent:
        yield with_changes(net_batch(contingent), [dumped(take_rows(batch, np.flatnonzero(kept)))])


@dataclass(frozen=True, slots=True)
class _RunBatch:
    """The runs of one target: rows `starts[i]:ends[i]`, `ordinary[i]` if the table above covers them."""

    batch: pa.RecordBatch
    kinds: npt.NDArray[np.uint8]
    starts: Int64s
    ends: Int64s
    ordinary: Bools
    is_truncated: bool

    @classmethod
    def of(cls, batch: pa.RecordBatch, is_truncated: bool, is_keyless: bool) -> _RunBatch:
        kinds = ascii_bytes(batch["kind"])
        starts = _run_starts(batch)
        ends = np.append(starts[1:], len(kinds))
        odd = _odd_changes(batch, kinds, starts, is_truncated)
        ordinary = ~np.logical_or.reduceat(odd, starts)
        if is_keyless:
            ordinary &= ends - starts == 1
        return cls(batch, kinds, starts, ends, ordinary, is_truncated)


def _odd_changes(
    batch: pa.RecordBatch, kinds: npt.NDArray[np.uint8], starts: Int64s, is_truncated: bool
) -> Bools:
    """Changes that are not of the run's one key, or not possible after the change before them."""
    first = np.zeros(len(kinds), dtype=bool)
    first[starts] = True
    before = np.roll(kinds, 1)
    impossible = np.where(before == _D, kinds != _I, kinds == _I)
    impossible[first] = (kinds[first] != _I) if is_truncated else False
    key = pc.coalesce(batch["search_key"], batch["new_key"])
    other_key = np.zeros(len(kinds), dtype=bool)
    other_key[1:] = _differ(key.slice(1), key.slice(0, len(kinds) - 1))
    moved = (kinds == _U) & _differ(key, pc.coalesce(batch["new_key"], key))
    odd: Bools = impossible | (other_key & ~first) | moved
    return odd


def _differ(left: pa.ListArray, right: pa.ListArray) -> Bools:
    """Whether two key columns differ, row by row; NULL elements are equal to each other."""
    differ = np.zeros(len(left), dtype=bool)
    width = 0 if len(left) == 0 else len(left[0])
    for position in range(width):
        a, b = pc.list_element(left, position), pc.list_element(right, position)
        one_null = pc.xor(pc.is_null(a), pc.is_null(b))
        unequal = pc.or_(one_null, pc.fill_null(pc.not_equal(a, b), False))
        differ |= unequal.to_numpy(zero_copy_only=False)
    return differ


def _fold_ordinary(piece: _RunBatch, target: int) -> Iterator[pa.RecordBatch]:
    starts, ends = piece.starts, piece.ends
    rows = np.arange(len(piece.kinds))
    lasts = ends - 1
    last_insert = np.maximum.reduceat(np.where(piece.kinds == _I, rows, -1), starts)
    first_delete = np.minimum.reduceat(np.where(piece.kinds == _D, rows, len(rows)), starts)
    deletes = first_delete < len(rows)
    inserted_first = piece.kinds[starts] == _I
    there = piece.kinds[lasts] != _D
    updates = _updates_before(piece, np.minimum(first_delete, ends))

    parts = _NetRowBuilder(piece, target)
    runs = np.flatnonzero(piece.ordinary & ~inserted_first & deletes)
    yield from parts.rows(NetKind.DELETE, runs, starts[runs], update_missing=updates[runs])
    runs = np.flatnonzero(piece.ordinary & ~inserted_first & ~deletes)
    yield from parts.rows(NetKind.UPDATE, runs, starts[runs], update_missing=updates[runs])
    if not piece.is_truncated:
        runs = np.flatnonzero(piece.ordinary & inserted_first & deletes)
        yield from parts.rows(NetKind.NOTHING, runs, starts[runs])
    runs = np.flatnonzero(piece.ordinary & there & (last_insert >= 0))
    yield from parts.rows(NetKind.INSERT, runs, last_insert[runs])


def _updates_before(piece: _RunBatch, borders: Int64s) -> Int64s:
    """How many UPDATEs each run has before its border."""
    weights = np.where(piece.kinds == _U, int_array(piece.batch["weight"]), 0)
    total = np.concatenate([[0], np.cumsum(weights)])
    counted: Int64s = total[borders] - total[piece.starts]
    return counted


@dataclass(frozen=True, slots=True)
class _NetRowBuilder:
    """Builds the net rows of one kind for some of the runs."""

    piece: _RunBatch
    target: int

    def rows(
        self, kind: NetKind, runs: Int64s, first: Int64s, *, update_missing: Int64s | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Net rows of `runs`; key and merged values start at the changes `first`."""
        if len(runs) == 0:
            return
        count, batch = len(runs), self.piece.batch
        last = self.piece.ends[runs] - 1
        key = batch["new_key" if kind in {NetKind.INSERT, NetKind.NOTHING} else "search_key"]
        if kind in {NetKind.INSERT, NetKind.UPDATE}:
            values, kinds = _merged(batch, first, last)
        else:
            values, kinds = pa.nulls(count, _TEXTS), pa.nulls(count, pa.string())
        is_insert = kind is NetKind.INSERT
        born = batch["ordinal"].take(pa.array(first)) if is_insert else pa.nulls(count, pa.int64())
        missing = np.zeros(count, np.int32) if update_missing is None else update_missing
        columns = [
            pa.array(np.full(count, self.target, np.int32)),
            pa.array([kind.value], pa.string()).take(pa.array(np.zeros(count, np.int32))),
            key.take(pa.array(first)),
            values,
            kinds,
            pa.array(missing.astype(np.int32)),
            pa.array(np.full(count, int(kind is NetKind.DELETE), np.int32)),
            batch["commit_lsn"].take(pa.array(last)),
            born,
            pa.nulls(count, pa.string()),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=OUTPUT)


def _merged(batch: pa.RecordBatch, first: Int64s, last: Int64s) -> tuple[pa.Array, pa.Array]:
    """Values and kinds of the rows that the changes `first` to `last` make, one row per pair."""
    if (first == last).all():
        rows = pa.array(first)
        return batch["values"].take(rows), batch["kinds"].take(rows)
    width = len(batch["kinds"][int(first[0])].as_py())
    unknown = pa.scalar(chr(_UNKNOWN) * width)
    kinds = ascii_bytes(pc.fill_null(batch["kinds"], unknown)).reshape(-1, width)
    sent = (kinds == _NULL) | (kinds == _TEXT)
    positions = np.where(sent, np.arange(len(kinds))[:, None], -1)
    chosen = np.maximum.accumulate(positions, axis=0)[last]
    chosen = np.where(chosen >= first[:, None], chosen, first[:, None])
    columns = np.arange(width)
    offsets = batch["values"].offsets.to_numpy()[:-1]
    texts = batch["values"].values.take(pa.array((offsets[chosen] + columns).ravel()))
    borders = np.arange(len(first) + 1, dtype=np.int32) * width
    values = pa.ListArray.from_arrays(pa.array(borders), texts)
    merged = np.ascontiguousarray(kinds[chosen, columns])
    merged_kinds = pa.StringArray.from_buffers(len(first), pa.py_buffer(borders), pa.py_buffer(merged))
    return values, merged_kinds


def _fold_rows(run: pa.RecordBatch, target: int, rules: FoldRules) -> KeyedFold | KeylessFold:
    return fold(
        changes_in(run),
        policy=rules.policy,
        is_keyed=target not in rules.keyless,
        is_truncated=target in rules.truncated,
    )


def changes_in(batch: pa.RecordBatch) -> Iterator[RoutedChange]:
    """The rows of a batch (INPUT), one by one."""
    for row in batch.to_pylist():
        yield RoutedChange(
            ChangeKind(row["kind"]),
            row["commit_lsn"],
            _key(row["search_key"]),
            _key(row["new_key"]),
            _key(row["values"]),
            row["kinds"],
            row["weight"],
            row["ordinal"],
        )


def _key(texts: list[str | None] | None) -> Key | None:
    return None if texts is None else tuple(texts)


def net_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Net changes (OUTPUT) of what `net_rows` gives."""
    return pa.RecordBatch.from_pylist(rows, schema=OUTPUT)


def net_rows(folded: _Open, target: int) -> list[dict[str, Any]]:
    """What a lineage of the target comes to, as rows of OUTPUT."""
    rows = [_net_row(change, target, folded.last_lsn) for change in folded.net()]
    if rows and folded.conflicts:
        conflicts = {kind.value: count for kind, count in folded.conflicts.items()}
        rows[0]["conflicts"] = json.dumps(conflicts)
    return rows


def _net_row(change: NetChange, target: int, last_lsn: int) -> dict[str, Any]:
    return {
        "target": target,
        "kind": change.kind.value,
        "base_key": change.base_key,
        "values": change.values,
        "kinds": change.kinds,
        "update_missing": change.update_missing,
        "delete_missing": change.delete_missing,
        "last_lsn": last_lsn,
        "born": change.born,
        "conflicts": None,
    }


def combine_map_side(
    batch: pa.RecordBatch, rules: FoldRules, lineages_of: Callable[[Int64s, pa.ListArray], Int64s]
) -> pa.RecordBatch:
    """`batch` (INPUT, in the order of the log) with as few changes as have the same effect.

    Ordinary runs of more than two changes become the shortest that do the same; where there are few of them,
    nothing is done. `lineages_of` gives the lineages of keys by their targets.
    """
    lineages = int_array(batch["lineage"])
    order = np.argsort(lineages, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(lineages[order])) + 1, len(order))
    lengths = np.diff(ends, prepend=0)
    if len(order) == 0 or 2 * lengths[lengths > _LONGEST_EFFECT].sum() < len(order):
        return batch
    targets = int_array(batch["target"])[order]
    ordered = take_rows(batch, order[np.argsort(targets, kind="stable")])
    targets = int_array(ordered["target"])
    borders = [0, *(np.flatnonzero(np.diff(targets)) + 1).tolist(), len(targets)]
    found: list[pa.RecordBatch] = []
    for start, end in itertools.pairwise(borders):
        target = int(targets[start])
        piece = _RunBatch.of(
            ordered.slice(start, end - start), target in rules.truncated, target in rules.keyless
        )
        foldable = piece.ordinary & (piece.ends - piece.starts > _LONGEST_EFFECT)
        if rules.policy is ConflictPolicy.SKIP:
            # An INSERT that is skipped because of what came before does not take later UPDATEs along.
            foldable &= piece.kinds[piece.starts] != _I
        piece = replace(piece, ordinary=foldable)
        is_left = np.repeat(~piece.ordinary, piece.ends - piece.starts)
        found.append(piece.batch.filter(pa.array(is_left)))
        for net in _fold_ordinary(piece, target):
            lineages = lineages_of(int_array(net["target"]), net["base_key"])
            found += _as_changes(net, lineages)
    return _joined(found)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema=INPUT)


def _as_changes(net: pa.RecordBatch, lineages: Int64s) -> Iterator[pa.RecordBatch]:
    """Net changes of one kind (OUTPUT) as the shortest ordinary runs that have them, in order (INPUT).

    | net     | changes                                    |
    |---------|--------------------------------------------|
    | INSERT  | I                                          |
    | UPDATE  | U                                          |
    | DELETE  | U for the UPDATEs that it may miss, then D |
    | NOTHING | I, then D                                  |
    """
    no_key, weight = pa.nulls(net.num_rows, _TEXTS), net["update_missing"]
    one = pa.array(np.ones(net.num_rows, np.int32))

    def changes(kind: ChangeKind, search: pa.Array, new: pa.Array, weight: pa.Array) -> pa.RecordBatch:
        letters = pa.array([kind.value], pa.string()).take(pa.array(np.zeros(net.num_rows, np.int32)))
        valued = [net["values"], net["kinds"]] if kind is not ChangeKind.DELETE else [no_key, _no_text(net)]
        position = [net["target"], pa.array(lineages), net["last_lsn"]]
        columns = [*position, letters, search, new, *valued, net["born"], weight]
        return pa.RecordBatch.from_arrays(columns, schema=INPUT)

    key, kinds = net["base_key"], set(net["kind"].unique().to_pylist())
    if kinds & {NetKind.INSERT.value, NetKind.NOTHING.value}:
        yield changes(ChangeKind.INSERT, no_key, key, one)
    if kinds & {NetKind.UPDATE.value, NetKind.DELETE.value}:
        updated = changes(ChangeKind.UPDATE, key, key, weight)
        yield updated.filter(pc.greater(weight, 0))
    if kinds & {NetKind.DELETE.value, NetKind.NOTHING.value}:
        yield changes(ChangeKind.DELETE, key, no_key, one)


def _no_text(net: pa.RecordBatch) -> pa.Array:
    return pa.nulls(net.num_rows, pa.string())


def _run_starts(batch: pa.RecordBatch) -> Int64s:
    targets, lineages = int_array(batch["target"]), int_array(batch["lineage"])
    if len(targets) == 0:
        return np.zeros(0, np.int64)
    new = (np.diff(targets) != 0) | (np.diff(lineages) != 0)
    return np.concatenate([[0], np.flatnonzero(new) + 1])
