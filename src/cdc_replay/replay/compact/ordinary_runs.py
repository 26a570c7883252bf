"""The fold of ordinary runs, vectorised: all runs of one target at once, by position.

An ordinary run has one key, and each of its changes is possible after the one before it:

| run                   | net               | values merged over |
|-----------------------|-------------------|--------------------|
| U…                    | UPDATE            | all                |
| D or U…D, ending in D | DELETE            |                    |
| D or U…D, then … I U… | DELETE, INSERT    | from the last I    |
| I U…                  | INSERT            | all                |
| I …D, ending in D     | TRANSIENT         |                    |
| I …D, then … I U…     | TRANSIENT, INSERT | from the last I    |

Merging takes, per column, the last change that sent it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import Bools, Bytes, Int64s, ascii_bytes, int_array
from cdc_replay.arrow.list_comparison import lists_differ
from cdc_replay.arrow.take import take_lists
from cdc_replay.model.frames import ChangeKind, NetKind
from cdc_replay.replay.compact.fold_frames import OUTPUT, TEXTS

_I, _U, _D = (ord(kind.value) for kind in (ChangeKind.INSERT, ChangeKind.UPDATE, ChangeKind.DELETE))

_NULL, _TEXT, _UNKNOWN = b"nt-"


@dataclass(frozen=True, slots=True)
class RunBatch:
    """The runs of one target: rows `starts[i]:ends[i]`; `ordinary[i]` if the run is ordinary."""

    batch: pa.RecordBatch
    kinds: npt.NDArray[np.uint8]
    starts: Int64s
    ends: Int64s
    ordinary: Bools
    is_truncated: bool

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch, is_truncated: bool, is_keyless: bool) -> RunBatch:
        """The runs of `batch` (INPUT), which has one target."""
        kinds = ascii_bytes(batch["kind"])
        starts = run_starts(batch)
        ends = np.append(starts[1:], len(kinds))
        irregular = _irregular_changes(batch, kinds, starts, is_truncated)
        ordinary = ~np.logical_or.reduceat(irregular, starts)
        if is_keyless:
            ordinary &= ends - starts == 1
        return cls(batch, kinds, starts, ends, ordinary, is_truncated)


def _irregular_changes(
    batch: pa.RecordBatch, kinds: npt.NDArray[np.uint8], starts: Int64s, is_truncated: bool
) -> Bools:
    """Changes of another key than the run's, or not possible after the change before them."""
    first = np.zeros(len(kinds), dtype=bool)
    first[starts] = True
    before = np.roll(kinds, 1)
    impossible = np.where(before == _D, kinds != _I, kinds == _I)
    impossible[first] = (kinds[first] != _I) if is_truncated else False
    key = pc.coalesce(batch["search_key"], batch["new_key"])
    other_key = np.zeros(len(kinds), dtype=bool)
    other_key[1:] = lists_differ(key.slice(1), key.slice(0, len(kinds) - 1))
    moved = (kinds == _U) & lists_differ(key, batch["new_key"])
    irregular: Bools = impossible | (other_key & ~first) | moved
    return irregular


def fold_ordinary(piece: RunBatch, target: int) -> Iterator[pa.RecordBatch]:
    """The net changes (OUTPUT) of the ordinary runs."""
    starts, ends = piece.starts, piece.ends
    rows = np.arange(len(piece.kinds))
    lasts = ends - 1
    last_insert = np.maximum.reduceat(np.where(piece.kinds == _I, rows, -1), starts)
    first_delete = np.minimum.reduceat(np.where(piece.kinds == _D, rows, len(rows)), starts)
    deletes = first_delete < len(rows)
    starts_with_insert = piece.kinds[starts] == _I
    exists_after = piece.kinds[lasts] != _D
    updates = _updates_before(piece, np.minimum(first_delete, ends))

    builder = _NetRowBuilder(piece, target)
    runs = np.flatnonzero(piece.ordinary & ~starts_with_insert & deletes)
    yield from builder.rows(NetKind.DELETE, runs, starts[runs], update_missing=updates[runs])
    runs = np.flatnonzero(piece.ordinary & ~starts_with_insert & ~deletes)
    yield from builder.rows(NetKind.UPDATE, runs, starts[runs], update_missing=updates[runs])
    if not piece.is_truncated:
        runs = np.flatnonzero(piece.ordinary & starts_with_insert & deletes)
        yield from builder.rows(NetKind.TRANSIENT, runs, starts[runs])
    runs = np.flatnonzero(piece.ordinary & exists_after & (last_insert >= 0))
    yield from builder.rows(NetKind.INSERT, runs, last_insert[runs])


def _updates_before(piece: RunBatch, borders: Int64s) -> Int64s:
    weights = np.where(piece.kinds == _U, int_array(piece.batch["weight"]), 0)
    total = np.concatenate([[0], np.cumsum(weights)])
    updates: Int64s = total[borders] - total[piece.starts]
    return updates


@dataclass(frozen=True, slots=True)
class _NetRowBuilder:
    piece: RunBatch
    target: int

    def rows(
        self, kind: NetKind, runs: Int64s, first: Int64s, *, update_missing: Int64s | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Net rows of `runs`; key and merged values start at the changes `first`."""
        if len(runs) == 0:
            return
        count, batch = len(runs), self.piece.batch
        last = self.piece.ends[runs] - 1
        key = batch["new_key" if kind in {NetKind.INSERT, NetKind.TRANSIENT} else "search_key"]
        if kind in {NetKind.INSERT, NetKind.UPDATE}:
            values, kinds = _latest_values(batch, first, last)
        else:
            values, kinds = pa.nulls(count, TEXTS), pa.nulls(count, pa.string())
        is_insert = kind is NetKind.INSERT
        insert_ordinal = batch["ordinal"].take(pa.array(first)) if is_insert else pa.nulls(count, pa.int64())
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
            insert_ordinal,
            pa.nulls(count, pa.string()),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=OUTPUT)


def _latest_values(batch: pa.RecordBatch, first: Int64s, last: Int64s) -> tuple[pa.Array, pa.Array]:
    """Values and kinds of the rows after the changes `first` to `last`, one row per pair."""
    latest_kinds = batch["kinds"].take(pa.array(last))
    if not latest_kinds.null_count and _is_sent(ascii_bytes(latest_kinds)).all():
        return take_lists(batch["values"], last), latest_kinds
    width = len(batch["kinds"][int(first[0])].as_py())
    unknown = pa.scalar(chr(_UNKNOWN) * width)
    kinds = ascii_bytes(pc.fill_null(batch["kinds"], unknown)).reshape(-1, width)
    positions = np.where(_is_sent(kinds), np.arange(len(kinds))[:, None], -1)
    last_sent = np.maximum.accumulate(positions, axis=0)[last]
    last_sent = np.where(last_sent >= first[:, None], last_sent, first[:, None])
    columns = np.arange(width)
    offsets = batch["values"].offsets.to_numpy()[:-1]
    texts = batch["values"].values.take(pa.array((offsets[last_sent] + columns).ravel()))
    borders = np.arange(len(first) + 1, dtype=np.int32) * width
    values = pa.ListArray.from_arrays(pa.array(borders), texts)
    merged = np.ascontiguousarray(kinds[last_sent, columns])
    merged_kinds = pa.StringArray.from_buffers(len(first), pa.py_buffer(borders), pa.py_buffer(merged))
    return values, merged_kinds


def _is_sent(kinds: Bytes) -> Bools:
    sent: Bools = (kinds == _NULL) | (kinds == _TEXT)
    return sent


def run_starts(batch: pa.RecordBatch) -> Int64s:
    """The first row of each run."""
    targets, lineages = int_array(batch["target"]), int_array(batch["lineage"])
    if len(targets) == 0:
        return np.zeros(0, np.int64)
    new = (np.diff(targets) != 0) | (np.diff(lineages) != 0)
    return np.concatenate([[0], np.flatnonzero(new) + 1])
