"""The frames of the fold, INPUT and OUTPUT, and their rows as values of `fold_reference`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeAlias

import pyarrow as pa

from cdc_replay.arrow.frame_schema import arrow_schema
from cdc_replay.model.frames import NET, ChangeKind, ConflictKind, NetKind
from cdc_replay.model.subscription import ConflictPolicy
from cdc_replay.replay.compact.fold_reference import Key, KeyedFold, KeylessFold, NetChange, RoutedChange
from cdc_replay.replay.compact.unsent_nulls import NullRule

TEXTS: Final = pa.list_(pa.string())

INPUT: Final = pa.schema(
    [
        ("target", pa.int32()),
        ("lineage", pa.int64()),
        ("commit_lsn", pa.int64()),
        ("kind", pa.string()),
        ("search_key", TEXTS),
        ("new_key", TEXTS),
        ("values", TEXTS),
        ("kinds", pa.string()),
        ("ordinal", pa.int64()),
        ("weight", pa.int32()),
    ]
)
"""Input of the fold, sorted by target, lineage and position; `weight` is the number of UPDATEs in a row.

`ordinal` orders the INSERTs of the window as the log does; it is ignored for other changes.
"""

OUTPUT: Final = arrow_schema(NET)
"""Without a map: Spark takes 40 µs for each, even if it is NULL."""

FoldChanges: TypeAlias = "Callable[[list[pa.RecordBatch], FoldRules], Iterator[pa.RecordBatch]]"
"""The net changes (NET) of changes (INPUT), which are in order within each lineage; empties the list."""


class Revision(Protocol):
    """Other net changes than those of the fold: what a backfill does; picklable."""

    def revise(
        self, changes: list[pa.RecordBatch], rules: FoldRules, fold: FoldChanges
    ) -> Iterator[pa.RecordBatch]:
        """The net changes (NET) of changes (INPUT), of which there must be one."""
        ...


@dataclass(frozen=True, slots=True)
class FoldRules:
    """Rules of the fold, by index of the target; picklable."""

    policy: ConflictPolicy
    keyless: frozenset[int]
    truncated: frozenset[int]
    by_leaf: frozenset[int] = frozenset()
    """Targets whose changes only apply can fold (`SubscribedTable.is_by_leaf`): all are contingent."""
    revision: Revision | None = None
    nulls: NullRule | None = None
    """What is stored for values that are not found, in a window that has such (R4.6)."""

    def with_truncated(self, targets: Iterable[int]) -> FoldRules:
        """The same rules, with more truncated targets."""
        return replace(self, truncated=self.truncated.union(targets))


@dataclass(frozen=True, slots=True)
class Unfolded:
    """Changes that are not folded; an empty net change stands for them."""

    first: NetChange
    last_lsn: int
    is_contingent: bool = True
    conflicts: Mapping[ConflictKind, int] = field(default_factory=dict)

    @classmethod
    def from_changes(cls, changes: pa.RecordBatch) -> Unfolded:
        """Represents these changes (INPUT), of which there must be one."""
        first = next(changes_in(changes.slice(0, 1)))
        return cls(NetChange(NetKind.TRANSIENT, first.search_key or first.new_key or ()), first.commit_lsn)

    def net(self) -> Iterator[NetChange]:
        """The net change that stands for them."""
        yield self.first


OpenFold: TypeAlias = KeyedFold | KeylessFold | Unfolded


def changes_in(batch: pa.RecordBatch) -> Iterator[RoutedChange]:
    """The rows of a batch (INPUT) as values."""
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
    """Net changes (OUTPUT) of the rows that `net_rows` returns."""
    return pa.RecordBatch.from_pylist(rows, schema=OUTPUT)


def net_rows(folded: OpenFold, target: int) -> list[dict[str, Any]]:
    """The net changes of a lineage of the target, as rows of OUTPUT."""
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
        "insert_ordinal": change.insert_ordinal,
        "conflicts": None,
    }
