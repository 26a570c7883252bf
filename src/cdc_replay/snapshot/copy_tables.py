"""Copy tables as of an exported snapshot: plan, one Spark job, complete the big tables.

The job's tasks stream COPY from the publisher to COPY on the subscriber, big tables first; rows never pass
through the driver or the JVM. Each table becomes `Ready(consistent point)` in the transaction that makes its
rows visible; replay continues from there (R7.9).

| table                                | when the copy starts      | while it is copied, readers see |
|--------------------------------------|---------------------------|---------------------------------|
| never copied, or copy was killed     | `Copying` is recorded     | the existing rows               |
| resync (`replace`) of a ready table  | its state stays           | the old rows, complete          |

So a killed resync changes nothing, and a killed initial copy leaves `Copying`. The next run resumes either
with a new snapshot: it reads chunks that are not staged yet, and rows changed since (`resume.py`). An initial
copy deletes no row of the target (R7.13): an existing row with the key of a copied one is a conflict, as for
a native table synchronisation.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from cdc_replay.errors import CdcReplayError
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.progress import Progress, Report, each_table, unreported
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.copy import subscriber_write_errors
from cdc_replay.snapshot.changed_rows import ChangedRows, ChangedRowsPart, stage_changed_rows
from cdc_replay.snapshot.copy_chunk import (
    ChunkCopy,
    ChunkResult,
    CopiedChunk,
    CopySettings,
    FailedChunk,
    accepts_staged_rows,
    copy_chunks,
    delete_rows,
    subscriber_connection,
)
from cdc_replay.snapshot.indexes import indexes_rebuilt_after
from cdc_replay.snapshot.planning import SnapshotRequest, TablePlan, plan_tables
from cdc_replay.snapshot.progress import report_progress_while
from cdc_replay.snapshot.resume import touched_keys
from cdc_replay.snapshot.staging import Overlay, move_staged
from cdc_replay.spark.errors import raise_only_ours
from cdc_replay.spark.session import count_cores
from cdc_replay.subscriber.as_owner import act_on
from cdc_replay.subscriber.firing_foreign_keys import group_tables
from cdc_replay.subscriber.replication_origin import replication_origin
from cdc_replay.subscriber.subscription_tables import set_table_state
from cdc_replay.subscriber.target_checks import check_names

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_RESULT: Final = pa.schema([("result", pa.binary())])

TASK_BYTES: Final = 32 * 1024 * 1024
"""Small chunks share a task and its two connections up to this size,"""

TASK_CHUNKS: Final = 16
"""and up to this number."""


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table that is complete as of `lsn`. `seconds` of work of all chunks; `bytes` of COPY text."""

    name: QualifiedName
    rows: int
    bytes: int
    seconds: float
    lsn: Lsn
    chunks_read: int = 0
    chunks_staged_before: int = 0
    """Chunks of killed runs that this run used."""


def load_tables(
    spark: SparkSession, request: SnapshotRequest, report: Report = unreported
) -> tuple[CopiedTable, ...]:
    """Copy the tables; returns the copied ones, in the order of the request.

    The caller has recorded the subscription in the subscriber's state schema, holds its lock, and keeps the
    snapshot exported until this returns. Other processes may hold the lock only inside `while_copying`.

    Raises:
        SubscriberNotReady: listing every table and column that the subscriber lacks, with nothing changed.
        MissingPrivilege, InvalidFilter, ApplyConflict, ServerUnavailable: the first error of a table; other
            tables are still copied, and further errors are logged.
    """
    with contextlib.closing(subscriber_connection(request.settings(1))) as connection:
        plans = plan_tables(connection, request)
        for planned in plans:
            _announce(planned)
        run = _Run(spark, request, plans, connection)
        with request.while_copying():
            run.copy_chunks(report)
            run.stage_changed_rows()
        return run.complete(report)


def _announce(planned: TablePlan) -> None:
    if planned.staged:
        logger.info(
            "table %s: %d chunks with %d rows already staged, reading %d chunks",
            planned.table.name,
            len(planned.staged),
            sum(chunk.rows for chunk in planned.staged.values()),
            len(planned.chunks),
        )


def tasks(chunks: Sequence[ChunkCopy], readers: int | None) -> list[tuple[ChunkCopy, ...]]:
    """The chunks of each task, which copies them over one pair of connections.

    The biggest chunks come first, so that no big one runs alone at the end. With `readers`, there are so many
    groups of about the same size.
    """
    by_size = sorted(chunks, key=lambda chunk: -chunk.bytes)
    if readers is not None:
        bounded: list[list[ChunkCopy]] = [[] for _ in range(readers)]
        for chunk in by_size:
            min(bounded, key=lambda group: sum(chunk.bytes for chunk in group)).append(chunk)
        return [tuple(group) for group in bounded if group]
    groups: list[list[ChunkCopy]] = []
    room = 0
    for chunk in by_size:
        if not groups or chunk.bytes > room or len(groups[-1]) == TASK_CHUNKS:
            groups.append([])
            room = TASK_BYTES
        groups[-1].append(chunk)
        room -= chunk.bytes
    return [tuple(group) for group in groups]


@dataclass(frozen=True, slots=True)
class _CopyTask:
    """Copies the chunks of each task whose number it gets; picklable."""

    settings: CopySettings
    groups: tuple[tuple[ChunkCopy, ...], ...]

    def run(self, tasks: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in tasks:
            for task_id in batch.column("id").to_pylist():
                for result in copy_chunks(self.settings, self.groups[task_id]):
                    yield pa.RecordBatch.from_pydict({"result": [pickle.dumps(result)]}, _RESULT)


class _Run:
    def __init__(
        self,
        spark: SparkSession,
        request: SnapshotRequest,
        plans: Sequence[TablePlan],
        connection: Connection,
    ) -> None:
        self._spark, self._request, self._plans = spark, request, plans
        self._connection = connection
        self._done: dict[QualifiedName, list[CopiedChunk]] = defaultdict(list)
        self._changed: dict[QualifiedName, list[ChangedRowsPart]] = defaultdict(list)
        self._errors: dict[QualifiedName, CdcReplayError] = {}

    def copy_chunks(self, report: Report) -> None:
        """Copy the missing chunks, on the executors."""
        chunks = [chunk for planned in self._plans for chunk in planned.chunks]
        if not chunks:
            return
        groups = tasks(chunks, self._request.readers)
        settings = self._request.settings(min(len(groups), count_cores(self._spark)))
        with report_progress_while(settings, self._plans, report):
            ids = self._spark.range(0, len(groups), numPartitions=len(groups))
            rows = ids.mapInArrow(
                raise_only_ours(_CopyTask(settings, tuple(groups)).run), from_arrow_schema(_RESULT)
            ).collect()
        # Pickled by our own tasks, like all results of Spark jobs.
        results: Iterator[ChunkResult] = (pickle.loads(bytes(row["result"])) for row in rows)  # noqa: S301
        for result in results:
            if isinstance(result, FailedChunk):
                self._errors[result.table] = result.error
            else:
                self._done[result.table].append(result)

    def stage_changed_rows(self) -> None:
        """Read rows again that changed since the oldest chunk was read, table by table."""
        for planned in self._plans:
            if (
                planned.changes_since is None
                or planned.fingerprint is None
                or planned.table.name in self._errors
            ):
                continue
            tasks = self._request.readers or count_cores(self._spark)
            settings = self._request.settings(tasks)
            changed = ChangedRows.from_plan(settings, planned, planned.fingerprint.key)
            keys = touched_keys(planned.changes_since, planned.synced, planned.fingerprint.key_columns)
            started = time.monotonic()
            for part in stage_changed_rows(changed, keys.coalesce(tasks)):
                if isinstance(part, CdcReplayError):
                    self._errors[planned.table.name] = part
                else:
                    self._changed[planned.table.name].append(part)
            parts = self._changed[planned.table.name]
            logger.info(
                "table %s: %d keys changed since its first chunk was read, %d rows read again, %.2f s",
                planned.table.name,
                sum(part.keys for part in parts),
                sum(part.rows for part in parts),
                time.monotonic() - started,
            )
            failpoint("snapshot.after_late")

    def complete(self, report: Report) -> tuple[CopiedTable, ...]:
        """Move staged rows and report every table; then raise the first error, if any.

        A table to which another one refers comes first, if the foreign key fires (R8.13).
        """
        copied: dict[QualifiedName, CopiedTable] = {}
        by_name = {planned.table.name: planned for planned in self._plans}
        ordered = itertools.chain.from_iterable(group_tables(planned.table.target for planned in self._plans))
        names = [target.name for target in ordered]
        for name in each_table(report, "complete", self._request.subscription, names, lambda name: name):
            planned = by_name[name]
            if name in self._errors:
                continue
            try:
                copied[name] = self._report(planned, self._complete_table(planned))
            except CdcReplayError as error:
                self._errors[name] = error
                continue
            size = copied[name].bytes
            report(Progress("copy", str(name), size, size, rows=copied[name].rows))
        failures = iter(self._errors.items())
        first = next(failures, None)
        for name, failure in failures:
            logger.error("table %s was not copied: %s", name, failure.message)
        if first is not None:
            raise first[1]
        return tuple(copied[name] for name in by_name)

    def _report(self, planned: TablePlan, completed: tuple[int, float] | None) -> CopiedTable:
        chunks, changed_parts = self._done[planned.table.name], self._changed[planned.table.name]
        rows = sum(chunk.rows for chunk in chunks) if completed is None else completed[0]
        results: list[CopiedChunk | ChangedRowsPart] = [*chunks, *changed_parts]
        size = sum(chunk.bytes for chunk in results) + sum(chunk.bytes for chunk in planned.staged.values())
        seconds = sum(chunk.seconds for chunk in results) + (0.0 if completed is None else completed[1])
        table = CopiedTable(
            planned.table.name,
            rows=rows,
            bytes=size,
            seconds=seconds,
            lsn=self._request.snapshot.consistent_point,
            chunks_read=len(chunks),
            chunks_staged_before=len(planned.staged),
        )
        logger.info(
            "table %s: %d rows, %d bytes in %d chunks, %d of them from earlier runs, %.2f s, as of %s",
            table.name,
            table.rows,
            table.bytes,
            len(chunks) + len(planned.staged),
            len(planned.staged),
            table.seconds,
            table.lsn,
        )
        return table

    def _complete_table(self, planned: TablePlan) -> tuple[int, float] | None:
        """Make a staged table visible and ready in one transaction; its rows, and the seconds that it took.

        Raises:
            ApplyConflict: if the target rejects a row.
            ServerUnavailable: if the target stays locked, or its disk is full.
        """
        if not planned.is_staged:
            return None
        started = time.monotonic()
        table, rows = planned.table, 0
        connection, request = self._connection, self._request
        failpoint("snapshot.before_swap")
        logger.info("table %s: moving staged rows into the table", table.name)
        point = request.snapshot.consistent_point
        with subscriber_write_errors(table.name), replication_origin(connection, request.subscription, point):
            if accepts_staged_rows(connection, request.subscription, table):
                rows = self._move(planned)
                check_names(connection, {table.name: table.relation})
                set_table_state(connection, request.subscription, table.name, Ready(point))
        failpoint("snapshot.after_table")
        return rows, time.monotonic() - started

    def _move(self, planned: TablePlan) -> int:
        connection, request, table = self._connection, self._request, planned.table
        with act_on(connection, [table.target]) as sessions, contextlib.ExitStack() as filling:
            session = sessions.session_for(table.target)
            if request.replace:
                delete_rows(session, request.subscription, table, request.shared.get(table.name))
            if not session.runs_as_owner:
                size = sum(chunk.bytes for chunk in planned.chunks)
                size += sum(chunk.bytes for chunk in planned.staged.values())
                filling.enter_context(
                    indexes_rebuilt_after(connection, table.name.schema, table.name.name, size)
                )
            return move_staged(
                connection, session, planned.staging, table.target, table.columns, self._overlay(planned)
            )

    def _overlay(self, planned: TablePlan) -> Overlay | None:
        changed = self._changed[planned.table.name]
        if planned.fingerprint is None or not changed:
            return None
        key = planned.fingerprint.key_columns
        rows = tuple(part.rows_table for part in changed)
        return Overlay(key, rows, tuple(part.keys_table for part in changed))
