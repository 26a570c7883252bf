"""Values for rows that enter without them (R4.6), on their way to the map tasks, which put them in place.

    id | commit_lsn  seq  new  new_kinds
    ---+--------------------------------     one partition per map task: its number first, then the changes
     0 |                                     of its row groups that get values, in log order, with the new
     0 |        120    3  …    tt            row's values

A task reads the values as it comes to their row groups, so that it holds one batch of them at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F

from cdc_replay.arrow.arrays import Int64s, int_array
from cdc_replay.arrow.take import take_lists
from cdc_replay.replay.decode import ChangePosition, LogReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_POSITION: Final = ("commit_lsn", "seq")
_VALUES: Final = (*_POSITION, "new", "new_kinds")
_SEQ_BITS: Final = 32
_TEXTS: Final = pa.list_(pa.string())


@dataclass(frozen=True, slots=True)
class ResolvedEntries:
    """Changes that get values: `rows` has, of changes at these `positions`, the position and the new row."""

    rows: DataFrame
    positions: Sequence[ChangePosition]
    size_bytes: int
    """The size of the values, about."""

    def by_task(self, reader: LogReader) -> DataFrame:
        """The input of the reader's tasks."""
        tasks = reader.task_ids(self.rows.sparkSession)
        lsns, seqs = zip(*self.positions, strict=True)
        columns = [reader.tasks_of(self.positions), lsns, seqs]
        types = (pa.int64(), pa.int64(), pa.int32())
        arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
        table = pa.Table.from_arrays(arrays, names=["id", *_POSITION])
        task_by_position = F.broadcast(tasks.sparkSession.createDataFrame(table))
        values = self.rows.join(task_by_position, list(_POSITION)).select("id", *_VALUES)
        return (
            tasks.select("id")
            .unionByName(values, allowMissingColumns=True)
            .repartitionById(len(reader.tasks), F.col("id").cast("int"))
            .sortWithinPartitions("id", *_POSITION)
        )


@dataclass(slots=True)
class EnteredValues:
    """The values of one map task, in log order."""

    batches: Iterator[pa.RecordBatch]
    _next: pa.RecordBatch | None = field(default=None)

    @classmethod
    def of_partition(cls, batches: Iterable[pa.RecordBatch]) -> tuple[int, Self] | None:
        """The number of the task in a partition of the input, if it has one, and its values."""
        partition = iter(batches)
        first = next((batch for batch in partition if batch.num_rows), None)
        if first is None:
            return None
        return first["id"][0].as_py(), cls(itertools.chain([first.slice(1)], partition))

    def complete(self, changes: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The changes (CHANGES) of the next row group with their values, in one or more batches."""
        start = 0
        for values, rows in self._values_of(changes):
            end = int(rows[-1]) + 1
            yield _with_values(changes.slice(start, end - start), values, rows - start)
            start = end
        if start < changes.num_rows or start == 0:
            yield changes.slice(start)

    def _values_of(self, changes: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
        """Batches of values, and the rows of `changes` that they are for."""
        while changes.num_rows and (values := self._peek()) is not None:
            lsns = np.unique(int_array(changes["commit_lsn"]))
            positions, searched = (_positions(batch, lsns) for batch in (changes, values))
            count = int(np.searchsorted(searched, positions[-1], side="right"))
            self._next = values.slice(count)
            if count == 0:
                return
            yield values.slice(0, count), np.searchsorted(positions, searched[:count])

    def _peek(self) -> pa.RecordBatch | None:
        while self._next is None or self._next.num_rows == 0:
            self._next = next(self.batches, None)
            if self._next is None:
                return None
        return self._next


def _positions(batch: pa.RecordBatch, lsns: Int64s) -> Int64s:
    """Positions of changes as one number each, in log order; `lsns` are the commits, ascending."""
    ranks = np.searchsorted(lsns, int_array(batch["commit_lsn"]))
    return (ranks << _SEQ_BITS) + int_array(batch["seq"])


def _with_values(changes: pa.RecordBatch, values: pa.RecordBatch, rows: Int64s) -> pa.RecordBatch:
    """`changes` with new rows from `values` at these rows."""
    source = np.arange(changes.num_rows)
    source[rows] = changes.num_rows + np.arange(len(rows))
    lists = pa.concat_arrays([changes["new"], values["new"].cast(_TEXTS)])
    kinds = pa.concat_arrays([changes["new_kinds"], values["new_kinds"]])
    columns = {name: changes[name] for name in changes.schema.names}
    columns |= {"new": take_lists(lists, source), "new_kinds": kinds.take(pa.array(source))}
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=changes.schema)
