"""What is left to copy of every table: what earlier runs have staged, and which pages are missing.

| found on the subscriber                        | this run reads                                           |
|------------------------------------------------|----------------------------------------------------------|
| nothing of the table                           | all of it                                                |
| chunks of its present definition, and the log  | the missing ranges; what the log has touched (`late.py`) |
| tells of all changes since the oldest of them  |                                                          |
| other chunks                                   | all of it; the chunks are dropped                        |

A table that is read in one piece goes straight into its target, unless its rows replace others.
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
from cdc_replay.snapshot.fingerprint import CopyFingerprint, read_definitions
from cdc_replay.snapshot.plan import Chunk, PageSlice, Storage
from cdc_replay.snapshot.resume import LoggedChanges, ReadLog, can_tell_keys
from cdc_replay.snapshot.staging import (
    PageRange,
    StagedChunk,
    drop_leftovers,
    staged_chunks,
    staging_name,
)
from cdc_replay.subscriber.replication_origin import drop_origins
from cdc_replay.subscriber.state import set_table_state, table_states
from cdc_replay.subscriber.tables import TargetTable, check_targets, read_target_tables

if TYPE_CHECKING:
    from psycopg import sql

logger = logging.getLogger(__name__)


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
    history: str = ""
    """Names the change log that `read_log` reads: positions of another one mean something else."""
    read_log: ReadLog = field(default=lambda *_: None)
    """Gives what was committed up to the snapshot; by default, nothing that was staged is used again."""
    readers: int | None = None
    """Most tasks at a time, each with a connection to both sides; None: as many as Spark has cores."""
    bytes_per_second: int | None = None
    """How much COPY text all tasks together may move; None: as much as goes through."""
    run_as_owner: bool = False
    """As in `model.subscription.Subscription`."""
    while_copying: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Entered while chunks are read: the caller can let others work on tables that are ready."""

    def setting(self, tasks: int) -> CopySettings:
        """What all chunks have in common, when so many tasks share the rate."""
        rate = None if self.bytes_per_second is None else self.bytes_per_second / max(1, tasks)
        return CopySettings(self.subscription, self.snapshot, self.subscriber_dsn, self.replace, rate)


@dataclass(frozen=True, slots=True)
class TablePlan:
    """A table that is copied: what is read in this run, what earlier ones have staged, by name of the table.

    `passes` is true of the rows that the row filters let through, None where there are none. `logged` are the
    changes since the oldest staged chunk, None where nothing is staged.
    """

    table: TableCopy
    synced: SyncedTable
    passes: sql.Composed | None
    definition: CopyFingerprint | None
    staged: Mapping[str, StagedChunk]
    logged: LoggedChanges | None
    chunks: tuple[ChunkCopy, ...]

    @property
    def is_staged(self) -> bool:
        """Whether the table comes from staging tables, and not straight from its only chunk."""
        return bool(self.staging)

    @property
    def staging(self) -> tuple[str, ...]:
        """The staging tables, in the order of the pages: neighbours in the target's indexes stay together."""
        named = [(chunk.pages, name) for name, chunk in self.staged.items()]
        named += [
            (chunk.described.pages if chunk.described else (), chunk.staging)
            for chunk in self.chunks
            if chunk.staging is not None
        ]

        def position(entry: tuple[tuple[PageRange, ...], str]) -> list[tuple[int, int]]:
            return [(pages.leaf, pages.first_page) for pages in entry[0][:1]]

        return tuple(name for _, name in sorted(named, key=position))


def plan_tables(connection: Connection, request: SnapshotRequest) -> tuple[TablePlan, ...]:
    """Check the targets, clear up after a killed run, record the states, plan what is left.

    Raises:
        SubscriberNotReady: listing every table and column that the subscriber lacks; nothing is changed then.
        InvalidFilter: if a row filter cannot be read.
    """
    states = table_states(connection, request.subscription)
    wanted = [
        each for each in request.tables if request.replace or not is_complete(states.get(each.table.name))
    ]
    names = [each.table.name for each in wanted]
    targets = read_target_tables(connection, names, run_as_owner=request.run_as_owner)
    check_targets({each.table.name: each.columns for each in wanted}, targets)
    found = staged_chunks(connection, request.subscription)
    plans = tuple(_plans(request, wanted, targets, states, found))
    kept = {name for each in plans for name in each.staged}
    kept |= {name for name, chunk in found.items() if _is_waited_for(chunk.table, plans, states)}
    if dropped := drop_leftovers(connection, request.subscription, kept=kept):
        logger.info("dropped %d staging tables that a killed snapshot has left and nobody can use", dropped)
    drop_origins(connection, request.subscription)
    with connection.transaction():
        for each in plans:
            if not is_complete(each.table.begun):
                set_table_state(connection, request.subscription, each.table.name, each.table.begun)
    return plans


def is_complete(state: TableState | None) -> bool:
    """Whether the table holds a state of the publisher."""
    return isinstance(state, Ready | Parked)


def _is_waited_for(
    table: QualifiedName, plans: Sequence[TablePlan], states: Mapping[QualifiedName, TableState]
) -> bool:
    """Whether a later run, which copies other tables than this one, takes up the chunks of `table`."""
    return all(each.table.name != table for each in plans) and isinstance(states.get(table), Copying)


def _plans(
    request: SnapshotRequest,
    tables: Sequence[SyncedTable],
    targets: Mapping[QualifiedName, TargetTable],
    states: Mapping[QualifiedName, TableState],
    found: Mapping[str, StagedChunk],
) -> Iterator[TablePlan]:
    with contextlib.closing(import_snapshot(request.snapshot, purpose="snapshot plan")) as source:
        storage = plan.read_storage(source, tables)
        definitions = read_definitions(source, tables, storage, targets, request.history)
        passes = [print_filters(source, each.table, each.filters) for each in tables]
    for synced, condition in zip(tables, passes, strict=True):
        name = synced.table.name
        definition = definitions.get(name)
        staged = _usable(found, name, definition, request.snapshot.consistent_point)
        logged = _logged(request, synced, definition, staged)
        if staged and logged is None:
            logger.info("table %s: the chunks of a killed snapshot cannot be used, it is copied anew", name)
            staged = {}
        begun = _initial_state(request, states.get(name), staged)
        columns = _copied_columns(synced, targets[name])
        table = TableCopy(columns, begun, targets[name])
        planned = TablePlan(table, synced, condition, definition, staged, logged if staged else None, ())
        yield dataclasses.replace(planned, chunks=tuple(_chunks(request, planned, storage)))


def _copied_columns(synced: SyncedTable, target: TargetTable) -> tuple[str, ...]:
    """The published columns; of the unpublished ones those that the target takes. Others get its defaults."""
    taken = {column.name for column in target.columns if not column.is_generated}
    return (*synced.columns, *(name for name in synced.unpublished if name in taken))


def _usable(
    found: Mapping[str, StagedChunk], table: QualifiedName, definition: CopyFingerprint | None, before: Lsn
) -> dict[str, StagedChunk]:
    """The staged chunks of the table that were read under its definition, no page twice."""
    if definition is None:
        return {}
    usable: dict[str, StagedChunk] = {}
    for name, chunk in found.items():
        is_alike = chunk.table == table and chunk.definition == definition.digest and chunk.lsn < before
        if is_alike and not any(_overlap(chunk, other) for other in usable.values()):
            usable[name] = chunk
    return usable


def _overlap(one: StagedChunk, other: StagedChunk) -> bool:
    return any(
        a.leaf == b.leaf
        and (b.end_page is None or a.first_page < b.end_page)
        and (a.end_page is None or b.first_page < a.end_page)
        for a in one.pages
        for b in other.pages
    )


def _logged(
    request: SnapshotRequest,
    synced: SyncedTable,
    definition: CopyFingerprint | None,
    staged: Mapping[str, StagedChunk],
) -> LoggedChanges | None:
    """All changes of the table since its oldest chunk, if the log has them and each tells its key."""
    if definition is None or not staged:
        return None
    oldest = min(chunk.lsn for chunk in staged.values())
    window = Window(oldest, request.snapshot.consistent_point)
    logged = request.read_log(window, [leaf.id for leaf in synced.leaves])
    if logged is None or not can_tell_keys(logged, synced, definition.key_columns):
        return None
    return logged


def _initial_state(
    request: SnapshotRequest, state: TableState | None, staged: Mapping[str, StagedChunk]
) -> TableState:
    """The state under which the table is copied; the log is kept from its LSN on."""
    if state is not None and is_complete(state):
        return state
    points = [chunk.lsn for chunk in staged.values()]
    return Copying(min([*points, request.snapshot.consistent_point]))


def _chunks(
    request: SnapshotRequest, planned: TablePlan, storage: Mapping[RelationId, Storage]
) -> Iterator[ChunkCopy]:
    synced, table = planned.synced, planned.table
    tables = {int(leaf.id): leaf for leaf in synced.leaves}
    done = tuple(
        PageSlice(tables[pages.leaf], first_page=pages.first_page, end_page=pages.end_page)
        for chunk in planned.staged.values()
        for pages in chunk.pages
    )
    chunks = plan.plan_table(synced, storage, chunk_bytes=request.chunk_bytes, done=done)
    # COPY has no form for rows without columns: they are inserted from a staging table.
    # What may run code of the table's owner is moved into the table as the owner.
    needs_staging = request.replace or not table.columns or table.target.acting.rights.is_owners
    is_direct = len(chunks) == 1 and not done and not needs_staging
    for chunk in chunks:
        sources = tuple(plan.source(piece, table.columns, planned.passes) for piece in chunk.slices)
        read = tuple({piece.table.id: PlannedTable.of(piece.table) for piece in chunk.slices}.values())
        if is_direct:
            yield ChunkCopy(table, chunk.number, sources, read, chunk.bytes, staging=None)
            continue
        point = request.snapshot.consistent_point
        name = staging_name(request.subscription, table.name, point, chunk.number)
        described = _described(request, planned, chunk)
        leaves = tuple({pages.leaf: None for pages in described.pages}) if described else ()
        yield ChunkCopy(table, chunk.number, sources, read, chunk.bytes, name, leaves, described)


def _described(request: SnapshotRequest, planned: TablePlan, chunk: Chunk) -> StagedChunk | None:
    if planned.definition is None:
        return None
    pages = tuple(PageRange(int(each.table.id), each.first_page, each.end_page) for each in chunk.slices)
    point = request.snapshot.consistent_point
    return StagedChunk(planned.table.name, point, planned.definition.digest, pages, 0, 0, chunk.bytes)
