"""The fold that follows rows: changes of linked keys in commit order → entries, as far as the history knows.

A *slot* is a key of a leaf, and holds what is known of the row that has this key at the moment:

| change | slot                                                                                   |
|--------|----------------------------------------------------------------------------------------|
| INSERT | a new row, all of it known; whatever was there is gone                                 |
| UPDATE | the row goes to its new key; what was sent is known, what was not sent stays as it was |
| DELETE | empty                                                                                  |

An *entry* is an UPDATE by which its row enters the subscription. It takes what is known then. For the rest it
waits with its row until the end: a column that is sent later, or a row that is gone, is lost to it.

A column is the same in two relation versions if its name and its type are; a value that was sent under
another type says nothing. Where names have changed their columns, a value is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa

from cdc_replay.fill.leaves import FOUND, FOUND_SCHEMA, FollowedLeaf
from cdc_replay.model.change import CHANGES, ChangeKind
from cdc_replay.model.relation import Relation, RelationColumn

FOLLOWED: Final = (*CHANGES.names, "lineage", "key_before", "key_after", "is_entry")
"""What is folded, sorted by lineage and position; the keys are replica identities before and after."""

BATCH_ROWS: Final = 1_000
"""Rows of a batch of entries that is handed on."""

_Change: TypeAlias = dict[str, Any]
_Column: TypeAlias = tuple[str, int, int]
_Position: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class _Entry:
    """A row's entry; `waiting` are the positions of its unknown values, by column."""

    change: _Change
    waiting: dict[_Column, int]
    lost: int = 0

    def lose(self, columns: Iterable[_Column]) -> None:
        """These will not be found any more."""
        for column in columns:
            self.lost += self.waiting.pop(column, None) is not None

    def row(self, key: tuple[str, ...] | None) -> _Change:
        """The entry in the columns of FOUND; `key` is None for a row that is gone."""
        if key is None:
            self.lose(list(self.waiting))
        missing = sorted(self.waiting.values())
        return self.change | {"missing": missing, "key": key if missing else None, "lost": self.lost}


@dataclass(slots=True)
class _Row:
    known: dict[_Column, str | None] = field(default_factory=dict)
    entries: list[_Entry] = field(default_factory=list)


class _Lineage:
    """The rows of linked keys."""

    def __init__(self, leaves: Mapping[int, FollowedLeaf], truncated: Mapping[int, _Position]) -> None:
        self._leaves = leaves
        self._versions = {each.version: each for leaf in leaves.values() for each in leaf.relations}
        self._truncated = truncated
        self._slots: dict[tuple[int, tuple[str, ...]], _Row] = {}
        self._entries: list[_Entry] = []

    def apply(self, change: _Change) -> None:
        """Take the next change."""
        leaf, relation = change["relation_id"], self._versions[change["relation_version"]]
        before, after = (
            None if key is None else tuple(key) for key in (change["key_before"], change["key_after"])
        )
        row = self._slots.pop((leaf, before), None) if before is not None else None
        if after is None:
            return
        row = _Row() if row is None or change["kind"] == ChangeKind.INSERT.value else row
        _take_over(change, relation, row)
        if change["is_entry"]:
            entry = _entered(change, relation, row, self._leaves[leaf])
            row.entries.append(entry)
            self._entries.append(entry)
        self._slots[leaf, after] = row

    def finish(self) -> Iterator[_Change]:
        """All entries (FOUND)."""
        last_keys = {id(entry): key for (_, key), row in self._slots.items() for entry in row.entries}
        for entry in self._entries:
            change = entry.change
            emptied = self._truncated.get(change["relation_id"], (-1, -1))
            is_gone = (change["commit_lsn"], change["seq"]) < emptied
            yield entry.row(None if is_gone else last_keys.get(id(entry)))


def follow(
    batches: Iterable[pa.RecordBatch],
    leaves: Mapping[int, FollowedLeaf],
    truncated: Mapping[int, _Position],
) -> Iterator[pa.RecordBatch]:
    """The entries (FOUND) among changes (FOLLOWED).

    `truncated` is the position (commit LSN, seq) of the last TRUNCATE of each leaf that has any.
    """
    rows: list[_Change] = []
    lineage, number = _Lineage(leaves, truncated), None
    for change in (change for batch in batches for change in batch.to_pylist()):
        if change["lineage"] != number:
            rows += lineage.finish()
            lineage, number = _Lineage(leaves, truncated), change["lineage"]
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


def _take_over(change: _Change, relation: Relation, row: _Row) -> None:
    """What the change says of its row's columns; to entries before it, a column that it changes is lost."""
    old, old_kinds = change["old"], change["old_kinds"]
    for position, column in enumerate(relation.columns):
        if change["new_kinds"][position] != "u":
            row.known[_column(column)] = change["new"][position]
            for entry in row.entries:
                entry.lose([_column(column)])
        elif old is not None and old_kinds[position] == "t":
            row.known[_column(column)] = old[position]


def _entered(change: _Change, relation: Relation, row: _Row, leaf: FollowedLeaf) -> _Entry:
    """The entry, with the values that are known."""
    new, kinds, waiting = list(change["new"]), list(change["new_kinds"]), {}
    lost = 0
    for position, column in enumerate(relation.columns):
        if kinds[position] != "u" or column.name not in leaf.wanted:
            continue
        if column.name in leaf.renamed:
            lost += 1
            continue
        # A value that is stored out of line is not NULL.
        if (value := row.known.get(_column(column))) is not None:
            new[position], kinds[position] = value, "t"
        else:
            waiting[_column(column)] = position
    return _Entry(change | {"new": new, "new_kinds": "".join(kinds)}, waiting, lost)


def _column(column: RelationColumn) -> _Column:
    return column.name, column.type_oid, column.typmod
