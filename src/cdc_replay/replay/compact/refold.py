"""The fold of contingent lineages (`fold_reference`), given which rows the subscriber has."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdc_replay.arrow.arrays import equal_runs, int_array
from cdc_replay.model.frames import ConflictKind
from cdc_replay.model.subscription import ConflictPolicy
from cdc_replay.replay.compact.fold_frames import changes_in, net_batch, net_rows
from cdc_replay.replay.compact.fold_reference import Key, RoutedChange, fold
from cdc_replay.replay.contingent_changes import Refolded

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class ContingentChanges:
    """The changes of contingent lineages of one target, by lineage."""

    target: int
    lineages: Sequence[Sequence[RoutedChange]]
    policy: ConflictPolicy
    is_keyed: bool

    @property
    def keys(self) -> Sequence[Key]:
        """The keys of the changes; without a key of the target, once per row."""
        keys = [key for lineage in self.lineages for change in lineage for key in _keys(change)]
        return list(dict.fromkeys(keys)) if self.is_keyed else keys

    def _row_keys(self, lineage: Sequence[RoutedChange], same: Mapping[Key, Key]) -> Iterator[Key]:
        yield from (same.get(key, key) for change in lineage for key in _keys(change))

    def fold_again(self, rows: Mapping[Key, int], same: Mapping[Key, Key]) -> Refolded:
        """Their net changes, given the target's number of rows per key.

        `same` maps keys to the ones that `rows` has for them.
        """
        net: list[dict[str, Any]] = []
        conflicts: collections.Counter[ConflictKind] = collections.Counter()
        conflict_keys: list[tuple[ConflictKind, Key]] = []
        for lineage in self.lineages:
            known_rows = {key: rows.get(key, 0) for key in self._row_keys(lineage, same)}
            folded = fold(
                lineage,
                policy=self.policy,
                is_keyed=self.is_keyed,
                is_truncated=False,
                known=known_rows,
                same=same,
            )
            conflicts.update(folded.conflicts)
            conflict_keys.extend(folded.conflict_keys.items())
            # Returned apart: there may be no net change to carry them.
            folded.conflicts.clear()
            net += net_rows(folded, self.target)
        return Refolded(net_batch(net), conflicts, conflict_keys)


def contingent_changes(
    changes: pa.RecordBatch, *, policy: ConflictPolicy, is_keyed: bool
) -> ContingentChanges:
    """Changes (INPUT) of one target, in which those of one lineage are adjacent."""
    lineages = equal_runs(int_array(changes["lineage"]))
    runs = [list(changes_in(changes.slice(start, end - start))) for start, end in lineages]
    return ContingentChanges(changes["target"][0].as_py(), runs, policy, is_keyed)


def _keys(change: RoutedChange) -> Iterator[Key]:
    yield from (key for key in (change.search_key, change.new_key) if key is not None)
