"""Plan a copy: which chunks earlier runs have staged, and which pages are missing.

| found on the subscriber                        | this run reads                                            |
|------------------------------------------------|-----------------------------------------------------------|
| nothing of the table                           | all of it                                                 |
| chunks with the current fingerprint, and the   | the missing ranges; rows changed in the log since         |
| log has all changes since the oldest of them   | (`changed_rows.py`)                                       |
| other chunks                                   | all of it; the chunks are dropped                         |

A table of one chunk is copied directly into its target, unless its rows replace others, or refer to another
table of the copy by a foreign key that fires (R8.13): these move when the other table is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cdc_replay.filters.printed import print_filters
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.model.table_state import Copying, Parked, Ready, TableState
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, import_snapshot
from cdc_replay.postgres.planned_tables import PlannedTable
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.snapshot import plan
from cdc_replay.snapshot.copy_chunk import ChunkCopy, CopySettings, TableCopy
from cdc_replay.snapshot.fingerprint import CopyFingerprint, read_fingerprints
from cdc_replay.snapshot.plan import Chunk, PageSlice, Storage
from cdc_replay.snapshot.resume import LoggedChanges, ReadLog, can_tell_keys
from cdc_replay.snapshot.staging import PageRange, StagedChunk, drop_leftovers, staged_chunks, staging_name
from cdc_replay.subscriber.replication_origin import drop_origins
from cdc_replay.subscriber.subscription_tables import set_table_state, table_states
from cdc_replay.subscriber.target_checks import check_targets
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables

if TYPE_CHECKING:
    from psycopg import sql

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Which tables to copy, from where, to where.

    `replace`: a resync, the rows of the targets are replaced. Without it, ready tables are skipped.
    """

    subscription: str
    snapshot: ExportedSnapshot
    subscriber_dsn: str
    tables: tuple[SyncedTable, ...]
    replace: bool = False
    chunk_bytes: int = plan.CHUNK_BYTES
    log_identity: str = ""
    """Identifies the change log that `read_log` reads: positions in another log are not comparable."""
    read_log: ReadLog = field(default=lambda *_: None)
    """Reads changes up to the snapshot; by default, no staged chunk is used again."""
    readers: int | None = None
    """Most parallel tasks, each with a connection to both sides; None: Spark's cores."""
    bytes_per_second: int | None = None
    """Limit for the COPY text of all tasks together; None: no limit."""
    run_as_owner: bool = False
    """As in `model.subscription.Subscription`."""
    shared: Mapping[QualifiedName, str] = field(default_factory=dict)
    """By table, another subscription that feeds it."""
    while_copying: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """The context while chunks are read: the caller can let other processes use ready tables."""

    def settings(self, tasks: int) -> CopySettings:
        """The settings of all chunks, with the rate shared by so many tasks."""
        rate = None if self.bytes_per_second is None else self.bytes_per_second / max(1, tasks)
        return CopySettings(self.subscription, self.snapshot, self.subscriber_dsn, self.replace, rate)


@dataclass(frozen=True, slots=True)
class TablePlan:
    """A table to copy: `chunks` to read, and chunks that earlier runs `staged`, by staging table.

    `passes` is the condition for rows that pass the row filters, None without filters. `changes_since` are
    the changes since the oldest staged chunk, None if nothing is staged.
    """

    table: TableCopy
    synced: SyncedTable
    passes: sql.Composed | None
    fingerprint: CopyFingerprint | None
    staged: Mapping[str, StagedChunk]
    changes_since: LoggedChanges | None
    chunks: tuple[ChunkCopy, ...]

    @property
    def is_staged(self) -> bool:
        """Whether the table is copied through staging tables, not directly from its only chunk."""
        return bool(self.staging)

    @property
    def staging(self) -> tuple[str, ...]:
        """The staging tables in page order: neighbours in the target's indexes stay together."""
        named = [(chunk.pages, name) for name, chunk in self.staged.items()]
        named += [
            (chunk.description.pages if chunk.description else (), chunk.staging)
            for chunk in self.chunks
            if chunk.staging is not None
        ]

        def position(entry: tuple[tuple[PageRange, ...], str]) -> list[tuple[int, int]]:
            return [(pages.leaf, pages.first_page) for pages in entry[0][:1]]

        return tuple(name for _, name in sorted(named, key=position))


def plan_tables(connection: Connection, request: SnapshotRequest) -> tuple[TablePlan, ...]:
    """Check the targets, drop leftovers of killed runs, record the states, plan the remaining chunks.

    Raises:
        SubscriberNotReady: listing every table and column that the subscriber lacks; nothing is changed then.
        InvalidFilter: if a row filter cannot be read.
    """
    states = table_states(connection, request.subscription)
    tables = [
        synced
        for synced in request.tables
        if request.replace or not is_complete(states.get(synced.table.name))
    ]
    names = [synced.table.name for synced in tables]
    targets = read_target_tables(connection, names, run_as_owner=request.run_as_owner)
    check_targets({synced.table.name: synced.columns for synced in tables}, targets)
    chunks = staged_chunks(connection, request.subscription)
    plans = tuple(_plans(request, tables, targets, states, chunks))
    keep = {name for synced in plans for name in synced.staged}
    keep |= {name for name, chunk in chunks.items() if _awaits_later_run(chunk.table, plans, states)}
    if dropped := drop_leftovers(connection, request.subscription, keep=keep):
        logger.info("dropped %d unusable staging tables of killed snapshots", dropped)
    drop_origins(connection, request.subscription)
    with connection.transaction():
        for synced in plans:
            if not is_complete(synced.table.initial_state):
                set_table_state(
                    connection, request.subscription, synced.table.name, synced.table.initial_state
                )
    return plans


def is_complete(state: TableState | None) -> bool:
    """Whether the table holds a state of the publisher."""
    return isinstance(state, Ready | Parked)


def _awaits_later_run(
    table: QualifiedName, plans: Sequence[TablePlan], states: Mapping[QualifiedName, TableState]
) -> bool:
    """Whether `table` is not copied now, and a later run resumes its chunks."""
    return all(planned.table.name != table for planned in plans) and isinstance(states.get(table), Copying)


def _plans(
    request: SnapshotRequest,
    tables: Sequence[SyncedTable],
    targets: Mapping[QualifiedName, TargetTable],
    states: Mapping[QualifiedName, TableState],
    chunks: Mapping[str, StagedChunk],
) -> Iterator[TablePlan]:
    with contextlib.closing(import_snapshot(request.snapshot, purpose="snapshot plan")) as source:
        storage = plan.read_storage(source, tables)
        fingerprints = read_fingerprints(source, tables, storage, targets, request.log_identity)
        passes = [print_filters(source, synced.table, synced.filters) for synced in tables]
    copied = {target.oid for target in targets.values()}
    for synced, condition in zip(tables, passes, strict=True):
        name = synced.table.name
        fingerprint = fingerprints.get(name)
        staged = _usable_chunks(chunks, name, fingerprint, request.snapshot.consistent_point)
        changes_since = _changes_since(request, synced, fingerprint, staged)
        if staged and changes_since is None:
            logger.info("table %s: cannot use the chunks of a killed snapshot, copying the whole table", name)
            staged = {}
        initial_state = _initial_state(request, states.get(name), staged)
        columns = _copied_columns(synced, targets[name])
        table = TableCopy(columns, initial_state, targets[name])
        planned = TablePlan(
            table, synced, condition, fingerprint, staged, changes_since if staged else None, ()
        )
        # COPY does not support rows without columns: they are inserted from a staging table. If the table may
        # run code of its owner, rows are moved into it as the owner.
        needs_staging = (
            request.replace
            or not table.columns
            or table.target.acting.rights.runs_as_owner
            or not table.target.references.isdisjoint(copied - {table.relation})
        )
        chunks_to_read = _chunks(request, planned, storage, needs_staging=needs_staging)
        yield dataclasses.replace(planned, chunks=tuple(chunks_to_read))


def _copied_columns(synced: SyncedTable, target: TargetTable) -> tuple[str, ...]:
    """The published columns, and the unpublished ones that the target can store. Others get its defaults."""
    available = {column.name for column in target.columns if not column.is_generated}
    return (*synced.columns, *(name for name in synced.unpublished if name in available))


def _usable_chunks(
    chunks: Mapping[str, StagedChunk], table: QualifiedName, fingerprint: CopyFingerprint | None, before: Lsn
) -> dict[str, StagedChunk]:
    """The staged chunks of the table with its fingerprint, no page twice."""
    if fingerprint is None:
        return {}
    usable: dict[str, StagedChunk] = {}
    for name, chunk in chunks.items():
        is_usable = chunk.table == table and chunk.fingerprint == fingerprint.digest and chunk.lsn < before
        if is_usable and not any(_overlap(chunk, other) for other in usable.values()):
            usable[name] = chunk
    return usable


def _overlap(chunk: StagedChunk, other: StagedChunk) -> bool:
    return any(
        a.leaf == b.leaf
        and (b.end_page is None or a.first_page < b.end_page)
        and (a.end_page is None or b.first_page < a.end_page)
        for a in chunk.pages
        for b in other.pages
    )


def _changes_since(
    request: SnapshotRequest,
    synced: SyncedTable,
    fingerprint: CopyFingerprint | None,
    staged: Mapping[str, StagedChunk],
) -> LoggedChanges | None:
    """All changes of the table since its oldest chunk, if the log has them with their keys; else None."""
    if fingerprint is None or not staged:
        return None
    oldest = min(chunk.lsn for chunk in staged.values())
    window = Window(oldest, request.snapshot.consistent_point)
    changes_since = request.read_log(window, [leaf.id for leaf in synced.leaves])
    if changes_since is None or not can_tell_keys(changes_since, synced, fingerprint.key_columns):
        return None
    return changes_since


def _initial_state(
    request: SnapshotRequest, state: TableState | None, staged: Mapping[str, StagedChunk]
) -> TableState:
    """The state during the copy; the log is retained from its LSN on."""
    if state is not None and is_complete(state):
        return state
    points = [chunk.lsn for chunk in staged.values()]
    return Copying(min([*points, request.snapshot.consistent_point]))


def _chunks(
    request: SnapshotRequest,
    planned: TablePlan,
    storage: Mapping[RelationId, Storage],
    *,
    needs_staging: bool,
) -> Iterator[ChunkCopy]:
    synced, table = planned.synced, planned.table
    tables = {int(leaf.id): leaf for leaf in synced.leaves}
    completed = tuple(
        PageSlice(tables[pages.leaf], first_page=pages.first_page, end_page=pages.end_page)
        for chunk in planned.staged.values()
        for pages in chunk.pages
    )
    chunks = plan.plan_table(synced, storage, chunk_bytes=request.chunk_bytes, completed=completed)
    is_direct = len(chunks) == 1 and not completed and not needs_staging
    for chunk in chunks:
        sources = tuple(plan.source(piece, table.columns, planned.passes) for piece in chunk.slices)
        tables_read = tuple(
            {piece.table.id: PlannedTable.from_catalog(piece.table) for piece in chunk.slices}.values()
        )
        if is_direct:
            yield ChunkCopy(table, chunk.chunk_id, sources, tables_read, chunk.bytes, staging=None)
            continue
        point = request.snapshot.consistent_point
        name = staging_name(request.subscription, table.name, point, chunk.chunk_id)
        description = _description(request, planned, chunk)
        yield ChunkCopy(table, chunk.chunk_id, sources, tables_read, chunk.bytes, name, description)


def _description(request: SnapshotRequest, planned: TablePlan, chunk: Chunk) -> StagedChunk | None:
    if planned.fingerprint is None:
        return None
    pages = tuple(
        PageRange(int(page_slice.table.id), page_slice.first_page, page_slice.end_page)
        for page_slice in chunk.slices
    )
    point = request.snapshot.consistent_point
    return StagedChunk(planned.table.name, point, planned.fingerprint.digest, pages, 0, 0, chunk.bytes)
