"""A window of the change log → frame of changes.

Executors read the segments themselves, row group by row group, with pyarrow: the raw bytes never pass through
the JVM, which sees only the decoded changes. A task gets a run of row groups of about equal size, and holds
one row group at a time.

Reading the log changes nothing, so a task that fails or dies is simply run again.

Spark reports an exception of a task by its text alone; the text therefore names segment, row group, row and
offset.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdc_replay.changelog.segment import RowGroup, read_row_group
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.change import CHANGES
from cdc_replay.model.lsn import Window
from cdc_replay.model.relation import Relation

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from cdc_replay.pgoutput.columnar import ChangeDecoder

TASKS_PER_CORE: Final = 3
"""How many tasks the row groups are shared out to, so that one slow task does not keep the others waiting."""

BATCH_ROWS: Final = 32_768
"""Rows of a batch that is handed to Spark."""


def decode(
    spark: SparkSession,
    groups: Sequence[RowGroup],
    window: Window,
    relations: Mapping[int, Relation],
    catalogs: Sequence[tuple[int, int]],
) -> DataFrame:
    """The row changes and TRUNCATEs of `groups` whose commit LSN is in `window`, in CHANGES columns.

    `relations` are the shapes by `Relation.version`; `catalogs` the versions of the publisher's catalog, for
    whom and from where each is in force (`pgoutput.catalog_versions`): each change gets the number of
    the last that is not above it, else of the first (R9.10). Rows are in no particular order; (`commit_lsn`,
    `seq`) orders them.

    Nothing is read before the frame is used, and all is read again each time it is. A damaged segment or an
    invalid message then fails the Spark job, with the text of ChangeLogDamaged or InvalidMessage.
    """
    tasks = _tasks(groups, TASKS_PER_CORE * spark.sparkContext.defaultParallelism)
    numbers = spark.range(0, len(tasks), numPartitions=max(1, len(tasks)))
    reader = _Reader(tasks, window, dict(relations), tuple(catalogs))
    return numbers.mapInArrow(reader.changes, CHANGES.ddl)


def _tasks(groups: Sequence[RowGroup], count: int) -> tuple[tuple[RowGroup, ...], ...]:
    """At most `count` runs of neighbouring row groups; each goes to the share that its middle row is in."""
    total_rows = sum(group.rows for group in groups)
    ends = itertools.accumulate(group.rows for group in groups)
    shares = [
        (2 * end - group.rows) * count // (2 * total_rows) for group, end in zip(groups, ends, strict=True)
    ]
    runs = itertools.groupby(zip(shares, groups, strict=True), key=operator.itemgetter(0))
    return tuple(tuple(group for _, group in run) for _, run in runs)


@dataclass(frozen=True, slots=True)
class _Reader:
    """What an executor needs; `tasks[number]` is the work of the row with that `id`."""

    tasks: tuple[tuple[RowGroup, ...], ...]
    window: Window
    relations: dict[int, Relation]
    catalogs: tuple[tuple[int, int], ...]

    def changes(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Here, not at the top: the driver, which only plans, need not load or compile the kernels.
        from cdc_replay.pgoutput.columnar import ChangeDecoder  # noqa: PLC0415

        decoder = ChangeDecoder.of(self.window, self.relations, self.catalogs)
        for batch in numbers:
            for number in batch.column("id").to_pylist():
                for group in self.tasks[number]:
                    yield from _batches(_decoded(decoder, group))


def _decoded(decoder: ChangeDecoder, group: RowGroup) -> pa.RecordBatch:
    try:
        return decoder.changes(read_row_group(group))
    except InvalidMessage as error:
        raise InvalidMessage(
            f'{error.message} of row group {group.index} of segment "{group.uri}"',
            detail=error.detail,
            hint="The segment's checksums are right, so this is what was captured: report it, with the"
            " publisher's version and the message.",
            rule=error.rule,
        ) from None  # Spark's text shows a cause first, which does not name the segment.


def _batches(changes: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, changes.num_rows, BATCH_ROWS):
        yield changes.slice(start, BATCH_ROWS)
