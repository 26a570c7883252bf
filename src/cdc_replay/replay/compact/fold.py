"""The fold of `replay.compact.fold_reference`, vectorised: sorted changes become net changes, batch by batch.

A *run* is the changes of one lineage. Ordinary runs are folded all at once (`replay.compact.ordinary_runs`).
Every other run (a key that changes, conflicts inside the window, tables without a key) goes change by change
through the reference fold, which defines the result.

Net changes of contingent runs are in batches of their own, with the changes that they come from
(`cdc_replay.replay.contingent_changes`).

A run may span batches. Carried over to the next batch is its net effect so far, as at most three changes, or
the state of its reference fold, with its changes compressed: a key with a million changes that does not move
needs no more memory than one with three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import Int64s, equal_runs, int_array
from cdc_replay.arrow.take import take_rows
from cdc_replay.model.frames import ChangeKind, NetKind
from cdc_replay.model.subscription import ConflictPolicy
from cdc_replay.replay.compact.fold_frames import (
    INPUT,
    TEXTS,
    FoldRules,
    OpenFold,
    Unfolded,
    changes_in,
    net_batch,
    net_rows,
)
from cdc_replay.replay.compact.fold_reference import KeyedFold, KeylessFold, fold
from cdc_replay.replay.compact.ordinary_runs import RunBatch, fold_ordinary, run_starts
from cdc_replay.replay.contingent_changes import dump_batch, with_changes

_MAX_EFFECT_CHANGES: Final = 2
"""The longest of the shortest runs with the effect of any ordinary run: I and D, or U and D."""


@dataclass(slots=True)
class RunFolder:
    """Folds a sorted stream of INPUT batches; call `feed` for each batch, then `finish`."""

    rules: FoldRules
    _carried: pa.RecordBatch | None = None
    _open: OpenFold | None = None
    _open_run: tuple[int, int] = field(default=(0, 0))
    _open_changes: list[pa.Buffer] = field(default_factory=list)
    """The changes of the open run, which may have to be folded again."""

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
        last = int(run_starts(batch)[-1]) if batch.num_rows else 0
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
            self._keep_open(Unfolded.from_changes(run), run, target, lineage)
            return
        runs = RunBatch.from_batch(run, target in self.rules.truncated, target in self.rules.keyless)
        if runs.ordinary[0]:
            changes = [
                change
                for net in fold_batch(run, self.rules)
                for change in _net_as_changes(net, np.full(net.num_rows, lineage, np.int64))
            ]
            self._carried = _concat(changes)
            return
        self._keep_open(_fold_rows(run, target, self.rules), run, target, lineage)

    def _keep_open(self, folded: OpenFold, run: pa.RecordBatch, target: int, lineage: int) -> None:
        self._open = folded
        self._open_run = (target, lineage)
        self._open_changes = [dump_batch(run)]

    def _continue_open(self, folded: OpenFold, batch: pa.RecordBatch) -> int:
        """Fold the rows that still belong to the open run; returns their number."""
        target, lineage = self._open_run
        is_other_run = (int_array(batch["target"]) != target) | (int_array(batch["lineage"]) != lineage)
        count = int(is_other_run.argmax()) if is_other_run.any() else batch.num_rows
        if count:
            self._open_changes.append(dump_batch(batch.slice(0, count)))
        if not isinstance(folded, Unfolded):
            for change in changes_in(batch.slice(0, count)):
                folded.apply(change)
        return count

    def _close_open(self, folded: OpenFold) -> pa.RecordBatch:
        self._open = None
        changes, self._open_changes = self._open_changes, []
        net = net_batch(net_rows(folded, self._open_run[0]))
        return with_changes(net, changes) if folded.is_contingent else net


def fold_batch(batch: pa.RecordBatch, rules: FoldRules) -> Iterator[pa.RecordBatch]:
    """The net changes (OUTPUT) of whole runs (INPUT)."""
    targets = int_array(batch["target"])
    for start, end in equal_runs(targets):
        yield from _fold_target(batch.slice(start, end - start), int(targets[start]), rules)


def _fold_target(batch: pa.RecordBatch, target: int, rules: FoldRules) -> Iterator[pa.RecordBatch]:
    if target in rules.by_leaf:
        yield with_changes(net_batch(net_rows(Unfolded.from_changes(batch), target)), [dump_batch(batch)])
        return
    runs = RunBatch.from_batch(batch, target in rules.truncated, target in rules.keyless)
    if runs.ordinary.any():
        yield from fold_ordinary(runs, target)
    rows: list[dict[str, Any]] = []
    contingent: list[dict[str, Any]] = []
    is_contingent = np.zeros(batch.num_rows, dtype=np.bool_)
    for run in np.flatnonzero(~runs.ordinary):
        start, end = int(runs.starts[run]), int(runs.ends[run])
        folded = _fold_rows(batch.slice(start, end - start), target, rules)
        is_contingent[start:end] = folded.is_contingent
        (contingent if folded.is_contingent else rows).extend(net_rows(folded, target))
    if rows:
        yield net_batch(rows)
    if contingent:
        yield with_changes(
            net_batch(contingent), [dump_batch(take_rows(batch, np.flatnonzero(is_contingent)))]
        )


def _fold_rows(run: pa.RecordBatch, target: int, rules: FoldRules) -> KeyedFold | KeylessFold:
    return fold(
        changes_in(run),
        policy=rules.policy,
        is_keyed=target not in rules.keyless,
        is_truncated=target in rules.truncated,
    )


def combine_map_side(
    batch: pa.RecordBatch,
    order: Int64s,
    rules: FoldRules,
    lineages_of: Callable[[Int64s, pa.ListArray], Int64s],
) -> pa.RecordBatch | None:
    """Fewer changes (INPUT) than in `batch`, which is in log order, with the same effect.

    Ordinary runs of more than two changes become the shortest equivalent runs; None if there are few of them.
    `order` has the rows by lineage; `lineages_of` gives the lineages of keys by their targets.
    """
    lineages = int_array(batch["lineage"])
    ends = np.append(np.flatnonzero(np.diff(lineages[order])) + 1, len(order))
    lengths = np.diff(ends, prepend=0)
    if len(order) == 0 or 2 * lengths[lengths > _MAX_EFFECT_CHANGES].sum() < len(order):
        return None
    targets = int_array(batch["target"])[order]
    ordered = take_rows(batch, order[np.argsort(targets, kind="stable")])
    targets = int_array(ordered["target"])
    combined: list[pa.RecordBatch] = []
    for start, end in equal_runs(targets):
        target = int(targets[start])
        runs = RunBatch.from_batch(
            ordered.slice(start, end - start), target in rules.truncated, target in rules.keyless
        )
        foldable = runs.ordinary & (runs.ends - runs.starts > _MAX_EFFECT_CHANGES)
        if rules.policy is ConflictPolicy.SKIP:
            # If an earlier row makes apply skip the INSERT, later UPDATEs still apply to that row.
            foldable &= runs.kinds[runs.starts] != ord(ChangeKind.INSERT.value)
        runs = replace(runs, ordinary=foldable)
        is_remaining = np.repeat(~runs.ordinary, runs.ends - runs.starts)
        combined.append(runs.batch.filter(pa.array(is_remaining)))
        for net in fold_ordinary(runs, target):
            lineages = lineages_of(int_array(net["target"]), net["base_key"])
            combined += _net_as_changes(net, lineages)
    return _concat(combined)


def _concat(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema=INPUT)


def _net_as_changes(net: pa.RecordBatch, lineages: Int64s) -> Iterator[pa.RecordBatch]:
    """Net changes of one kind (OUTPUT) as the shortest ordinary runs with their effect, in order (INPUT).

    | net       | changes                                    |
    |-----------|--------------------------------------------|
    | INSERT    | I                                          |
    | UPDATE    | U                                          |
    | DELETE    | U for the UPDATEs that it may miss, then D |
    | TRANSIENT | I, then D                                  |
    """
    no_key, weight = pa.nulls(net.num_rows, TEXTS), net["update_missing"]
    ones = pa.array(np.ones(net.num_rows, np.int32))

    def changes(kind: ChangeKind, search: pa.Array, new: pa.Array, weight: pa.Array) -> pa.RecordBatch:
        letters = pa.array([kind.value], pa.string()).take(pa.array(np.zeros(net.num_rows, np.int32)))
        valued = [net["values"], net["kinds"]] if kind is not ChangeKind.DELETE else [no_key, _no_text(net)]
        position = [net["target"], pa.array(lineages), net["last_lsn"]]
        columns = [*position, letters, search, new, *valued, net["insert_ordinal"], weight]
        return pa.RecordBatch.from_arrays(columns, schema=INPUT)

    key, kinds = net["base_key"], set(net["kind"].unique().to_pylist())
    if kinds & {NetKind.INSERT.value, NetKind.TRANSIENT.value}:
        yield changes(ChangeKind.INSERT, no_key, key, ones)
    if kinds & {NetKind.UPDATE.value, NetKind.DELETE.value}:
        updated = changes(ChangeKind.UPDATE, key, key, weight)
        yield updated.filter(pc.greater(weight, 0))
    if kinds & {NetKind.DELETE.value, NetKind.TRANSIENT.value}:
        yield changes(ChangeKind.DELETE, key, no_key, ones)


def _no_text(net: pa.RecordBatch) -> pa.Array:
    return pa.nulls(net.num_rows, pa.string())
