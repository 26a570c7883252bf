"""What must be known of a whole window before its changes can be grouped by lineage, and folded.

The lineage of a key is its hash. Only UPDATEs that change a key link two keys; keys that are linked, directly
or through others, get one common lineage. Different lineages may have the same hash: the fold compares keys,
never hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.model.frames import Truncation
from cdc_replay.model.subscription import ConflictPolicy, SubscribedTable
from cdc_replay.replay.compact.fold_frames import FoldRules
from cdc_replay.replay.compact.fold_reference import Key

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

    @property
    def unsent_targets(self) -> frozenset[int]:
        """The targets of `unsent`."""
        return frozenset(target for target, _, _ in self.unsent)


NO_FACTS: Final = WindowFacts((), ())


def truncations_in_order(truncations: Iterable[Truncation]) -> tuple[Truncation, ...]:
    """Truncations of a window, in log order."""
    return tuple(
        sorted(truncations, key=lambda truncation: (truncation.commit_lsn, truncation.seq, truncation.target))
    )


def fold_rules(tables: Sequence[SubscribedTable], facts: WindowFacts, policy: ConflictPolicy) -> FoldRules:
    """The fold's rules for the tables of a window."""
    return FoldRules(
        policy,
        frozenset(table.index for table in tables if not table.is_keyed),
        frozenset(truncation.target for truncation in facts.truncations),
        frozenset(table.index for table in tables if table.is_by_leaf),
    )
