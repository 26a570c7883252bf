"""Finds the changes of one row in the change log.

The log is not indexed by key. Each row group is narrowed down in steps, of which the next one reads more
bytes of fewer messages:

| step | reads                        | keeps                                                               |
|------|------------------------------|---------------------------------------------------------------------|
| 1    | statistics of the segments   | row groups with transactions of the window                          |
| 2    | kind and relation            | messages of the table's leaves, and TRUNCATEs                       |
| 3    | their bytes                  | messages with the text of each key column as a value (R1.4)         |
| 4    | all columns of these         | changes whose old or new row has the key, decoded as replay does    |

If an UPDATE gave the row its key, its earlier changes are those of the old key, and the same for a row that
has moved to another key since (R1.6): these keys are searched too, up to `MOVES_FOLLOWED`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import Bools, booleans, int_array, is_valid, text_buffers
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.segment import RowGroup, read_columns
from cdc_replay.explain_row.row_key import RowKey
from cdc_replay.model.frames import LOG, ChangeKind
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import Relation, RelationId

if TYPE_CHECKING:
    from cdc_replay.pgoutput.columnar import ChangeDecoder

MOVES_FOLLOWED: Final = 8
"""Further keys that are searched for a row whose key was changed."""

_THREADS: Final = min(4, os.cpu_count() or 1)
_UNSENT: Final = "u"


@dataclass(frozen=True, slots=True)
class LoggedChange:
    """A change of the row, or a TRUNCATE of its table.

    `change` is one row of CHANGES. `old` and `new` are values by column; a value that was not sent is
    missing. `old_key` and `key` are those before and after the change, None if there is no such row.
    """

    change: pa.RecordBatch
    commit_lsn: Lsn
    lsn: Lsn
    seq: int
    xid: int
    commit_time: int
    origin: str | None
    kind: ChangeKind
    relation: RelationId
    version: int | None
    catalog_version: int
    has_old: bool
    old: Mapping[str, str | None]
    new: Mapping[str, str | None]
    unsent: tuple[str, ...]
    old_key: tuple[str | None, ...] | None
    key: tuple[str | None, ...] | None

    @property
    def position(self) -> tuple[int, int, int]:
        """Orders changes as the log has them."""
        return self.commit_lsn.value, self.seq, self.relation

    @property
    def moves(self) -> bool:
        """Whether it gives the row another key."""
        return self.kind is ChangeKind.UPDATE and self.old_key != self.key


@dataclass(frozen=True, slots=True)
class FoundChanges:
    """The newest changes of the row in order, and how many there are in the log."""

    changes: tuple[LoggedChange, ...]
    count: int


@dataclass(frozen=True, slots=True)
class SearchedTable:
    """Where rows are looked for: `leaves` have row changes, `truncated` may be named by a TRUNCATE.

    `catalogs` are positions of catalog versions, for decoding.
    """

    change_log: ChangeLog
    leaves: frozenset[RelationId]
    truncated: frozenset[RelationId]
    relations: Mapping[int, Relation]
    catalogs: Sequence[tuple[int, int]]


def find_row(table: SearchedTable, key: RowKey, window: Window, last: int) -> FoundChanges:
    """The changes of the row with this key, `last` at most, followed over changes of its key.

    Raises:
        ChangeLogDamaged, InvalidMessage: if the log cannot be read.
    """
    of_key = find_key(table, key, window, last)
    by_position = {change.position: change for change in of_key.changes}
    count, searched = of_key.count, {key.texts}
    for towards in (_before_last_arrival, _after_departure):
        step = towards(of_key.changes, key, window)
        for _ in range(MOVES_FOLLOWED):
            if step is None or step[0].texts in searched:
                break
            next_key, next_window, bound = step
            searched.add(next_key.texts)
            linked = find_key(table, next_key, next_window, last)
            inside = [change for change in linked.changes if bound.holds(change.position)]
            count += linked.count - len(linked.changes)
            count += sum(change.position not in by_position for change in inside)
            by_position |= {change.position: change for change in inside}
            step = towards(inside, next_key, next_window)
    ordered = sorted(by_position.values(), key=lambda change: change.position)
    return FoundChanges(tuple(ordered[-last:]), count)


@dataclass(frozen=True, slots=True)
class _Bound:
    """Changes before, or after, the position at which the row moved."""

    position: tuple[int, int, int]
    is_before: bool

    def holds(self, position: tuple[int, int, int]) -> bool:
        return position < self.position if self.is_before else position > self.position


def _before_last_arrival(
    changes: Sequence[LoggedChange], key: RowKey, window: Window
) -> tuple[RowKey, Window, _Bound] | None:
    """The key that the row had before the last UPDATE that gave it this one."""
    arrivals = [change for change in changes if change.moves and change.key == key.texts]
    if not arrivals or arrivals[-1].old_key is None or None in arrivals[-1].old_key:
        return None
    arrival = arrivals[-1]
    earlier = RowKey(key.columns, tuple(map(str, arrival.old_key or ())))
    return earlier, Window(window.after, arrival.commit_lsn), _Bound(arrival.position, is_before=True)


def _after_departure(
    changes: Sequence[LoggedChange], key: RowKey, window: Window
) -> tuple[RowKey, Window, _Bound] | None:
    """The key that the row got by its last change, if that changed its key."""
    of_rows = [change for change in changes if change.kind is not ChangeKind.TRUNCATE]
    if not of_rows or not of_rows[-1].moves or of_rows[-1].old_key != key.texts:
        return None
    departure = of_rows[-1]
    if departure.key is None or None in departure.key:
        return None
    later = RowKey(key.columns, tuple(map(str, departure.key)))
    after = Lsn(departure.commit_lsn.value - 1)
    return later, Window(after, window.upto), _Bound(departure.position, is_before=False)


def find_key(table: SearchedTable, key: RowKey, window: Window, last: int) -> FoundChanges:
    """The newest changes whose old or new row has the key, and how many there are.

    Raises:
        ChangeLogDamaged, InvalidMessage: if the log cannot be read.
    """
    search = _Search.open(table, key, window)
    newest: deque[LoggedChange] = deque(maxlen=last)
    count = 0
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="why") as threads:
        for candidates in threads.map(search.candidates, table.change_log.segments(window)):
            for change in search.matches(candidates):
                newest.append(change)
                count += 1
    return FoundChanges(tuple(newest), count)


def is_newer_than_log(change_log: ChangeLog, window: Window, xid: int | None) -> bool:
    """Whether a transaction got its id after those of the log's last row group; False for an empty log.

    Ids wrap around: of two, the newer one is less than 2^31 ahead.
    """
    groups = change_log.segments(window)
    if not groups or xid is None:
        return False
    last = pc.max(read_columns(groups[-1], ("xid",), window)["xid"]).as_py()
    return last is not None and 0 < (xid - last) % 2**32 < 2**31


@dataclass(frozen=True, slots=True)
class _Search:
    table: SearchedTable
    key: RowKey
    window: Window
    decoder: ChangeDecoder
    patterns: tuple[bytes, ...]
    leaves: pa.Array = field(repr=False)

    @classmethod
    def open(cls, table: SearchedTable, key: RowKey, window: Window) -> _Search:
        from cdc_replay.pgoutput.columnar import ChangeDecoder  # noqa: PLC0415 - compiles kernels

        decoder = ChangeDecoder.from_relations(window, table.relations, table.catalogs)
        patterns = tuple(_as_value(text) for text in sorted(key.texts, key=len, reverse=True))
        return cls(table, key, window, decoder, patterns, pa.array(sorted(table.leaves), pa.int64()))

    def candidates(self, group: RowGroup) -> pa.RecordBatch | None:
        """The messages (LOG) of a row group that may be of the row; None if there are none."""
        kinds = read_columns(group, ("kind", "relation_id"), self.window)
        is_truncate = pc.equal(kinds["kind"], ChangeKind.TRUNCATE.value)
        is_leaf = pc.is_in(kinds["relation_id"], value_set=self.leaves)
        wanted = pc.or_(is_truncate, is_leaf).to_numpy()
        if not wanted.any():
            return None
        messages = read_columns(group, ("message",), self.window)["message"].combine_chunks()
        rows = np.flatnonzero(wanted)
        has_key = _contain(messages.take(pa.array(rows)), self.patterns)
        rows = rows[has_key | is_truncate.to_numpy()[rows]]
        if not len(rows):
            return None
        names = [name for name in LOG.names if name != "message"]
        log = read_columns(group, names, self.window).take(pa.array(rows))
        log = log.append_column("message", messages.take(pa.array(rows)))
        batches = log.select(LOG.names).combine_chunks().to_batches()
        return batches[0]

    def matches(self, candidates: pa.RecordBatch | None) -> Iterator[LoggedChange]:
        """The changes of the row among candidates, in order."""
        if candidates is None:
            return
        changes = self.decoder.decode(candidates)
        xids = {
            (commit, seq): xid
            for commit, seq, xid in zip(
                *(candidates[name].to_pylist() for name in ("commit_lsn", "seq", "xid")), strict=True
            )
        }
        for row in np.flatnonzero(self._is_match(changes)).tolist():
            yield self._change(changes.slice(row, 1), xids)

    def _is_match(self, changes: pa.RecordBatch) -> Bools:
        truncated = pa.array(sorted(self.table.truncated), pa.int64())
        is_truncate = pc.and_(
            pc.equal(changes["kind"], ChangeKind.TRUNCATE.value),
            pc.is_in(changes["relation_id"], value_set=truncated),
        )
        is_match = booleans(is_truncate).copy()
        versions = int_array(changes["relation_version"])
        for version in np.unique(versions[is_valid(changes["relation_version"])]).tolist():
            if (positions := self._positions(version)) is not None:
                rows = np.flatnonzero(versions == version)
                old, new = (changes[name].take(pa.array(rows)) for name in ("old", "new"))
                has_key = pc.or_(self._has_key(old, None, positions), self._has_key(new, old, positions))
                is_match[rows] |= booleans(has_key)
        return is_match

    def _positions(self, version: int) -> tuple[int, ...] | None:
        """The positions of the key's columns; None if the version lacks one, or is of another table."""
        relation = self.table.relations[version]
        if relation.id not in self.table.leaves or not set(self.key.columns) <= set(relation.column_names):
            return None
        return tuple(relation.column_names.index(name) for name in self.key.columns)

    def _has_key(self, rows: pa.Array, others: pa.Array | None, positions: Sequence[int]) -> pa.BooleanArray:
        """Whether rows have the key; a value that was not sent is that of the other row (R4.4)."""
        result = pa.array(np.ones(len(rows), dtype=np.bool_))
        for position, text in zip(positions, self.key.texts, strict=True):
            values = pc.list_element(rows, position)
            if others is not None:
                values = pc.if_else(
                    rows.is_valid(), pc.coalesce(values, pc.list_element(others, position)), None
                )
            result = pc.and_(result, pc.equal(values, text).fill_null(False))
        return result

    def _change(self, change: pa.RecordBatch, xids: Mapping[tuple[int, int], int]) -> LoggedChange:
        (row,) = change.to_pylist()
        kind = ChangeKind(row["kind"])
        names: tuple[str, ...] = ()
        if row["relation_version"] is not None:
            names = self.table.relations[row["relation_version"]].column_names
        old = _sent(names, row["old"], row["old_kinds"])
        if row["old_kind"] == "K":
            # Columns outside of the key are NULL there, which says nothing (R1.5).
            old = {name: text for name, text in old.items() if text is not None}
        new = _sent(names, row["new"], row["new_kinds"])
        unsent = tuple(
            name
            for name, sent in zip(names, row["new_kinds"] or "", strict=False)
            if sent == _UNSENT and name not in old
        )
        key = self._key(old | new) if kind in {ChangeKind.INSERT, ChangeKind.UPDATE} else None
        old_key = None if kind is ChangeKind.INSERT else self._key(old or new)
        return LoggedChange(
            change=change,
            commit_lsn=Lsn(row["commit_lsn"]),
            lsn=Lsn(row["lsn"]),
            seq=row["seq"],
            xid=xids[row["commit_lsn"], row["seq"]],
            commit_time=row["commit_time"],
            origin=row["origin"],
            kind=kind,
            relation=RelationId(row["relation_id"]),
            version=row["relation_version"],
            catalog_version=row["catalog_version"],
            has_old=row["old"] is not None,
            old=old,
            new=new,
            unsent=unsent,
            old_key=old_key,
            key=key,
        )

    def _key(self, values: Mapping[str, str | None]) -> tuple[str | None, ...] | None:
        return tuple(values.get(name) for name in self.key.columns) if values else None


def _sent(
    names: Sequence[str], values: Sequence[str | None] | None, kinds: str | None
) -> dict[str, str | None]:
    """The values that a tuple has, by column."""
    rows = zip(names, values or (), kinds or "", strict=False)
    return {name: value for name, value, kind in rows if kind != _UNSENT}


def _as_value(text: str) -> bytes:
    """How a tuple has the text: kind, length, bytes (R1.4)."""
    octets = text.encode()
    return b"t" + len(octets).to_bytes(4, "big") + octets


def _contain(messages: pa.Array, patterns: Iterable[bytes]) -> Bools:
    """Which messages contain all of the patterns: one search over the bytes of all messages per pattern."""
    offsets, data = text_buffers(messages)
    octets, first = data.tobytes(), int(offsets[0])
    result = np.ones(len(messages), dtype=np.bool_)
    for pattern in patterns:
        hits = np.fromiter(_find_all(octets, pattern, first, int(offsets[-1])), dtype=np.int64)
        rows = np.searchsorted(offsets, hits, side="right") - 1
        # A hit that begins in one message and ends in the next is none.
        rows = rows[hits + len(pattern) <= offsets[rows + 1]]
        contains = np.zeros(len(messages), dtype=np.bool_)
        contains[rows] = True
        result &= contains
    return result


def _find_all(octets: bytes, pattern: bytes, start: int, end: int) -> Iterator[int]:
    while (start := octets.find(pattern, start, end)) >= 0:
        yield start
        start += 1
