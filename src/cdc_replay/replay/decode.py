"""A window of the change log → frame of changes.

Executors read the segments themselves, row group by row group, with pyarrow: raw messages never enter the
JVM. A task gets a run of row groups of about equal size, and holds one row group at a time. Reading changes
nothing, so a failed task is simply run again.

Spark reports an exception of a task as text only: the text names segment, row group, row and offset.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from cdc_replay.changelog.segment import RowGroup, first_position, read_columns, read_row_group
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.frames import CHANGES
from cdc_replay.model.lsn import Window
from cdc_replay.model.relation import Relation
from cdc_replay.spark.errors import raise_only_ours

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from cdc_replay.pgoutput.columnar import ChangeDecoder

TASKS_PER_CORE: Final = 3
"""Tasks per core, so that one slow task does not keep the others waiting."""

BATCH_ROWS: Final = 32_768
"""Rows per batch for Spark."""

_GROUPS_SEEN: Final = 16

ChangePosition: TypeAlias = tuple[int, int]
"""Commit LSN and seq, which identify a row change."""


def _tasks(groups: Sequence[RowGroup], count: int) -> tuple[tuple[RowGroup, ...], ...]:
    """At most `count` runs of neighbouring row groups, split by the position of each group's middle row."""
    total_rows = sum(group.rows for group in groups)
    ends = itertools.accumulate(group.rows for group in groups)
    shares = [
        (2 * end - group.rows) * count // (2 * total_rows) for group, end in zip(groups, ends, strict=True)
    ]
    runs = itertools.groupby(zip(shares, groups, strict=True), key=operator.itemgetter(0))
    return tuple(tuple(group for _, group in run) for _, run in runs)


@dataclass(frozen=True, slots=True)
class LogReader:
    """Reads and decodes a window on the executors; picklable.

    `tasks[task]` are the row groups of one task; `relations` are the shapes by `Relation.version`; `catalogs`
    are the versions of the publisher's catalog, with their transaction and the position from which they are
    in force (`arrow.version_index`): a change gets the number of the last one that is not above it, else of
    the first (R9.10).

    Evaluation is lazy, and repeated at each use. A damaged segment or an invalid message raises
    ChangeLogDamaged or InvalidMessage, of which Spark passes on the text.
    """

    tasks: tuple[tuple[RowGroup, ...], ...]
    window: Window
    relations: dict[int, Relation]
    catalogs: tuple[tuple[int, int], ...]

    @classmethod
    def for_cores(
        cls,
        groups: Sequence[RowGroup],
        window: Window,
        relations: Mapping[int, Relation],
        catalogs: Sequence[tuple[int, int]],
        *,
        cores: int,
    ) -> Self:
        """The row groups, distributed for that many cores."""
        return cls(_tasks(groups, TASKS_PER_CORE * cores), window, dict(relations), tuple(catalogs))

    @property
    def rows(self) -> int:
        """The number of messages in the row groups."""
        return sum(group.rows for task in self.tasks for group in task)

    @property
    def size_bytes(self) -> int:
        """Their approximate size in memory."""
        return sum(group.size_bytes for task in self.tasks for group in task)

    def relations_seen(self) -> Counter[int]:
        """Messages by relation in a sample of the row groups: about its share of the window."""
        groups = [group for task in self.tasks for group in task]
        counts: Counter[int] = Counter()
        for group in groups[:: max(1, -(-len(groups) // _GROUPS_SEEN))]:
            for row in read_columns(group, ["relation_id"], self.window)["relation_id"].value_counts():
                counts[row["values"].as_py() or 0] += row["counts"].as_py()
        return counts

    def tasks_of(self, positions: Iterable[ChangePosition]) -> list[int]:
        """The task that reads the change at each of these positions of the window."""
        starts = [first_position(groups[0]) for groups in self.tasks]
        return [bisect.bisect_right(starts, position) - 1 for position in positions]

    def frame(self, spark: SparkSession) -> DataFrame:
        """The row changes and TRUNCATEs of the window, in CHANGES columns, for readers of a row's history.

        Rows are in no particular order; (`commit_lsn`, `seq`) orders them.
        """
        return self.task_ids(spark).mapInArrow(raise_only_ours(self.changes), CHANGES.ddl)

    def task_ids(self, spark: SparkSession) -> DataFrame:
        """One row and partition per task, with the task's number in column `id`."""
        return spark.range(0, len(self.tasks), numPartitions=max(1, len(self.tasks)))

    def chunks(self, task: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The changes (CHANGES) of a task, one batch per row group, with its number in the window."""
        # Here, not at the top: the driver, which only plans, need not load or compile the kernels.
        from cdc_replay.pgoutput.columnar import ChangeDecoder  # noqa: PLC0415

        decoder = ChangeDecoder.from_relations(self.window, self.relations, self.catalogs)
        first = sum(map(len, self.tasks[:task]))
        for index, group in enumerate(self.tasks[task], first):
            yield index, _decode(decoder, group)

    def changes(self, tasks: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The changes of the tasks in `tasks`, in batches for Spark."""
        for batch in tasks:
            for task in batch.column("id").to_pylist():
                for _, changes in self.chunks(task):
                    yield from _split_batches(changes)


def _decode(decoder: ChangeDecoder, group: RowGroup) -> pa.RecordBatch:
    try:
        return decoder.decode(read_row_group(group))
    except InvalidMessage as error:
        raise InvalidMessage(
            f'{error.message} of row group {group.index} of segment "{group.uri}"',
            detail=error.detail,
            hint="The segment's checksums are right, so this is what was captured: report it, with the"
            " publisher's version and the message.",
            rule=error.rule,
        ) from None  # Spark's text starts with the cause, which does not name the segment.


def _split_batches(changes: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, changes.num_rows, BATCH_ROWS):
        yield changes.slice(start, BATCH_ROWS)
