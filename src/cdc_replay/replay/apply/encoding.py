"""Net changes of one task as rows of CSV for COPY, counted by target."""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from cdc_replay.arrow.arrays import Int64s, ascii_bytes
from cdc_replay.model.frames import NetKind
from cdc_replay.replay.apply.conflicts import SerializedError, key_text, unknown_value
from cdc_replay.replay.apply.stage_table import StageTable
from cdc_replay.replay.apply.transient_keys import TransientKeys, split_transient_keys
from cdc_replay.replay.contingent_changes import changes_text

_CSV: Final = pa_csv.WriteOptions(include_header=False, quoting_style="needed")

KEY_CHANGED: Final = "moved"
"""Beside the kinds of net changes: how many UPDATEs change their row's key."""

UPDATE_MAY_MISS: Final = "unsure"
"""Beside them: how many INSERTs come after UPDATEs of a row that may not be there."""

TRANSIENT_MAY_MISS: Final = "gone unsure"
"""Beside them: how many rows that came and went do so after changes of a row that may not be there."""


@dataclass(frozen=True, slots=True)
class StagedPart:
    """What one task attempt has staged for one target.

    `counts` are rows by `NetKind` value, besides `KEY_CHANGED`, `UPDATE_MAY_MISS` and `TRANSIENT_MAY_MISS`.
    `unsent` are positions of values that some UPDATE did not send, `omitted` the distinct texts with `-`
    where an INSERT leaves a column to its default and a blank elsewhere. `gone` are the keys of rows that
    came and went and are not staged; `counts` does not count them.
    """

    target: int
    attempt: int
    counts: Mapping[str, int]
    unsent: frozenset[int]
    omitted: frozenset[str]
    conflicts: Mapping[str, int]
    gone: TransientKeys

    @property
    def is_contingent(self) -> bool:
        """Its net changes are right only as long as the target has the rows that they are for."""
        return self.attempt < 0


@dataclass(slots=True)
class _StagedCounts:
    """What a task has written for one target."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    unsent: set[int] = field(default_factory=set)
    omitted: set[str] = field(default_factory=set)
    conflicts: collections.Counter[str] = field(default_factory=collections.Counter)
    gone: list[Int64s] = field(default_factory=lambda: [np.zeros(0, np.int64)])

    def part(self, target: int, attempt: int) -> StagedPart:
        """What it comes to."""
        return StagedPart(
            target,
            attempt,
            dict(self.counts),
            frozenset(self.unsent),
            frozenset(self.omitted),
            dict(self.conflicts),
            TransientKeys.of(np.concatenate(self.gone)),
        )


CsvRows: TypeAlias = tuple[int, bool, memoryview]
"""Some rows of a target as COPY's CSV; whether they are changes of contingent lineages."""


@dataclass(slots=True)
class Encoding:
    """Makes the text of what an attempt stages, and counts it by target.

    Of the targets in `counted` what came and went is not staged (`replay.apply.transient_keys`).
    """

    tables: Mapping[int, StageTable]
    counted: frozenset[int]
    attempt: int
    _tallies: dict[tuple[int, int], _StagedCounts] = field(default_factory=dict)
    """By target and attempt."""

    def texts(self, batches: Iterable[pa.RecordBatch]) -> Iterator[CsvRows]:
        """Texts of the batches' rows, in the order in which targets come.

        Raises:
            UnknownValue: if a row is to be inserted with a value that was not sent.
        """
        for target, rows in _by_target(batches):
            changes = changes_text(rows)
            attempt = self.attempt if changes is None else contingent_attempt(self.attempt)
            tally = self._tally(target, attempt)
            staged = rows
            if target in self.counted:
                staged, gone = split_transient_keys(rows)
                tally.gone.append(gone)
            # Also of no rows: whoever merges takes it that the staging table is there.
            yield target, False, _csv(staged, self.tables[target], attempt, tally)
            if changes is not None:
                yield target, True, csv_of([pa.array([attempt]), pa.array([changes])])

    def part(self, target: int) -> StagedPart:
        """What was staged for one target under the attempt's first number."""
        return self._tally(target, self.attempt).part(target, self.attempt)

    def _tally(self, target: int, attempt: int) -> _StagedCounts:
        return self._tallies.setdefault((target, attempt), _StagedCounts())

    def parts(self) -> list[dict[str, Any]]:
        """What was staged, if all texts were written; rows of `PARTS`."""
        return [_part_row(tally.part(*place)) for place, tally in self._tallies.items()]

    def failure(self, failure: SerializedError) -> dict[str, Any]:
        """The row of `PARTS` that says why it was not."""
        return {"attempt": self.attempt, "failure": failure.texts}


def contingent_attempt(attempt: int) -> int:
    """The number under which an attempt stages the net changes of contingent lineages."""
    return -1 - attempt


def _part_row(part: StagedPart) -> dict[str, Any]:
    return {
        "target": part.target,
        "attempt": part.attempt,
        "counts": list(part.counts.items()),
        "unsent": sorted(part.unsent),
        "omitted": sorted(part.omitted),
        "conflicts": list(part.conflicts.items()),
        "gone": part.gone.count,
        "gone_steps": part.gone.steps,
        "failure": None,
    }


def _by_target(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    for batch in batches:
        targets = batch["target"].to_numpy()
        borders = [0, *(np.flatnonzero(np.diff(targets)) + 1).tolist(), len(targets)]
        for start, end in itertools.pairwise(borders):
            if start < end:
                yield int(targets[start]), batch.slice(start, end - start)


def _csv(rows: pa.RecordBatch, table: StageTable, attempt: int, tally: _StagedCounts) -> memoryview:
    """`rows` of one target as COPY's CSV; counts them in `tally`.

    Raises:
        UnknownValue: if a row is to be inserted with a value that was not sent.
    """
    kind = rows["kind"]
    _check_known(rows, table)
    keys = [pc.list_element(rows["base_key"], position) for position in range(len(table.keys))]
    values = [pc.list_element(rows["values"], position) for position in range(len(table.values))]
    moved = _moved(kind, keys, [values[position] for position in table.key_positions], table)
    is_whole = _count(rows, moved, tally)
    # An INSERT is found by its values; its base key would be the same once more.
    keyed = pc.not_equal(kind, NetKind.INSERT.value)
    columns = [
        pa.repeat(pa.scalar(attempt, pa.int64()), rows.num_rows),
        kind,
        pa.nulls(rows.num_rows, pa.string()) if is_whole else rows["kinds"],
        _or_null(moved, moved),
        *(_or_null(pc.greater(rows[name], 0), rows[name]) for name in ("update_missing", "delete_missing")),
        *([rows["born"]] if table.inserts_in_log_order else []),
        *(_or_null(keyed, key) for key in keys),
        *values,
    ]
    return csv_of(columns)


def csv_of(columns: Sequence[pa.Array]) -> memoryview:
    """The columns as rows of COPY's CSV."""
    sink = pa.BufferOutputStream()
    names = [str(number) for number in range(len(columns))]
    pa_csv.write_csv(pa.RecordBatch.from_arrays(columns, names=names), sink, _CSV)
    return memoryview(sink.getvalue())


def _check_known(rows: pa.RecordBatch, table: StageTable) -> None:
    """A native worker stores NULL here and loses the value (R4.6)."""
    lacking = pc.and_(pc.equal(rows["kind"], NetKind.INSERT.value), pc.match_substring(rows["kinds"], "u"))
    if not pc.any(lacking).as_py():
        return
    found = rows.filter(pc.fill_null(lacking, False))
    first = found.slice(0, 1).to_pylist()[0]
    columns = [column.name for column, kind in zip(table.values, first["kinds"], strict=True) if kind == "u"]
    key = key_text(table.keys, first["base_key"][: len(table.keys)])
    raise unknown_value(table.target, columns, key, first["last_lsn"], found.num_rows)


def _or_null(where: pa.BooleanArray, values: pa.Array) -> pa.Array:
    """The values, NULL elsewhere: what is NULL costs the server next to nothing."""
    return pc.if_else(where, values, pa.scalar(None, values.type))


def _moved(
    kind: pa.Array, keys: Sequence[pa.Array], sent: Sequence[pa.Array], table: StageTable
) -> pa.BooleanArray:
    """Whether a row's key as sent differs from its base key."""
    moved = pa.repeat(pa.scalar(False), len(kind))
    if not table.is_keyed:
        return moved
    is_update = pc.equal(kind, NetKind.UPDATE.value)
    for key, value in zip(keys, sent, strict=True):
        moved = pc.or_(moved, pc.fill_null(pc.and_(is_update, pc.not_equal(value, key)), False))
    return moved


def _count(rows: pa.RecordBatch, moved: pa.Array, tally: _StagedCounts) -> bool:
    """Add the rows to `tally`; whether each of them has all values."""
    for found in pc.value_counts(rows["kind"]).to_pylist():
        tally.counts[found["values"]] += found["counts"]
    tally.counts[KEY_CHANGED] += pc.sum(moved).as_py() or 0
    misses = pc.or_(pc.greater(rows["update_missing"], 0), pc.greater(rows["delete_missing"], 0))
    for kind, name in ((NetKind.INSERT, UPDATE_MAY_MISS), (NetKind.NOTHING, TRANSIENT_MAY_MISS)):
        tally.counts[name] += pc.sum(pc.and_(misses, pc.equal(rows["kind"], kind.value))).as_py() or 0
    for conflicts in rows["conflicts"].drop_null().to_pylist():
        tally.conflicts.update(json.loads(conflicts))
    kinds = _kinds(rows, NetKind.UPDATE)
    unsent = (kinds != ord("n")) & (kinds != ord("t"))
    tally.unsent.update(np.flatnonzero(unsent.any(axis=0)).tolist())
    omitted = _kinds(rows, NetKind.INSERT) == ord("-")
    patterns = np.unique(omitted, axis=0) if omitted.any() else omitted[:1]
    tally.omitted.update("".join("-" if left else " " for left in pattern) for pattern in patterns)
    return not (unsent.any() or omitted.any())


def _kinds(rows: pa.RecordBatch, kind: NetKind) -> npt.NDArray[np.uint8]:
    """The kinds of the values of all changes of one kind: one row each, one byte per value."""
    kinds = rows["kinds"].filter(pc.equal(rows["kind"], kind.value))
    if len(kinds) == 0:
        return np.zeros((0, 0), np.uint8)
    return ascii_bytes(kinds).reshape(len(kinds), -1)
