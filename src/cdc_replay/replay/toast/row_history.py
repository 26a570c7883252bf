"""The fold that follows rows: changes of linked keys in commit order → entries, as far as the history knows.

A *slot* is a key of a leaf, and holds what is known of the row that has this key at the moment:

| change | slot                                                                                   |
|--------|----------------------------------------------------------------------------------------|
| INSERT | a new row, all of it known; whatever was there is gone                                 |
| UPDATE | the row goes to its new key; what was sent is known, what was not sent stays as it was |
| DELETE | empty                                                                                  |

An *entry* is an UPDATE by which its row enters the subscription. It takes what is known then. For the rest it
waits with its row until the end: a column that is sent later, or a row that is gone, is given up
(`model.frames.GIVEN_UP`).

A column is the same in two tuples if its attribute number is, whatever its name; a value that was sent under
another type says nothing. Where it is not certain which column was sent, all of the row's values are lost.

Where the publisher rewrites the table a row ends, and what it waits for is given up: after that its key and
all of its values may be others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa

from cdc_replay.model.frames import CHANGES, GIVEN_UP, ChangeKind
from cdc_replay.model.relation import Relation
from cdc_replay.replay.toast.tracked_leaf import FOUND, FOUND_SCHEMA, TrackedLeaf, TupleColumn

FOLLOWED: Final = (*CHANGES.names, "lineage", "key_before", "key_after", "is_entry")
"""What is folded, sorted by lineage and position; the keys are replica identities before and after."""

BATCH_ROWS: Final = 1_000
"""Rows of a batch of entries that is handed on."""

_Change: TypeAlias = dict[str, Any]
_Position: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class _EnteringRow:
    """A row's entry; `waiting` are the positions of its unknown values, by attribute number."""

    change: _Change
    waiting: dict[int, int]
    lost: int = 0
    given_up: set[int] = field(default_factory=set)

    def give_up(self, attnums: Collection[int]) -> None:
        """These are other values since."""
        self.given_up |= {self.waiting.pop(number) for number in attnums if number in self.waiting}

    def lose(self) -> None:
        """Nothing that is waited for can be told any more."""
        self.lost += len(self.waiting)
        self.waiting.clear()

    def row(self, key: tuple[str, ...] | None) -> _Change:
        """The entry in the columns of FOUND; `key` is None for a row that is gone."""
        if key is None:
            self.give_up(list(self.waiting))
        missing = sorted(self.waiting.values())
        found = {"missing": missing, "key": key if missing else None, "lost": self.lost}
        return give_up(self.change | found, self.given_up)


@dataclass(slots=True)
class _TrackedRow:
    known: dict[int, tuple[TupleColumn, str | None]] = field(default_factory=dict)
    """The last value of each column by its attribute number, and as what it was sent."""
    entries: list[_EnteringRow] = field(default_factory=list)


class _RowTracker:
    """The rows of linked keys."""

    def __init__(self, leaves: Mapping[int, TrackedLeaf], truncated: Mapping[int, _Position]) -> None:
        self._leaves = leaves
        self._versions = {each.version: each for leaf in leaves.values() for each in leaf.relations}
        self._truncated = truncated
        self._slots: dict[tuple[int, int, tuple[str, ...]], _TrackedRow] = {}
        """By leaf, how many rewrites have come before, and key."""
        self._entries: list[_EnteringRow] = []

    def apply(self, change: _Change) -> None:
        """Take the next change."""
        leaf, relation = change["relation_id"], self._versions[change["relation_version"]]
        before, after = (
            None if key is None else tuple(key) for key in (change["key_before"], change["key_after"])
        )
        rewrites = self._leaves[leaf].rewrites_before(change["commit_lsn"])
        row = self._slots.pop((leaf, rewrites, before), None) if before is not None else None
        if after is None:
            return
        row = _TrackedRow() if row is None or change["kind"] == ChangeKind.INSERT.value else row
        columns = _columns(change, self._leaves[leaf], relation)
        _take_over(change, columns, row)
        if change["is_entry"]:
            entry = _entered(change, _wanted(change, columns, relation, self._leaves[leaf]), row)
            row.entries.append(entry)
            self._entries.append(entry)
        self._slots[leaf, rewrites, after] = row

    def finish(self) -> Iterator[_Change]:
        """All entries (FOUND)."""
        last_keys = {
            id(entry): key
            for (leaf, rewrites, key), row in self._slots.items()
            if rewrites == len(self._leaves[leaf].rewrites)
            for entry in row.entries
        }
        for entry in self._entries:
            change = entry.change
            emptied = self._truncated.get(change["relation_id"], (-1, -1))
            is_gone = (change["commit_lsn"], change["seq"]) < emptied
            yield entry.row(None if is_gone else last_keys.get(id(entry)))


def follow(
    batches: Iterable[pa.RecordBatch],
    leaves: Mapping[int, TrackedLeaf],
    truncated: Mapping[int, _Position],
) -> Iterator[pa.RecordBatch]:
    """The entries (FOUND) among changes (FOLLOWED).

    `truncated` is the position (commit LSN, seq) of the last TRUNCATE of each leaf that has any.
    """
    rows: list[_Change] = []
    lineage, number = _RowTracker(leaves, truncated), None
    for change in (change for batch in batches for change in batch.to_pylist()):
        if change["lineage"] != number:
            rows += lineage.finish()
            lineage, number = _RowTracker(leaves, truncated), change["lineage"]
        lineage.apply(change)
        if len(rows) >= BATCH_ROWS:
            yield as_batch(rows)
            rows = []
    rows += lineage.finish()
    yield as_batch(rows)


def as_batch(rows: list[_Change]) -> pa.RecordBatch:
    """Rows of FOUND as Arrow."""
    return pa.RecordBatch.from_pylist(
        [{name: row[name] for name in FOUND.names} for row in rows], schema=FOUND_SCHEMA
    )


def unfollowed(
    batches: Iterable[pa.RecordBatch], leaves: Mapping[int, TrackedLeaf]
) -> Iterator[pa.RecordBatch]:
    """Entries (CHANGES) whose rows cannot be followed, as FOUND: all of their values are missing.

    Those whose tables are rewritten with them, or since, are given up.
    """
    versions = {each.version: each for leaf in leaves.values() for each in leaf.relations}
    for batch in batches:
        rows = []
        for change in batch.to_pylist():
            leaf, relation = leaves[change["relation_id"]], versions[change["relation_version"]]
            wanted = _wanted(change, _columns(change, leaf, relation), relation, leaf)
            row = change | {"missing": sorted(wanted), "key": None, "lost": 0}
            if leaf.rewrites_before(change["commit_lsn"]) < len(leaf.rewrites):
                row = give_up(row | {"missing": []}, sorted(wanted))
            rows.append(row)
        yield as_batch(rows)


def give_up(entry: _Change, positions: Collection[int]) -> _Change:
    """The entry (FOUND) with the mark of what is given up."""
    if not positions:
        return entry
    kinds = list(entry["new_kinds"])
    for position in positions:
        kinds[position] = GIVEN_UP
    return entry | {"new_kinds": "".join(kinds), "lost": entry["lost"] + len(positions)}


def _columns(change: _Change, leaf: TrackedLeaf, relation: Relation) -> tuple[TupleColumn | None, ...]:
    return leaf.columns_of((relation.version, change["catalog_version"]), len(relation.columns))


def _take_over(change: _Change, columns: tuple[TupleColumn | None, ...], row: _TrackedRow) -> None:
    """What the change says of its row's columns; entries before it do not have what it changes."""
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


def _wanted(
    change: _Change, columns: tuple[TupleColumn | None, ...], relation: Relation, leaf: TrackedLeaf
) -> dict[int, TupleColumn | None]:
    """The columns of an entry that the subscription has, and that were not sent, by position."""
    old, old_kinds = change["old"], change["old_kinds"]
    return {
        position: columns[position]
        for position, column in enumerate(relation.columns)
        if change["new_kinds"][position] == "u"
        and column.name in leaf.wanted
        and (old is None or old_kinds[position] != "t")
    }


def _entered(change: _Change, wanted: Mapping[int, TupleColumn | None], row: _TrackedRow) -> _EnteringRow:
    """The entry, with the values that are known."""
    new, kinds, waiting = list(change["new"]), list(change["new_kinds"]), {}
    lost = 0
    for position, column in wanted.items():
        if column is None:
            lost += 1
            continue
        sent_as, value = row.known.get(column.attnum, (None, None))
        # A value that is stored out of line is not NULL.
        if sent_as == column and value is not None:
            new[position], kinds[position] = value, "t"
        else:
            waiting[column.attnum] = position
    return _EnteringRow(change | {"new": new, "new_kinds": "".join(kinds)}, waiting, lost)
