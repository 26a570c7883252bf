"""Copy chunks of tables from the publisher to the subscriber: what a Spark task does, on an executor.

A task opens one connection to each side and copies its chunks one after another. Every chunk is a
transaction of the subscriber, which depends on how many chunks the table has:

| table              | transaction                                             | readers then see   |
|--------------------|---------------------------------------------------------|--------------------|
| one chunk, first   | claim, COPY into the target, state `Ready`              | the complete table |
| copy               |                                                         |                    |
| several, or resync | COPY into the chunk's staging table (`staging.py`); the | nothing yet        |
|                    | driver ends it                                          |                    |

So a copy that replaces rows touches its target only at the end, when the driver holds the subscription.

A chunk is a range of pages, so its table must not get another file while it is read: then the task has
read pages of both, or of a file that its snapshot sees nothing of. Having read, and holding the lock that
keeps the file from changing, it compares the file with the one that its snapshot knows.

Claim: before it writes to a target, a transaction takes the table's advisory lock and looks at its state.
Only the state with which the run began allows the copy. A task that Spark runs twice, or that outlives its
killed driver, therefore copies nothing twice: whoever comes second finds the table ready and leaves it
alone.

What goes wrong with one table is a value in its result, not an exception: the other tables of the task, and
of the job, are copied all the same.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, TypeAlias

from psycopg import sql

from cdc_replay.errors import CdcReplayError, PublisherNotReady
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
from cdc_replay.postgres.planned_tables import PlannedTable, lock_planned_tables, publisher_read_errors
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
from cdc_replay.subscriber.as_owner import TargetSession, act_on, target_reference
from cdc_replay.subscriber.replication_origin import replication_origin
from cdc_replay.subscriber.subscription_lock import stable_hash
from cdc_replay.subscriber.subscription_tables import known_tables, set_table_state
from cdc_replay.subscriber.target_checks import check_names
from cdc_replay.subscriber.target_tables import TargetTable


@dataclass(frozen=True, slots=True)
class CopySettings:
    """What all chunks of a run have in common; picklable.

    `replace`: the target's rows are deleted by the transaction that brings the new ones. `bytes_per_second`
    is how much COPY text one task may move; None: as much as goes through.
    """

    subscription: str
    snapshot: ExportedSnapshot
    subscriber_dsn: str
    replace: bool
    bytes_per_second: float | None = None

    @property
    def purpose(self) -> str:
        """What the connections are for."""
        return f"snapshot {self.subscription}"

    def pace(self) -> RateLimiter | None:
        """What slows a copy down; None if nothing does."""
        return None if self.bytes_per_second is None else RateLimiter(self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class TableCopy:
    """A table of the subscriber that receives a copy.

    `begun` is the state that allows the copy: another one means that someone else has completed it. A table
    that has come under the name of `target` meanwhile gets nothing.
    """

    columns: tuple[str, ...]
    begun: TableState
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
    """One chunk: what its rows are read by, and the staging table; None goes into the target.

    `tables` are those that are read; `leaves` those (oids) whose files must stay the same. `described` is
    what the staging table says of itself, but for rows and bytes; None where nobody could use it again.
    """

    table: TableCopy
    number: int
    sources: tuple[Source, ...]
    tables: tuple[PlannedTable, ...]
    bytes: int
    staging: str | None
    leaves: tuple[int, ...] = ()
    described: StagedChunk | None = None


@dataclass(frozen=True, slots=True)
class CopiedChunk:
    """A chunk that is on the subscriber. `bytes` of COPY text; no rows if it was complete already."""

    table: QualifiedName
    number: int
    rows: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FailedChunk:
    """A chunk that is not on the subscriber, and why."""

    table: QualifiedName
    number: int
    error: CdcReplayError


ChunkResult: TypeAlias = CopiedChunk | FailedChunk

# The catalog's row is the snapshot's, the function answers as of now.
CHANGED_FILES: Final = """
    select pg_catalog.format('%%I.%%I', nspname, relname)
      from pg_catalog.pg_class as class
      join pg_catalog.pg_namespace as namespace on namespace.oid = relnamespace
     where class.oid = any (%s::oid[])
       and pg_catalog.pg_relation_filenode(class.oid) is distinct from relfilenode
"""


def copy_chunks(setting: CopySettings, chunks: Sequence[ChunkCopy]) -> Iterator[ChunkResult]:
    """Copy the chunks one after another; one result for each. Runs on an executor, may be repeated."""
    try:
        with (
            closing(import_snapshot(setting.snapshot, purpose=setting.purpose)) as source,
            closing(subscriber_connection(setting)) as destination,
        ):
            for chunk in chunks:
                yield _attempt(setting, chunk, source, destination)
    except CdcReplayError as error:  # a connection could not be opened
        for chunk in chunks:
            yield FailedChunk(chunk.table.name, chunk.number, error)


def subscriber_connection(setting: CopySettings) -> Connection:
    """A connection to the subscriber that behaves as an apply worker (R8.13).

    Raises:
        MissingPrivilege: if the role may not set session_replication_role.
        ServerUnavailable: if the server does not answer.
    """
    with translated_errors("cannot write as a replication worker does"):
        return connect_as_apply_worker(setting.subscriber_dsn, purpose=setting.purpose)


def _attempt(
    setting: CopySettings, chunk: ChunkCopy, source: Connection, destination: Connection
) -> ChunkResult:
    began = time.monotonic()
    try:
        # A savepoint of the reading transaction: an error in one chunk must not end the imported snapshot.
        # Its end is a command of its own, and may be the first to notice that the publisher is gone.
        with publisher_read_errors(chunk.table.name), source.transaction():
            lock_planned_tables(source, chunk.tables)
            rows, size = _copy(setting, chunk, source, destination)
    except CdcReplayError as error:
        return FailedChunk(chunk.table.name, chunk.number, error)
    return CopiedChunk(chunk.table.name, chunk.number, rows, size, time.monotonic() - began)


def _copy(
    setting: CopySettings, chunk: ChunkCopy, source: Connection, destination: Connection
) -> tuple[int, int]:
    if chunk.staging is not None:
        return _stage(setting, chunk, chunk.staging, source, destination)
    table = chunk.table
    point = setting.snapshot.consistent_point
    origin = replication_origin(destination, setting.subscription, point, per_session=True)
    with subscriber_write_errors(table.name), origin:
        if not claim_table(destination, setting.subscription, table):
            return 0, 0
        with act_on(destination, [table.target]) as sessions:
            copied = _fill(setting, chunk, source, destination, sessions.session_for(table.target))
        check_names(destination, {table.name: table.relation})
        failpoint("snapshot.mid_copy")
        set_table_state(destination, setting.subscription, table.name, Ready(point))
    failpoint("snapshot.after_table")
    return copied.rows, copied.bytes


def _fill(
    setting: CopySettings,
    chunk: ChunkCopy,
    source: Connection,
    destination: Connection,
    session: TargetSession,
) -> CopyCounts:
    table = chunk.table
    if session.runs_as_owner:
        # Its owner has put code into it since, or it is locked: COPY would run that with our rights.
        name = staging_name(setting.subscription, table.name, setting.snapshot.consistent_point, chunk.number)
        create_staging(destination, name, table.target, table.columns)
        staging = CopyTarget(staging_table(name), table.name, table.columns, is_new=True)
        copied = copy_across(source, chunk.sources, destination, staging, setting.pace())
        move_staged(destination, session, [name], table.target, table.columns)
        return copied
    target = CopyTarget(table.identifier, table.name, table.columns)
    with indexes_rebuilt_after(destination, table.name.schema, table.name.name):
        return copy_across(source, chunk.sources, destination, target, setting.pace())


def _stage(
    setting: CopySettings, chunk: ChunkCopy, staging: str, source: Connection, destination: Connection
) -> tuple[int, int]:
    table = chunk.table
    with subscriber_write_errors(table.name), destination.transaction():
        create_staging(destination, staging, table.target, table.columns)
        target = CopyTarget(staging_table(staging), table.name, table.columns, is_new=True)
        copied = copy_across(source, chunk.sources, destination, target, setting.pace())
        _check_files(source, chunk)
        failpoint("snapshot.mid_copy")
        if chunk.described is not None:
            held = dataclasses.replace(chunk.described, rows=copied.rows, bytes=copied.bytes)
            describe_staging(destination, staging, held)
    failpoint("snapshot.after_chunk")
    return copied.rows, copied.bytes


def _check_files(source: Connection, chunk: ChunkCopy) -> None:
    """The chunk was read from the files that the snapshot's catalog names.

    Raises:
        PublisherNotReady: if a table has another one by now.
    """
    what = f'cannot read table "{chunk.table.name}" of the publisher'
    with translated_errors(what):
        rows = source.execute(CHANGED_FILES, [list(chunk.leaves)]).fetchall()
    if rows:
        raise PublisherNotReady(
            f"{what}: {', '.join(name for (name,) in rows)} was truncated or rewritten while it was copied",
            detail=f"The copy is as of {chunk.described.lsn}." if chunk.described else None,
            hint="Run the command again: the table is copied anew.",
            rule="R7.6",
        )


def claim_table(connection: Connection, subscription: str, table: TableCopy) -> bool:
    """Whether this transaction is the one that completes the table; others wait here until it ends."""
    connection.execute(
        "select pg_catalog.pg_advisory_xact_lock(%s)", (stable_hash(f"{subscription} {table.name}"),)
    )
    return _state_of(connection, subscription, table) == table.begun


def accepts_staged_rows(connection: Connection, subscription: str, table: TableCopy) -> bool:
    """Whether staged rows may become the table's: as `claim_table`, for a caller that holds the subscription.

    A table that was complete before may have been replayed further in the meantime; it still takes the rows.
    """
    found = _state_of(connection, subscription, table)
    return found == table.begun or (
        isinstance(found, Ready | Parked) and isinstance(table.begun, Ready | Parked)
    )


def _state_of(connection: Connection, subscription: str, table: TableCopy) -> TableState | None:
    known = known_tables(connection, subscription)
    return next((each.state for each in known if each.relation == table.relation), None)


def delete_rows(session: TargetSession, table: TableCopy) -> None:
    """Delete the rows that the new ones replace; readers see them until the transaction commits.

    Writers wait from here on, so that no row slips in between. Inheritance children keep theirs.
    """
    what = f'cannot replace the rows of table "{table.name}" of the subscriber'
    with translated_errors(what, grant="On the subscriber, grant the role DELETE on the table."):
        session.execute(
            sql.SQL("lock table {} in share row exclusive mode").format(target_reference(table.target))
        )
        session.execute(sql.SQL("delete from {}").format(target_reference(table.target)))
