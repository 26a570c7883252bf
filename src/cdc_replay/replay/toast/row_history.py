"""The fold that tracks rows: changes of linked keys in commit order → entries with resolved values.

A key of a leaf maps to what is known of the row that has this key at the moment:

| change | row                                                                                    |
|--------|----------------------------------------------------------------------------------------|
| INSERT | a new row, all of it known; an earlier row at the key is gone                          |
| UPDATE | moves to its new key; values that were sent are known, others stay as they were        |
| DELETE | gone                                                                                   |

An *entry* is an UPDATE by which its row enters the subscription. It takes the values that are known then. The
others wait with the row until the end: if the column is sent later, or the row is gone, they are given up
(`model.frames.GIVEN_UP`).

A column is the same in two tuples if its attribute number is, whatever its name; a value that was sent under
another type proves nothing. If it is ambiguous which column was sent, all of the row's values are lost.

A table rewrite ends every row, and gives up its waiting values: key and values may be others afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa

from cdc_replay.model.frames import CHANGES, GIVEN_UP, ChangeKind
from cdc_replay.model.relation import Relation
from cdc_replay.replay.toast.tracked_leaf import RESOLVED, RESOLVED_SCHEMA, TrackedLeaf, TupleColumn

TRACKED: Final = (*CHANGES.names, "lineage", "key_before", "key_after", "is_entry")
"""Columns of the input, sorted by lineage and position; the keys are replica identities before and after."""

BATCH_ROWS: Final = 1_000
"""Rows per batch of entries."""

_Change: TypeAlias = dict[str, Any]
_Position: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class _EnteringRow:
    """A row's entry; `unresolved` are the positions of its unknown values, by attribute number."""

    change: _Change
    unresolved: dict[int, int]
    lost: int = 0
    given_up: set[int] = field(default_factory=set)

    def give_up(self, attnums: Collection[int]) -> None:
        """The values of these columns have changed since."""
        self.given_up |= {self.unresolved.pop(attnum) for attnum in attnums if attnum in self.unresolved}

    def lose(self) -> None:
        """The missing values cannot be proved any more."""
        self.lost += len(self.unresolved)
        self.unresolved.clear()

    def row(self, key: tuple[str, ...] | None) -> _Change:
        """The entry in the columns of RESOLVED; `key` is None for a row that is gone."""
        if key is None:
            self.give_up(list(self.unresolved))
        missing = sorted(self.unresolved.values())
        resolution = {"missing": missing, "key": key if missing else None, "lost": self.lost}
        return give_up(self.change | resolution, self.given_up)


@dataclass(slots=True)
class _TrackedRow:
    known: dict[int, tuple[TupleColumn, str | None]] = field(default_factory=dict)
    """The last value of each column by its attribute number, and the column as it was sent."""
    entries: list[_EnteringRow] = field(default_factory=list)


class _RowTracker:
    def __init__(self, leaves: Mapping[int, TrackedLeaf], truncated: Mapping[int, _Position]) -> None:
        self._leaves = leaves
        self._versions = {
            relation.version: relation for leaf in leaves.values() for relation in leaf.relations
        }
        self._truncated = truncated
        self._rows: dict[tuple[int, int, tuple[str, ...]], _TrackedRow] = {}
        """By leaf, number of earlier rewrites, and key."""
        self._entries: list[_EnteringRow] = []

    def apply(self, change: _Change) -> None:
        """Apply the next change."""
        leaf, relation = change["relation_id"], self._versions[change["relation_version"]]
        before, after = (
            None if key is None else tuple(key) for key in (change["key_before"], change["key_after"])
        )
        rewrites = self._leaves[leaf].rewrites_before(change["commit_lsn"])
        row = self._rows.pop((leaf, rewrites, before), None) if before is not None else None
        if after is None:
            return
        row = _TrackedRow() if row is None or change["kind"] == ChangeKind.INSERT.value else row
        columns = _columns(change, self._leaves[leaf], relation)
        _update_row(change, columns, row)
        if change["is_entry"]:
            entry = _make_entry(change, _unsent_columns(change, columns, relation, self._leaves[leaf]), row)
            row.entries.append(entry)
            self._entries.append(entry)
        self._rows[leaf, rewrites, after] = row

    def finish(self) -> Iterator[_Change]:
        """All entries (RESOLVED)."""
        last_keys = {
            id(entry): key
            for (leaf, rewrites, key), row in self._rows.items()
            if rewrites == len(self._leaves[leaf].rewrites)
            for entry in row.entries
        }
        for entry in self._entries:
            change = entry.change
            truncated = self._truncated.get(change["relation_id"], (-1, -1))
            is_gone = (change["commit_lsn"], change["seq"]) < truncated
            yield entry.row(None if is_gone else last_keys.get(id(entry)))


def track(
    batches: Iterable[pa.RecordBatch], leaves: Mapping[int, TrackedLeaf], truncated: Mapping[int, _Position]
) -> Iterator[pa.RecordBatch]:
    """The entries (RESOLVED) among changes (TRACKED).

    `truncated` is the position (commit LSN, seq) of the last TRUNCATE of each leaf that has one.
    """
    rows: list[_Change] = []
    tracker, lineage = _RowTracker(leaves, truncated), None
    for change in (change for batch in batches for change in batch.to_pylist()):
        if change["lineage"] != lineage:
            rows += tracker.finish()
            tracker, lineage = _RowTracker(leaves, truncated), change["lineage"]
        tracker.apply(change)
        if len(rows) >= BATCH_ROWS:
            yield resolved_batch(rows)
            rows = []
    rows += tracker.finish()
    yield resolved_batch(rows)


def resolved_batch(rows: list[_Change]) -> pa.RecordBatch:
    """Rows of RESOLVED as Arrow."""
    return pa.RecordBatch.from_pylist(
        [{name: row[name] for name in RESOLVED.names} for row in rows], schema=RESOLVED_SCHEMA
    )


def untracked(
    batches: Iterable[pa.RecordBatch], leaves: Mapping[int, TrackedLeaf]
) -> Iterator[pa.RecordBatch]:
    """Entries (CHANGES) whose rows cannot be tracked, as RESOLVED: all of their unsent values are missing.

    If the table is rewritten by the same transaction, or later, they are given up.
    """
    versions = {relation.version: relation for leaf in leaves.values() for relation in leaf.relations}
    for batch in batches:
        rows = []
        for change in batch.to_pylist():
            leaf, relation = leaves[change["relation_id"]], versions[change["relation_version"]]
            unsent = _unsent_columns(change, _columns(change, leaf, relation), relation, leaf)
            row = change | {"missing": sorted(unsent), "key": None, "lost": 0}
            if leaf.rewrites_before(change["commit_lsn"]) < len(leaf.rewrites):
                row = give_up(row | {"missing": []}, sorted(unsent))
            rows.append(row)
        yield resolved_batch(rows)


def give_up(entry: _Change, positions: Collection[int]) -> _Change:
    """The entry (RESOLVED), with `GIVEN_UP` at these positions."""
    if not positions:
        return entry
    kinds = list(entry["new_kinds"])
    for position in positions:
        kinds[position] = GIVEN_UP
    return entry | {"new_kinds": "".join(kinds), "lost": entry["lost"] + len(positions)}


def _columns(change: _Change, leaf: TrackedLeaf, relation: Relation) -> tuple[TupleColumn | None, ...]:
    return leaf.columns_of((relation.version, change["catalog_version"]), len(relation.columns))


def _update_row(change: _Change, columns: tuple[TupleColumn | None, ...], row: _TrackedRow) -> None:
    """Update the row by the change; earlier entries lose the values that it changes."""
    old, old_kinds = change["old"], change["old_kinds"]
    for position, column in enumerate(columns):
        is_sent = change["new_kinds"][position] != "u"
        if column is None:
            if is_sent:
                row.known.clear()
                for entry in row.entries:
                    entry.lose()
        elif is_sent:
            row.known[column.attnum] = column, change["new"][position]
            for entry in row.entries:
                entry.give_up([column.attnum])
        elif old is not None and old_kinds[position] == "t":
            row.known[column.attnum] = column, old[position]


def _unsent_columns(
    change: _Change, columns: tuple[TupleColumn | None, ...], relation: Relation, leaf: TrackedLeaf
) -> dict[int, TupleColumn | None]:
    """The subscribed columns that the entry did not send, by position."""
    old, old_kinds = change["old"], change["old_kinds"]
    return {
        position: columns[position]
        for position, column in enumerate(relation.columns)
        if change["new_kinds"][position] == "u"
        and column.name in leaf.subscribed_columns
        and (old is None or old_kinds[position] != "t")
    }


def _make_entry(change: _Change, unsent: Mapping[int, TupleColumn | None], row: _TrackedRow) -> _EnteringRow:
    new, kinds, unresolved = list(change["new"]), list(change["new_kinds"]), {}
    lost = 0
    for position, column in unsent.items():
        if column is None:
            lost += 1
            continue
        sent_as, value = row.known.get(column.attnum, (None, None))
        # A TOAST value is not NULL.
        if sent_as == column and value is not None:
            new[position], kinds[position] = value, "t"
        else:
            unresolved[column.attnum] = position
    return _EnteringRow(change | {"new": new, "new_kinds": "".join(kinds)}, unresolved, lost)
