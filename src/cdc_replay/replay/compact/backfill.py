"""Net changes for a target that may hold other rows than the log says.

| a backfill into      | revision | its target holds                                    |
|----------------------|----------|-----------------------------------------------------|
| another database     | `Upsert` | no rows; with those before the window, no revision  |
| the subscriber again | `Repair` | the rows after the window, except damaged ones      |

An UPDATE that matches no row is skipped (R8.4), although the log may hold the whole row. So an UPDATE that
carries every column becomes an INSERT that overwrites. One that does not (`u`, `-`) stays an UPDATE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import int_array
from cdc_replay.arrow.take import take_rows
from cdc_replay.model.frames import GIVEN_UP, NetKind
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.subscription import SubscribedTable
from cdc_replay.replay.compact.fold_frames import FoldChanges, FoldRules, net_batch
from cdc_replay.replay.compact.fold_reference import Key

_Row: TypeAlias = dict[str, Any]
"""A row of NET."""

_DELETE: Final = {
    "kind": NetKind.DELETE.value,
    "values": None,
    "kinds": None,
    "insert_ordinal": None,
    "conflicts": None,
    "update_missing": 0,
}
_ROWS_PER_BATCH: Final = 10_000
_NOT_SENT: Final = f"u-{GIVEN_UP}"


@dataclass(frozen=True, slots=True)
class Upsert:
    """Complete UPDATEs of `tables` as INSERTs, to be applied with policy `overwrite`; picklable.

    If the UPDATE moved the row, the old key is deleted. Changes of targets without a key of their own stay as
    they are.
    """

    tables: Mapping[int, SubscribedTable]

    def revise(
        self, changes: list[pa.RecordBatch], rules: FoldRules, fold: FoldChanges
    ) -> Iterator[pa.RecordBatch]:
        """The net changes (NET) of changes (INPUT)."""
        for net in fold(changes, rules):
            yield net_batch([row for net_row in net.to_pylist() for row in self._revised(net_row)])

    def _revised(self, row: _Row) -> Iterator[_Row]:
        table = self.tables.get(row["target"])
        if table is None or not table.has_own_key or not _is_complete_update(row):
            yield row
            return
        key = _key_after(row, table)
        if key != tuple(row["base_key"]):
            yield row | _DELETE
        yield row | {"kind": NetKind.INSERT.value, "base_key": key, "update_missing": 0}


@dataclass(frozen=True, slots=True)
class Repair:
    """What brings a target that has had the window to the state at its end, for some rows; picklable.

    These are the rows that a change up to `upto` concerns, under any of their keys: the lineages with such a
    change, and all of a truncated target. Each of their keys ends with the row that the log has for it, or
    with none: a key that a row only passed through must be empty as well. A row of the targets in `whole` is
    inserted if it is missing. All `tables` must have keys.
    """

    upto: Lsn
    tables: Mapping[int, SubscribedTable]
    whole: frozenset[int]

    def revise(
        self, changes: list[pa.RecordBatch], rules: FoldRules, fold: FoldChanges
    ) -> Iterator[pa.RecordBatch]:
        """The net changes (NET) of changes (INPUT)."""
        touched = self._touched(changes, rules)
        empty = dict.fromkeys(key for batch in touched for key in _keys(batch))
        for net in fold(touched, rules):
            rows = [row for net_row in net.to_pylist() for row in self._revised(net_row)]
            for row in rows:
                empty.pop((row["target"], row["base_key"]), None)
            yield net_batch(rows)
        deletes = [
            _DELETE | {"target": target, "base_key": key, "delete_missing": 0, "last_lsn": 0}
            for target, key in empty
        ]
        for start in range(0, len(deletes), _ROWS_PER_BATCH):
            yield net_batch(deletes[start : start + _ROWS_PER_BATCH])

    def _touched(self, changes: list[pa.RecordBatch], rules: FoldRules) -> list[pa.RecordBatch]:
        touched = np.concatenate(
            [
                int_array(batch["lineage"])[int_array(batch["commit_lsn"]) <= self.upto.value]
                for batch in changes
            ]
        )
        truncated = list(rules.truncated)
        is_touched = (
            np.isin(int_array(batch["lineage"]), touched) | np.isin(int_array(batch["target"]), truncated)
            for batch in changes
        )
        return [
            take_rows(batch, np.flatnonzero(mask)) for batch, mask in zip(changes, is_touched, strict=True)
        ]

    def _revised(self, row: _Row) -> Iterator[_Row]:
        is_insert = row["kind"] == NetKind.INSERT.value
        if not is_insert and row["kind"] != NetKind.UPDATE.value:
            return
        revised = row | {"base_key": _key_after(row, self.tables[row["target"]])}
        if is_insert or (row["target"] in self.whole and _is_complete_update(row)):
            revised |= {"kind": NetKind.INSERT.value, "update_missing": 0}
        yield revised


def _keys(changes: pa.RecordBatch) -> Iterator[tuple[int, Key]]:
    """Targets and keys of changes (INPUT), before and after each."""
    for name in ("search_key", "new_key"):
        keyed = changes.filter(pc.is_valid(changes[name]))
        for target, key in zip(keyed["target"].to_pylist(), keyed[name].to_pylist(), strict=True):
            yield target, tuple(key)


def _is_complete_update(row: _Row) -> bool:
    return row["kind"] == NetKind.UPDATE.value and not set(row["kinds"]) & set(_NOT_SENT)


def _key_after(row: _Row, table: SubscribedTable) -> Key:
    """The identity columns of the row after the change; unsent ones are unchanged."""
    positions = [table.columns.index(name) for name in table.identity]
    return tuple(
        row["values"][position] if row["kinds"][position] in "nt" else unchanged
        for position, unchanged in zip(positions, row["base_key"], strict=True)
    )
