"""Net changes of one task as rows of CSV for COPY, counted by target."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from cdc_replay.arrow.arrays import Int64s, ascii_bytes, equal_runs
from cdc_replay.model.frames import NetKind
from cdc_replay.replay.apply.conflicts import key_text, unknown_value
from cdc_replay.replay.apply.stage_table import StageTable
from cdc_replay.replay.apply.transient_keys import TransientKeys, split_transient_keys
from cdc_replay.replay.contingent_changes import changes_text

_CSV: Final = pa_csv.WriteOptions(include_header=False, quoting_style="needed")

KEY_CHANGED: Final = "key_changed"
"""Count of UPDATEs that change their row's key, next to the counts by `NetKind`."""

UPDATE_MAY_MISS: Final = "update_may_miss"
"""Count of INSERTs after UPDATEs of a row that may not exist."""

TRANSIENT_MAY_MISS: Final = "transient_may_miss"
"""Count of transient rows with earlier changes of a row that may not exist."""


@dataclass(frozen=True, slots=True)
class StagedPart:
    """What one task attempt has staged for one target.

    `counts` are rows by `NetKind` value, and by `KEY_CHANGED`, `UPDATE_MAY_MISS` and `TRANSIENT_MAY_MISS`.
    `unsent` are positions of values that some UPDATE did not send. `omitted` are patterns with `-` for a
    column that an INSERT leaves to its default and a blank for others. `transient_keys` are not staged, and
    not counted.
    """

    target: int
    attempt: int
    counts: Mapping[str, int]
    unsent: frozenset[int]
    omitted: frozenset[str]
    conflicts: Mapping[str, int]
    transient_keys: TransientKeys

    @property
    def is_contingent(self) -> bool:
        """The net changes hold only if the target has the rows that they start from."""
        return self.attempt < 0


@dataclass(slots=True)
class _StagedCounts:
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    unsent: set[int] = field(default_factory=set)
    omitted: set[str] = field(default_factory=set)
    conflicts: collections.Counter[str] = field(default_factory=collections.Counter)
    transient_keys: list[Int64s] = field(default_factory=lambda: [np.zeros(0, np.int64)])

    def part(self, target: int, attempt: int) -> StagedPart:
        return StagedPart(
            target,
            attempt,
            dict(self.counts),
            frozenset(self.unsent),
            frozenset(self.omitted),
            dict(self.conflicts),
            TransientKeys.encode(np.concatenate(self.transient_keys)),
        )


CsvRows: TypeAlias = tuple[int, bool, memoryview]
"""Target, whether the rows are changes of contingent lineages, and the rows as COPY's CSV."""


@dataclass(slots=True)
class CsvEncoder:
    """Encodes what a task attempt stages as CSV, and counts it by target.

    Transient keys of the targets in `tracked` are not staged (`replay.apply.transient_keys`).
    """

    tables: Mapping[int, StageTable]
    tracked: frozenset[int]
    attempt: int
    _counts: dict[tuple[int, int], _StagedCounts] = field(default_factory=dict)
    """By target and attempt."""

    def encode(self, batches: Iterable[pa.RecordBatch]) -> Iterator[CsvRows]:
        """The CSV of the batches' rows, in the order of the targets.

        Raises:
            UnchangedToastLost: if a row would be inserted with a value that was not sent.
        """
        for target, rows in _by_target(batches):
            changes = changes_text(rows)
            attempt = self.attempt if changes is None else contingent_attempt(self.attempt)
            counts = self._counts_of(target, attempt)
            staged = rows
            if target in self.tracked:
                staged, transient = split_transient_keys(rows)
                counts.transient_keys.append(transient)
            # Also without rows: the merge requires the staging table.
            yield target, False, _csv(staged, self.tables[target], attempt, counts)
            if changes is not None:
                yield target, True, to_copy_csv([pa.array([attempt]), pa.array([changes])])

    def part(self, target: int) -> StagedPart:
        """What was staged for one target under the attempt's first number."""
        return self._counts_of(target, self.attempt).part(target, self.attempt)

    def _counts_of(self, target: int, attempt: int) -> _StagedCounts:
        return self._counts.setdefault((target, attempt), _StagedCounts())

    def parts(self) -> list[StagedPart]:
        """What was staged, after all texts were written."""
        return [counts.part(*key) for key, counts in self._counts.items()]


def contingent_attempt(attempt: int) -> int:
    """The number under which an attempt stages net changes of contingent lineages."""
    return -1 - attempt


def _by_target(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    for batch in batches:
        targets = batch["target"].to_numpy()
        for start, end in equal_runs(targets):
            yield int(targets[start]), batch.slice(start, end - start)


def _csv(rows: pa.RecordBatch, table: StageTable, attempt: int, counts: _StagedCounts) -> memoryview:
    """`rows` of one target as COPY's CSV; adds them to `counts`.

    Raises:
        UnchangedToastLost: if a row would be inserted with a value that was not sent.
    """
    kind = rows["kind"]
    _check_known(rows, table)
    keys = [pc.list_element(rows["base_key"], position) for position in range(len(table.keys))]
    values = [pc.list_element(rows["values"], position) for position in range(len(table.values))]
    key_changes = _key_changes(kind, keys, [values[position] for position in table.key_positions], table)
    is_whole = _count_rows(rows, key_changes, counts)
    # An INSERT is found by its values; its base key would repeat them.
    has_base_key = pc.not_equal(kind, NetKind.INSERT.value)
    columns = [
        pa.repeat(pa.scalar(attempt, pa.int64()), rows.num_rows),
        kind,
        pa.nulls(rows.num_rows, pa.string()) if is_whole else rows["kinds"],
        _or_null(key_changes, key_changes),
        *(_or_null(pc.greater(rows[name], 0), rows[name]) for name in ("update_missing", "delete_missing")),
        *([rows["insert_ordinal"]] if table.inserts_in_log_order else []),
        *(_or_null(has_base_key, key) for key in keys),
        *values,
    ]
    return to_copy_csv(columns)


def to_copy_csv(columns: Sequence[pa.Array]) -> memoryview:
    """The columns as rows of COPY's CSV."""
    sink = pa.BufferOutputStream()
    names = [str(index) for index in range(len(columns))]
    pa_csv.write_csv(pa.RecordBatch.from_arrays(columns, names=names), sink, _CSV)
    return memoryview(sink.getvalue())


def _check_known(rows: pa.RecordBatch, table: StageTable) -> None:
    """A native worker stores NULL here and loses the value (R4.6)."""
    lacking = pc.and_(pc.equal(rows["kind"], NetKind.INSERT.value), pc.match_substring(rows["kinds"], "u"))
    if not pc.any(lacking).as_py():
        return
    lacking_rows = rows.filter(pc.fill_null(lacking, False))
    first = lacking_rows.slice(0, 1).to_pylist()[0]
    columns = [column.name for column, kind in zip(table.values, first["kinds"], strict=True) if kind == "u"]
    key = key_text(table.keys, first["base_key"][: len(table.keys)])
    raise unknown_value(table.target, columns, key, first["last_lsn"], lacking_rows.num_rows)


def _or_null(condition: pa.BooleanArray, values: pa.Array) -> pa.Array:
    """The values, NULL elsewhere: NULL costs the server almost nothing."""
    return pc.if_else(condition, values, pa.scalar(None, values.type))


def _key_changes(
    kind: pa.Array, keys: Sequence[pa.Array], sent: Sequence[pa.Array], table: StageTable
) -> pa.BooleanArray:
    moved = pa.repeat(pa.scalar(False), len(kind))
    if not table.is_keyed:
        return moved
    is_update = pc.equal(kind, NetKind.UPDATE.value)
    for key, value in zip(keys, sent, strict=True):
        moved = pc.or_(moved, pc.fill_null(pc.and_(is_update, pc.not_equal(value, key)), False))
    return moved


def _count_rows(rows: pa.RecordBatch, key_changes: pa.Array, counts: _StagedCounts) -> bool:
    """Add the rows to `counts`; returns whether all values of all rows were sent."""
    for count in pc.value_counts(rows["kind"]).to_pylist():
        counts.counts[count["values"]] += count["counts"]
    counts.counts[KEY_CHANGED] += pc.sum(key_changes).as_py() or 0
    misses = pc.or_(pc.greater(rows["update_missing"], 0), pc.greater(rows["delete_missing"], 0))
    for kind, name in ((NetKind.INSERT, UPDATE_MAY_MISS), (NetKind.TRANSIENT, TRANSIENT_MAY_MISS)):
        counts.counts[name] += pc.sum(pc.and_(misses, pc.equal(rows["kind"], kind.value))).as_py() or 0
    for conflicts in rows["conflicts"].drop_null().to_pylist():
        counts.conflicts.update(json.loads(conflicts))
    kinds = _kinds(rows, NetKind.UPDATE)
    unsent = (kinds != ord("n")) & (kinds != ord("t"))
    counts.unsent.update(np.flatnonzero(unsent.any(axis=0)).tolist())
    omitted = _kinds(rows, NetKind.INSERT) == ord("-")
    patterns = np.unique(omitted, axis=0) if omitted.any() else omitted[:1]
    counts.omitted.update(
        "".join("-" if is_omitted else " " for is_omitted in pattern) for pattern in patterns
    )
    return not (unsent.any() or omitted.any())


def _kinds(rows: pa.RecordBatch, kind: NetKind) -> npt.NDArray[np.uint8]:
    """Value kinds of all changes of one kind: one row per change, one byte per value."""
    kinds = rows["kinds"].filter(pc.equal(rows["kind"], kind.value))
    if len(kinds) == 0:
        return np.zeros((0, 0), np.uint8)
    return ascii_bytes(kinds).reshape(len(kinds), -1)
