"""What the chunks of a window contribute to its facts, and the changes that they defer."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import Int64s, ascii_bytes, int_array
from cdc_replay.arrow.list_comparison import lists_differ
from cdc_replay.arrow.take import take_rows
from cdc_replay.model.frames import ChangeKind, Truncation
from cdc_replay.model.key_links import TableKey, linked
from cdc_replay.replay.compact.unsent_nulls import MissingValues
from cdc_replay.replay.compact.window_facts import RESTART_IDENTITY, WindowFacts, truncations_in_order
from cdc_replay.replay.contingent_changes import dump_batch

_MAX_DEFERRED_ROWS: Final = 10_000
_MAX_DEFERRED_BYTES: Final = 4 << 20
"""What a task or a part may defer, for all groups together; with more, the round is void.

To void the round of a million changes for a few hundred moved keys costs 12 to 28 % of the time.
"""

_I, _U, _, _T = (ord(kind.value) for kind in ChangeKind)


@dataclass(frozen=True, slots=True)
class DeferredChanges:
    """Changes (INPUT) of a chunk, dumped, that wait until all moves of the window are known."""

    chunk: int
    rows: int
    piece: bytes


@dataclass(slots=True)
class ChunkFacts:
    """What the chunks of a window contribute to its facts; `counts` are those of its routing.

    `last_truncates` has the last chunk with a TRUNCATE of each target that has one. `missing` are rows that
    are inserted without values, `net` the number of net changes by kind, where they are only counted. In a
    void round staged changes do not count, and nothing is deferred.
    """

    truncations: set[Truncation] = field(default_factory=set)
    last_truncates: dict[int, int] = field(default_factory=dict)
    moves: set[tuple[TableKey, TableKey]] = field(default_factory=set)
    unsent: set[tuple[int, int, int]] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    deferred: list[DeferredChanges] = field(default_factory=list)
    missing: MissingValues = field(default_factory=MissingValues)
    net: Counter[str] = field(default_factory=Counter)
    is_void: bool = False

    def add(self, other: ChunkFacts) -> None:
        """Add the facts of other chunks."""
        self.truncations |= other.truncations
        add_last_truncates(self.last_truncates, other.last_truncates)
        self.moves |= other.moves
        self.unsent |= other.unsent
        self.counts += other.counts
        self.deferred += other.deferred
        self.missing.add(other.missing)
        self.net += other.net
        if self.is_void or other.is_void:
            self.invalidate_round()

    def invalidate_round(self) -> None:
        """Void the round."""
        self.is_void = True
        self.deferred.clear()

    def exceeds_defer_limit(self, groups: int) -> bool:
        """More is deferred than one of so many groups may send through the driver."""
        rows = sum(changes.rows for changes in self.deferred)
        size_bytes = sum(len(changes.piece) for changes in self.deferred)
        return rows * groups > _MAX_DEFERRED_ROWS or size_bytes * groups > _MAX_DEFERRED_BYTES

    def defer(self, chunk: int, changes: pa.RecordBatch, moved: Int64s) -> pa.RecordBatch:
        """Defer the changes (INPUT) of a chunk whose keys have these hashes; returns the others."""
        is_moved = np.isin(int_array(changes["lineage"]), moved)
        if not is_moved.any():
            return changes
        matching = take_rows(changes, np.flatnonzero(is_moved))
        self.deferred.append(DeferredChanges(chunk, matching.num_rows, dump_batch(matching).to_pybytes()))
        return take_rows(changes, np.flatnonzero(~is_moved))

    def dump(self) -> bytes:
        """The facts, serialized for another process of the same job."""
        return pickle.dumps(self)

    @classmethod
    def merge_dumps(cls, dumps: Iterable[bytes]) -> Self:
        """The facts of all chunks."""
        notes = cls()
        for dump in dumps:
            notes.add(cls.load(dump))
        return notes

    @classmethod
    def load(cls, dump: bytes) -> ChunkFacts:
        """Facts that another process of this job has serialized."""
        notes: ChunkFacts = pickle.loads(dump)  # noqa: S301 - written by `dump`, in this job
        return notes

    def window_facts(self) -> WindowFacts:
        """The facts of the window."""
        # NULLs cannot be compared.
        moves = sorted(self.moves, key=repr)
        return WindowFacts(
            truncations_in_order(self.truncations), tuple(linked(moves)), tuple(sorted(self.unsent))
        )


def add_last_truncates(last_truncates: dict[int, int], more: Mapping[int, int]) -> None:
    """Keep the last chunk of each target."""
    for target, chunk in more.items():
        last_truncates[target] = max(chunk, last_truncates.get(target, chunk))


def chunk_facts(routed: pa.RecordBatch, chunk: int, counts: Counter[str]) -> ChunkFacts:
    """The facts of a chunk (ROUTED, and the counts of its routing)."""
    kinds = ascii_bytes(routed["kind"])
    is_update = kinds == _U
    moves = is_update & lists_differ(routed["search_key"], routed["new_key"])
    entered = (kinds == _I) & routed["transformed"].to_numpy(zero_copy_only=False)
    if entered.any():
        entered &= pc.fill_null(pc.match_substring(routed["kinds"], "u"), False).to_numpy(
            zero_copy_only=False
        )
    relevant = np.flatnonzero(moves | entered | (kinds == _T))
    facts = ChunkFacts(counts=counts)
    columns = ["target", "kind", "commit_lsn", "seq", "truncate_flags", "search_key", "new_key"]
    for row in routed.select(columns).take(pa.array(relevant)).to_pylist():
        target, position = row["target"], (row["commit_lsn"], row["seq"])
        match ChangeKind(row["kind"]):
            case ChangeKind.TRUNCATE:
                restart = bool((row["truncate_flags"] or 0) & RESTART_IDENTITY)
                facts.truncations.add(Truncation(target, *position, restart))
                facts.last_truncates[target] = chunk
            case ChangeKind.UPDATE:
                facts.moves.add(((target, tuple(row["search_key"])), (target, tuple(row["new_key"]))))
            case _:
                facts.unsent.add((target, *position))
    return facts
