"""Copy chunks of tables from the publisher to the subscriber: the Spark task, on an executor.

A task opens one connection to each side and copies its chunks one after another, each in one transaction of
the subscriber:

| table              | transaction                                             | readers then see   |
|--------------------|---------------------------------------------------------|--------------------|
| one chunk, first   | claim, COPY into the target, state `Ready`              | the complete table |
| copy               |                                                         |                    |
| several, or resync | COPY into the chunk's staging table (`staging.py`); the | nothing yet        |
|                    | driver completes the table                              |                    |

So a copy that replaces rows writes its target only at the end, when the driver holds the subscription.

A chunk is a range of pages, so its table must keep its file (relfilenode) while it is read. After reading,
the task compares the current file with that of its snapshot, under the lock that prevents a change.

Claim: before it writes to a target, a transaction takes the table's advisory lock and checks its state. Only
the state at the start of the run allows the copy. So a task that Spark runs twice, or that outlives its
killed driver, copies nothing twice: the second transaction finds the table ready and does nothing.

An error of one table is a value in its result, not an exception: the other tables of the task and of the job
are still copied.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

from psycopg import sql

from cdc_replay.errors import CdcReplayError, SubscriberNotReady
from cdc_replay.failpoints import failpoint
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Parked, Ready, TableState
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.postgres.copy import (
    CopyCounts,
    CopyTarget,
    RateLimiter,
    Source,
    copy_across,
    subscriber_write_errors,
)
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, import_snapshot
from cdc_replay.postgres.planned_tables import (
    PlannedTable,
    check_unchanged,
    lock_planned_tables,
    publisher_read_errors,
)
from cdc_replay.snapshot.indexes import indexes_rebuilt_after
from cdc_replay.snapshot.staging import (
    StagedChunk,
    create_staging,
    describe_staging,
    move_staged,
    staging_name,
    staging_table,
)
from cdc_replay.subscriber.apply_connection import connect_as_apply_worker
from cdc_replay.subscriber.as_owner import TargetSession, act_on
from cdc_replay.subscriber.firing_foreign_keys import deletion_acts
from cdc_replay.subscriber.replication_origin import replication_origin
from cdc_replay.subscriber.subscription_tables import (
    claim_table_state,
    set_table_state,
    table_state,
)
from cdc_replay.subscriber.target_checks import check_names
from cdc_replay.subscriber.target_statements import lock_out_writers, target_reference
from cdc_replay.subscriber.target_tables import TargetTable


@dataclass(frozen=True, slots=True)
class CopySettings:
    """Settings of all chunks of a run; picklable.

    `replace`: the transaction that inserts the new rows deletes the target's old ones. `bytes_per_second`
    limits the COPY text of one task; None: no limit.
    """

    subscription: str
    snapshot: ExportedSnapshot
    subscriber_dsn: str
    replace: bool
    bytes_per_second: float | None = None

    @property
    def purpose(self) -> str:
        """Purpose of the connections."""
        return f"snapshot {self.subscription}"

    def pace(self) -> RateLimiter | None:
        """The rate limiter of one copy, None without a limit."""
        return None if self.bytes_per_second is None else RateLimiter(self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class TableCopy:
    """A table of the subscriber that receives a copy.

    Only `initial_state` allows the copy: another state means that another transaction completed it. A new
    table with the name of `target` gets nothing.
    """

    columns: tuple[str, ...]
    initial_state: TableState
    target: TargetTable

    @property
    def name(self) -> QualifiedName:
        """The target's name."""
        return self.target.name

    @property
    def relation(self) -> int:
        """The table's oid."""
        return self.target.oid

    @property
    def identifier(self) -> sql.Identifier:
        """The target in SQL."""
        return sql.Identifier(self.name.schema, self.name.name)


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """One chunk: the sources of its rows, and its staging table; None: COPY into the target.

    `tables` are read. `description` is the comment of the staging table, without rows and bytes; None if no
    later run could use it.
    """

    table: TableCopy
    chunk_id: int
    sources: tuple[Source, ...]
    tables: tuple[PlannedTable, ...]
    bytes: int
    staging: str | None
    description: StagedChunk | None = None


@dataclass(frozen=True, slots=True)
class CopiedChunk:
    """A chunk on the subscriber. `bytes` of COPY text; no rows if the table was already complete."""

    table: QualifiedName
    chunk_id: int
    rows: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FailedChunk:
    """A chunk that failed."""

    table: QualifiedName
    chunk_id: int
    error: CdcReplayError


ChunkResult: TypeAlias = CopiedChunk | FailedChunk


def copy_chunks(settings: CopySettings, chunks: Sequence[ChunkCopy]) -> Iterator[ChunkResult]:
    """Copy the chunks one after another; one result each. Runs on an executor, may be repeated."""
    try:
        with (
            closing(import_snapshot(settings.snapshot, purpose=settings.purpose)) as source,
            closing(subscriber_connection(settings)) as destination,
        ):
            for chunk in chunks:
                yield _attempt(settings, chunk, source, destination)
    except CdcReplayError as error:  # a connection could not be opened
        for chunk in chunks:
            yield FailedChunk(chunk.table.name, chunk.chunk_id, error)


def subscriber_connection(settings: CopySettings) -> Connection:
    """A connection to the subscriber that behaves as an apply worker (R8.13).

    Raises:
        MissingPrivilege: if the role may not set session_replication_role.
        ServerUnavailable: if the server does not answer.
    """
    with translated_errors("cannot write as a replication worker does"):
        return connect_as_apply_worker(settings.subscriber_dsn, purpose=settings.purpose)


def _attempt(
    settings: CopySettings, chunk: ChunkCopy, source: Connection, destination: Connection
) -> ChunkResult:
    started = time.monotonic()
    try:
        # A savepoint of the reading transaction: an error in one chunk must not end the imported snapshot.
        # Its release is a separate command, which may be the first to fail if the publisher is unreachable.
        with publisher_read_errors(chunk.table.name), source.transaction():
            lock_planned_tables(source, chunk.tables)
            rows, size = _copy(settings, chunk, source, destination)
    except CdcReplayError as error:
        return FailedChunk(chunk.table.name, chunk.chunk_id, error)
    return CopiedChunk(chunk.table.name, chunk.chunk_id, rows, size, time.monotonic() - started)


def _copy(
    settings: CopySettings, chunk: ChunkCopy, source: Connection, destination: Connection
) -> tuple[int, int]:
    if chunk.staging is not None:
        return _stage(settings, chunk, chunk.staging, source, destination)
    table = chunk.table
    point = settings.snapshot.consistent_point
    origin = replication_origin(destination, settings.subscription, point, per_session=True)
    with subscriber_write_errors(table.name), origin:
        if not claim_table(destination, settings.subscription, table):
            return 0, 0
        with act_on(destination, [table.target]) as sessions:
            copied = _fill(settings, chunk, source, destination, sessions.session_for(table.target))
        check_unchanged(source, chunk.tables)
        check_names(destination, {table.name: table.relation})
        failpoint("snapshot.mid_copy")
        set_table_state(destination, settings.subscription, table.name, Ready(point))
    failpoint("snapshot.after_table")
    return copied.rows, copied.bytes


def _fill(
    settings: CopySettings,
    chunk: ChunkCopy,
    source: Connection,
    destination: Connection,
    session: TargetSession,
) -> CopyCounts:
    table = chunk.table
    if session.runs_as_owner:
        # The owner has added code to the table, which COPY would run with our rights, or it is locked.
        name = staging_name(
            settings.subscription, table.name, settings.snapshot.consistent_point, chunk.chunk_id
        )
        create_staging(destination, name, table.target, table.columns)
        staging = CopyTarget(staging_table(name), table.name, table.columns, is_new=True)
        copied = copy_across(source, chunk.sources, destination, staging, settings.pace())
        move_staged(destination, session, [name], table.target, table.columns)
        return copied
    target = CopyTarget(table.identifier, table.name, table.columns)
    with indexes_rebuilt_after(destination, table.name.schema, table.name.name, chunk.bytes):
        return copy_across(source, chunk.sources, destination, target, settings.pace())


def _stage(
    settings: CopySettings, chunk: ChunkCopy, staging: str, source: Connection, destination: Connection
) -> tuple[int, int]:
    table = chunk.table
    with subscriber_write_errors(table.name), destination.transaction():
        create_staging(destination, staging, table.target, table.columns)
        target = CopyTarget(staging_table(staging), table.name, table.columns, is_new=True)
        copied = copy_across(source, chunk.sources, destination, target, settings.pace())
        check_unchanged(source, chunk.tables)
        failpoint("snapshot.mid_copy")
        if chunk.description is not None:
            description = dataclasses.replace(chunk.description, rows=copied.rows, bytes=copied.bytes)
            describe_staging(destination, staging, description)
    failpoint("snapshot.after_chunk")
    return copied.rows, copied.bytes


def claim_table(connection: Connection, subscription: str, table: TableCopy) -> bool:
    """Whether this transaction is to complete the table; concurrent ones wait here until it ends."""
    return claim_table_state(connection, subscription, table.relation) == table.initial_state


def accepts_staged_rows(connection: Connection, subscription: str, table: TableCopy) -> bool:
    """Whether staged rows may be moved: as `claim_table`, for a caller that holds the subscription.

    A table that was complete before may have been replayed further in the meantime.
    """
    current = table_state(connection, subscription, table.relation)
    return current == table.initial_state or (
        isinstance(current, Ready | Parked) and isinstance(table.initial_state, Ready | Parked)
    )


def delete_rows(session: TargetSession, subscription: str, table: TableCopy, feed: str | None) -> None:
    """Delete the rows that the new ones replace; readers see them until the transaction commits.

    Writers are blocked from here on, so that no row is inserted in between. Inheritance children keep their
    rows. `feed` is another subscription that feeds the table, if there is one.

    Raises:
        SubscriberNotReady: if the rows can be those of the other subscription.
        ApplyConflict: if foreign keys would delete or change rows of other tables, which nothing sends again.
        MissingPrivilege, ServerUnavailable: as `translated_errors`.
    """
    action = f'cannot replace the rows of table "{table.name}" of the subscriber'
    with translated_errors(action, grant="On the subscriber, grant the role DELETE on the table."):
        session.execute(lock_out_writers(table.target))
        deleted = session.execute(sql.SQL("delete from {}").format(target_reference(table.target)))
    if deleted and feed is not None:
        raise SubscriberNotReady(
            f'rows of table "{table.name}" would be deleted, and subscription "{feed}" feeds it, too',
            detail="To copy a table again deletes all of its rows and inserts the new ones.",
            hint=f"`cdc-replay refresh {subscription} --reconcile` keeps the rows of other subscriptions.",
            rule="R7.13",
        )
    if deleted and table.target.acts_on_delete:
        raise deletion_acts(table.name, "A resync deletes all rows of the table and inserts the new ones.")
