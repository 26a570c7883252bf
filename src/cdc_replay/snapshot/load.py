"""Copy tables as of an exported snapshot: plan, one Spark job, complete the big tables.

The job's tasks stream COPY from the publisher to COPY on the subscriber, big tables first, so that the
bytes never pass through the driver or the JVM. Each table becomes `Ready(consistent point)` in the
transaction that makes its rows visible; replay takes over from there (R7.9).

| table                                | when the copy starts      | while it is copied, readers see |
|--------------------------------------|---------------------------|---------------------------------|
| never copied, or copy was killed     | `Copying` is recorded     | the rows that were there        |
| resync (`replace`) of a ready table  | its state stays as it was | the old rows, complete          |

So a killed resync changes nothing, and a killed initial copy leaves `Copying`, which the next run takes up
with a new snapshot. An initial copy deletes no row of the target (R7.13): rows that are there already and
have the key of a copied one are a conflict, as they are for a native table synchronisation.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from cdc_replay.errors import CdcReplayError
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Copying, Parked, Ready, TableState
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.copy import writing
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, import_snapshot
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.snapshot import plan
from cdc_replay.snapshot.chunk import (
    ChunkCopy,
    ChunkResult,
    CopiedChunk,
    CopySetting,
    FailedChunk,
    TableCopy,
    claim,
    copy_chunks,
    empty,
    subscriber_connection,
)
from cdc_replay.snapshot.staging import drop_leftovers, move_staged, staging_name
from cdc_replay.snapshot.watch import Progress, watched
from cdc_replay.subscriber.state import set_table_state, table_states
from cdc_replay.subscriber.tables import check_targets, read_target_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

TASK_BYTES: Final = 32 * 1024 * 1024
"""Small chunks share a task, and its two connections, up to this size,"""

TASK_CHUNKS: Final = 16
"""and up to this number."""


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Which tables to copy, from where, to where.

    `replace`: a resync, the rows of the targets are replaced. Without it, tables that are ready are left
    alone.
    """

    subscription: str
    snapshot: ExportedSnapshot
    subscriber_dsn: str
    tables: tuple[SyncedTable, ...]
    replace: bool = False
    chunk_bytes: int = plan.CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table that is complete as of `lsn`. `seconds` of work, over all its chunks; `bytes` of COPY text."""

    name: QualifiedName
    rows: int
    bytes: int
    seconds: float
    lsn: Lsn


def load_tables(
    spark: SparkSession, request: SnapshotRequest, progress: Progress | None = None
) -> tuple[CopiedTable, ...]:
    """Copy the tables; those that were copied, in the order of the request.

    The subscriber's state schema is installed, the subscription is remembered in it and its lock is held by
    the caller, who also keeps the snapshot exported until this returns.

    Raises:
        SubscriberNotReady: listing every table and column that the subscriber lacks; nothing is changed
        then. MissingPrivilege, InvalidFilter, ApplyConflict, ServerUnavailable: if a table cannot be
        copied. The
            others are copied all the same; further tables that failed are in the log.
    """
    setting = CopySetting(request.subscription, request.snapshot, request.subscriber_dsn, request.replace)
    with contextlib.closing(subscriber_connection(setting)) as connection:
        chunks = _begin(connection, request)
        results = _run(spark, setting, chunks, progress)
        return _complete(connection, setting, chunks, results, progress)


def _begin(connection: Connection, request: SnapshotRequest) -> tuple[ChunkCopy, ...]:
    """Check the targets, clear up after a killed run, record the states, plan the chunks."""
    states = table_states(connection, request.subscription)
    tables = [
        each for each in request.tables if request.replace or not _is_complete(states.get(each.table.name))
    ]
    targets = read_target_tables(connection, [each.table.name for each in tables])
    check_targets({each.table.name: each.columns for each in tables}, targets)
    if dropped := drop_leftovers(connection, request.subscription):
        logger.info("dropped %d staging tables of a snapshot that was killed", dropped)
    with contextlib.closing(import_snapshot(request.snapshot, purpose="snapshot plan")) as source:
        storage = plan.read_storage(source, tables)
    chunks: list[ChunkCopy] = []
    with connection.transaction():
        for synced in tables:
            target = targets[synced.table.name]
            begun = _begin_table(connection, request, target.name, states.get(target.name))
            table = TableCopy(target.name, synced.columns, target.is_partitioned, begun)
            planned = plan.plan_table(synced, storage, chunk_bytes=request.chunk_bytes)
            chunks += _chunk_copies(request, synced, table, planned)
    return tuple(chunks)


def _is_complete(state: TableState | None) -> bool:
    return isinstance(state, Ready | Parked)


def _begin_table(
    connection: Connection, request: SnapshotRequest, name: QualifiedName, state: TableState | None
) -> TableState:
    """The state under which the table is copied; recorded, unless the table is complete and stays so."""
    if state is not None and _is_complete(state):
        return state
    copying = Copying(request.snapshot.consistent_point)
    set_table_state(connection, request.subscription, name, copying)
    return copying


def _chunk_copies(
    request: SnapshotRequest, synced: SyncedTable, table: TableCopy, chunks: Sequence[plan.Chunk]
) -> Iterator[ChunkCopy]:
    for chunk in chunks:
        queries = tuple(plan.select(piece, synced.columns, synced.filters) for piece in chunk.slices)
        staging = None
        if len(chunks) > 1:
            point = request.snapshot.consistent_point
            staging = staging_name(request.subscription, table.name, point, chunk.number)
        yield ChunkCopy(table, chunk.number, queries, chunk.bytes, staging)


def _tasks(chunks: Sequence[ChunkCopy]) -> list[tuple[ChunkCopy, ...]]:
    """The chunks in groups, the biggest first: a group is copied by one task over one pair of connections."""
    groups: list[list[ChunkCopy]] = []
    room = 0
    for chunk in sorted(chunks, key=lambda each: -each.bytes):
        if not groups or chunk.bytes > room or len(groups[-1]) == TASK_CHUNKS:
            groups.append([])
            room = TASK_BYTES
        groups[-1].append(chunk)
        room -= chunk.bytes
    return [tuple(group) for group in groups]


def _run(
    spark: SparkSession, setting: CopySetting, chunks: Sequence[ChunkCopy], progress: Progress | None
) -> list[ChunkResult]:
    """Copy all chunks on the executors; one result for each."""
    if not chunks:
        return []
    tasks = _tasks(chunks)
    with watched(setting, chunks, progress):
        return (
            spark.sparkContext.parallelize(tasks, len(tasks)).flatMap(partial(copy_chunks, setting)).collect()
        )


def _complete(
    connection: Connection,
    setting: CopySetting,
    chunks: Sequence[ChunkCopy],
    results: Sequence[ChunkResult],
    progress: Progress | None,
) -> tuple[CopiedTable, ...]:
    """Move what is staged, report every table; then raise the first error, if there was one."""
    chunks_of: dict[QualifiedName, list[ChunkCopy]] = defaultdict(list)
    for chunk in chunks:
        chunks_of[chunk.table.name].append(chunk)
    copied: list[CopiedTable] = []
    errors = {result.table: result.error for result in results if isinstance(result, FailedChunk)}
    for name, parts in chunks_of.items():
        if name in errors:
            continue
        try:
            seconds = _swap_in(connection, setting, parts)
        except CdcReplayError as error:
            errors[name] = error
            continue
        done = [each for each in results if isinstance(each, CopiedChunk) and each.table == name]
        copied.append(_copied_table(setting, name, done, seconds))
        if progress is not None:
            progress(name, copied[-1].rows, copied[-1].bytes)
    for name, failure in errors.items():
        logger.error("table %s was not copied: %s", name, failure.message)
    for failure in errors.values():
        raise failure
    return tuple(copied)


def _copied_table(
    setting: CopySetting, name: QualifiedName, done: Sequence[CopiedChunk], seconds: float
) -> CopiedTable:
    table = CopiedTable(
        name,
        rows=sum(each.rows for each in done),
        bytes=sum(each.bytes for each in done),
        seconds=seconds + sum(each.seconds for each in done),
        lsn=setting.snapshot.consistent_point,
    )
    logger.info(
        "table %s: %d rows, %d bytes in %d chunks, %.2f s, as of %s",
        name,
        table.rows,
        table.bytes,
        len(done),
        table.seconds,
        table.lsn,
    )
    return table


def _swap_in(connection: Connection, setting: CopySetting, parts: Sequence[ChunkCopy]) -> float:
    """Make a staged table visible and ready, all at once; the seconds that it took.

    Raises:
        ApplyConflict: if the target refuses a row.
        ServerUnavailable: if it is locked for too long, or full.
    """
    staged = [part.staging for part in parts if part.staging is not None]
    if not staged:
        return 0.0
    began = time.monotonic()
    table = parts[0].table
    failpoint("snapshot.before_swap")
    with writing(table.name), connection.transaction():
        if claim(connection, setting.subscription, table):
            if setting.replace:
                empty(connection, table)
            move_staged(connection, staged, table.identifier, table.columns)
            ready = Ready(setting.snapshot.consistent_point)
            set_table_state(connection, setting.subscription, table.name, ready)
    failpoint("snapshot.after_table")
    return time.monotonic() - began
