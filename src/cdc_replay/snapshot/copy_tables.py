"""Copy tables as of an exported snapshot: plan, one Spark job, complete the big tables.

The job's tasks stream COPY from the publisher to COPY on the subscriber, big tables first, so that the
bytes never pass through the driver or the JVM. Each table becomes `Ready(consistent point)` in the
transaction that makes its rows visible; replay takes over from there (R7.9).

| table                                | when the copy starts      | while it is copied, readers see |
|--------------------------------------|---------------------------|---------------------------------|
| never copied, or copy was killed     | `Copying` is recorded     | the rows that were there        |
| resync (`replace`) of a ready table  | its state stays as it was | the old rows, complete          |

So a killed resync changes nothing, and a killed initial copy leaves `Copying`. The next run takes up either
with a new snapshot: it reads what is not staged yet, and what has changed since (`resume.py`). An initial
copy deletes no row of the target (R7.13): rows that are there already and have the key of a copied one are a
conflict, as they are for a native table synchronisation.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from cdc_replay.errors import CdcReplayError
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.copy import subscriber_write_errors
from cdc_replay.snapshot.changed_rows import ChangedRows, ChangedRowsPart, stage_late_rows
from cdc_replay.snapshot.copy_chunk import (
    ChunkCopy,
    ChunkResult,
    CopiedChunk,
    FailedChunk,
    accepts_staged_rows,
    copy_chunks,
    delete_rows,
    subscriber_connection,
)
from cdc_replay.snapshot.indexes import indexes_rebuilt_after
from cdc_replay.snapshot.planning import SnapshotRequest, TablePlan, plan_tables
from cdc_replay.snapshot.progress import Progress, report_progress_while
from cdc_replay.snapshot.resume import touched_keys
from cdc_replay.snapshot.staging import Overlay, move_staged
from cdc_replay.subscriber.as_owner import act_on
from cdc_replay.subscriber.replication_origin import replication_origin
from cdc_replay.subscriber.subscription_tables import set_table_state
from cdc_replay.subscriber.target_checks import check_names

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

TASK_BYTES: Final = 32 * 1024 * 1024
"""Small chunks share a task, and its two connections, up to this size,"""

TASK_CHUNKS: Final = 16
"""and up to this number."""


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table that is complete as of `lsn`. `seconds` of work, over all its chunks; `bytes` of COPY text."""

    name: QualifiedName
    rows: int
    bytes: int
    seconds: float
    lsn: Lsn
    chunks_read: int = 0
    chunks_staged_before: int = 0
    """By runs that were killed; this one has used them."""


def load_tables(
    spark: SparkSession, request: SnapshotRequest, progress: Progress | None = None
) -> tuple[CopiedTable, ...]:
    """Copy the tables; those that were copied, in the order of the request.

    The subscriber's state schema is installed, the subscription is remembered in it and its lock is held by
    the caller, who also keeps the snapshot exported until this returns. Only while `while_copying` is entered
    others may hold the lock.

    Raises:
        SubscriberNotReady: listing every table and column that the subscriber lacks; nothing is changed
        then. MissingPrivilege, InvalidFilter, ApplyConflict, ServerUnavailable: if a table cannot be
        copied. The
            others are copied all the same; further tables that failed are in the log.
    """
    with contextlib.closing(subscriber_connection(request.setting(1))) as connection:
        plans = plan_tables(connection, request)
        for each in plans:
            _announce(each)
        run = _Run(spark, request, plans, connection)
        with request.while_copying():
            run.copy_chunks(progress)
            run.stage_late_rows()
        return run.complete(progress)


def _announce(planned: TablePlan) -> None:
    if planned.staged:
        logger.info(
            "table %s: %d chunks with %d rows are staged already, %d chunks are read",
            planned.table.name,
            len(planned.staged),
            sum(chunk.rows for chunk in planned.staged.values()),
            len(planned.chunks),
        )


def tasks(chunks: Sequence[ChunkCopy], readers: int | None) -> list[tuple[ChunkCopy, ...]]:
    """The chunks in groups: a group is copied by one task over one pair of connections.

    The biggest come first, so that no big one is left alone in the end. A bound on the readers makes as many
    groups of about the same size.
    """
    by_size = sorted(chunks, key=lambda each: -each.bytes)
    if readers is not None:
        bounded: list[list[ChunkCopy]] = [[] for _ in range(readers)]
        for chunk in by_size:
            min(bounded, key=lambda group: sum(each.bytes for each in group)).append(chunk)
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


class _Run:
    """One run: what has come of every chunk, and what is wrong with which table."""

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
        self._late: dict[QualifiedName, list[ChangedRowsPart]] = defaultdict(list)
        self._errors: dict[QualifiedName, CdcReplayError] = {}

    def copy_chunks(self, progress: Progress | None) -> None:
        """Copy what is missing, on the executors."""
        chunks = [chunk for each in self._plans for chunk in each.chunks]
        if not chunks:
            return
        groups = tasks(chunks, self._request.readers)
        context = self._spark.sparkContext
        setting = self._request.setting(min(len(groups), context.defaultParallelism))
        with report_progress_while(setting, self._plans, progress):
            job = context.parallelize(groups, len(groups)).flatMap(partial(copy_chunks, setting))
            results: list[ChunkResult] = job.collect()
        for result in results:
            if isinstance(result, FailedChunk):
                self._errors[result.table] = result.error
            else:
                self._done[result.table].append(result)

    def stage_late_rows(self) -> None:
        """Read again what the log has touched since the oldest chunk was read, table by table."""
        for each in self._plans:
            if each.logged is None or each.definition is None or each.table.name in self._errors:
                continue
            tasks = self._request.readers or self._spark.sparkContext.defaultParallelism
            setting = self._request.setting(tasks)
            late = ChangedRows.of(setting, each, each.definition.key)
            keys = touched_keys(each.logged, each.synced, each.definition.key_columns)
            began = time.monotonic()
            for part in stage_late_rows(late, keys.coalesce(tasks)):
                if isinstance(part, CdcReplayError):
                    self._errors[each.table.name] = part
                else:
                    self._late[each.table.name].append(part)
            found = self._late[each.table.name]
            logger.info(
                "table %s: %d keys have changed since its first chunk was read, %d rows read again, %.2f s",
                each.table.name,
                sum(part.keys for part in found),
                sum(part.rows for part in found),
                time.monotonic() - began,
            )
            failpoint("snapshot.after_late")

    def complete(self, progress: Progress | None) -> tuple[CopiedTable, ...]:
        """Move what is staged, report every table; then raise the first error, if there was one."""
        copied: list[CopiedTable] = []
        for each in self._plans:
            name = each.table.name
            if name in self._errors:
                continue
            try:
                copied.append(self._copied(each, self._swap_in(each)))
            except CdcReplayError as error:
                self._errors[name] = error
                continue
            if progress is not None:
                progress(name, copied[-1].rows, copied[-1].bytes)
        for name, failure in self._errors.items():
            logger.error("table %s was not copied: %s", name, failure.message)
        for failure in self._errors.values():
            raise failure
        return tuple(copied)

    def _copied(self, planned: TablePlan, swapped: tuple[int, float] | None) -> CopiedTable:
        done, late = self._done[planned.table.name], self._late[planned.table.name]
        rows = sum(each.rows for each in done) if swapped is None else swapped[0]
        work: list[CopiedChunk | ChangedRowsPart] = [*done, *late]
        size = sum(each.bytes for each in work) + sum(each.bytes for each in planned.staged.values())
        seconds = sum(each.seconds for each in work) + (0.0 if swapped is None else swapped[1])
        table = CopiedTable(
            planned.table.name,
            rows=rows,
            bytes=size,
            seconds=seconds,
            lsn=self._request.snapshot.consistent_point,
            chunks_read=len(done),
            chunks_staged_before=len(planned.staged),
        )
        logger.info(
            "table %s: %d rows, %d bytes in %d chunks, %d of them of an earlier run, %.2f s, as of %s",
            table.name,
            table.rows,
            table.bytes,
            len(done) + len(planned.staged),
            len(planned.staged),
            table.seconds,
            table.lsn,
        )
        return table

    def _swap_in(self, planned: TablePlan) -> tuple[int, float] | None:
        """Make a staged table visible and ready, all at once; the rows, and the seconds that it took.

        Raises:
            ApplyConflict: if the target refuses a row.
            ServerUnavailable: if it is locked for too long, or full.
        """
        if not planned.is_staged:
            return None
        began = time.monotonic()
        table, rows = planned.table, 0
        connection, request = self._connection, self._request
        failpoint("snapshot.before_swap")
        logger.info("table %s: what is staged is moved into it", table.name)
        point = request.snapshot.consistent_point
        with subscriber_write_errors(table.name), replication_origin(connection, request.subscription, point):
            if accepts_staged_rows(connection, request.subscription, table):
                rows = self._move(planned)
                check_names(connection, {table.name: table.relation})
                set_table_state(connection, request.subscription, table.name, Ready(point))
        failpoint("snapshot.after_table")
        return rows, time.monotonic() - began

    def _move(self, planned: TablePlan) -> int:
        connection, table = self._connection, planned.table
        with act_on(connection, [table.target]) as sessions, contextlib.ExitStack() as filling:
            session = sessions.session_for(table.target)
            if self._request.replace:
                delete_rows(session, table)
            if not session.runs_as_owner:
                filling.enter_context(indexes_rebuilt_after(connection, table.name.schema, table.name.name))
            return move_staged(
                connection, session, planned.staging, table.target, table.columns, self._overlay(planned)
            )

    def _overlay(self, planned: TablePlan) -> Overlay | None:
        late = self._late[planned.table.name]
        if planned.definition is None or not late:
            return None
        key = planned.definition.key_columns
        rows = tuple(part.rows_table for part in late)
        return Overlay(key, rows, tuple(part.keys_table for part in late))
