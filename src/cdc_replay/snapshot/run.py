"""The initial copy of tables that need one, or a resync of named tables.

The publisher's catalog and rows are read under one exported snapshot, whose consistent point becomes the
tables' applied LSN. The change log must reach back to that point, so the slot is created first.

While rows are read and staged, other processes may use the subscription: replay continues with ready tables,
also with a table that is being resynced. The subscription lock is taken again before the new rows become
visible. A table that was replayed beyond the snapshot returns to it, and the next replay applies the later
changes again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.capture.slot_continuity import check_header
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.compare.other_feeds import other_feeds
from cdc_replay.errors import SubscriberNotReady
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import SnapshotResult, TableCopied
from cdc_replay.model.suggestion import did_you_mean
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready, TableState
from cdc_replay.postgres.connection import connect
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, export_snapshot
from cdc_replay.postgres.slot import check_server
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.replay.definition_drift import record_copy_definitions
from cdc_replay.snapshot.copy_tables import CopiedTable, load_tables
from cdc_replay.snapshot.log_reader import log_identity, log_reader
from cdc_replay.snapshot.planning import SnapshotRequest
from cdc_replay.snapshot.published_tables import (
    check_captured,
    read_published_tables,
    read_published_tables_now,
)
from cdc_replay.spark.errors import translated_spark_errors
from cdc_replay.spark.session import spark_session
from cdc_replay.subscriber import subscription_records, subscription_tables
from cdc_replay.subscriber.session import (
    SubscriptionSession,
    export_snapshot_unlocked,
    release_subscription_lock,
    snapshot_lock,
)


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """What to copy and how.

    `tables` are copied again, replacing their rows; without any, every table that is not ready is copied.
    With `release_lock` other processes may use the subscription while the snapshot waits for transactions of
    the publisher, and while rows are read and staged.
    """

    release_lock: bool
    chunk_bytes: int
    readers: int | None
    """Most parallel tasks, each with one connection to both sides; None: Spark's cores."""
    bytes_per_second: int | None
    """For all readers together; None: no limit."""
    tables: tuple[QualifiedName, ...] = ()

    def export(
        self, publisher_dsn: str, session: SubscriptionSession
    ) -> AbstractContextManager[ExportedSnapshot]:
        """Export the snapshot to copy from."""
        if self.release_lock:
            return export_snapshot_unlocked(publisher_dsn, session)
        return export_snapshot(publisher_dsn)

    def while_copying(self, session: SubscriptionSession) -> AbstractContextManager[None]:
        """The context while rows are read."""
        return release_subscription_lock(session) if self.release_lock else contextlib.nullcontext()


def snapshot_session(
    source: CaptureSource, change_log: ChangeLog, session: SubscriptionSession, options: SnapshotOptions
) -> SnapshotResult:
    """Copy every table that is not ready, or copy the named ones again, replacing their rows.

    Tables that became ready before a new change log was started are copied again, too. A copy of named tables
    unparks a parked subscription.

    Raises:
        PublisherNotReady: if `setup` has not run since these publications were configured.
        PublicationRefused: if PostgreSQL refuses these publications.
        SubscriberNotReady: listing every table and column that the subscriber lacks.
    """
    tables = options.tables
    started = time.monotonic()
    bind_subscription(change_log, session)
    states = session.table_states()
    if not tables and not _is_copy_needed(session, states, change_log.start_lsn):
        return SnapshotResult.nothing(session.subscription.name, time.monotonic() - started)
    _check_server(source, change_log)
    context = _SnapshotContext(source, options, states, change_log)
    if not tables and not session.subscription.copy_data:
        lsn = _start_without_copy(session, context)
        return SnapshotResult(session.subscription.name, lsn, lsn, time.monotonic() - started, 0, 0, ())
    with snapshot_lock(session), options.export(source.dsn, session) as exported:
        failpoint("snapshot.after_export")
        copied = _copy(session, exported, dataclasses.replace(context, states=session.table_states()))
    if tables:
        # If the failing change was not one of these tables, the next replay parks the subscription again.
        subscription_records.unpark(session.connection, session.subscription.name)
    return SnapshotResult(
        subscription=session.subscription.name,
        from_lsn=exported.consistent_point,
        to_lsn=exported.consistent_point,
        seconds=time.monotonic() - started,
        rows=sum(table.rows for table in copied),
        bytes=sum(table.bytes for table in copied),
        tables=tuple(
            TableCopied(
                str(table.name),
                table.rows,
                table.bytes,
                table.seconds,
                table.chunks_read,
                table.chunks_staged_before,
            )
            for table in copied
        ),
    )


def _check_server(source: CaptureSource, change_log: ChangeLog) -> None:
    """Check that the log holds changes of this database.

    Raises:
        ChangeLogMismatch: if it does not.
    """
    with connect(source.dsn, purpose="snapshot") as connection:
        check_server(connection)
        check_header(connection, change_log, source.slot)


def bind_subscription(change_log: ChangeLog, session: SubscriptionSession) -> None:
    """Record the log's publisher, and the publications, of the subscription.

    Raises:
        SubscriberNotReady: if the subscription's rows come from another publisher.
    """
    subscription_records.bind_subscription(
        session.connection,
        session.subscription.name,
        change_log.header.system_identifier,
        session.subscription.publications,
        change_log.header.database,
    )
    # Nothing before the log can matter for a table that the subscriber dropped (R1.33).
    dropped = [
        table.relation
        for table in session.known_tables()
        if table.name is None
        and isinstance(table.state, Ready)
        and table.state.applied_lsn < change_log.start_lsn
    ]
    subscription_tables.advance_tables(
        session.connection, session.subscription.name, dropped, change_log.start_lsn
    )


@dataclass(frozen=True, slots=True)
class _SnapshotContext:
    """Inputs of a snapshot of one subscription; `states` are those of all its tables."""

    source: CaptureSource
    options: SnapshotOptions
    states: Mapping[QualifiedName, TableState]
    change_log: ChangeLog

    @property
    def named(self) -> tuple[QualifiedName, ...]:
        return self.options.tables

    @property
    def log_start(self) -> Lsn:
        return self.change_log.start_lsn

    def state_of(self, table: SyncedTable) -> TableState | None:
        return self.states.get(table.table.name)


def _is_copy_needed(
    session: SubscriptionSession, states: Mapping[QualifiedName, TableState], log_start: Lsn
) -> bool:
    if not states and not session.tables_are_listed():
        return True
    return any(_needs_copy(session, table_state, log_start) for table_state in states.values())


def _needs_copy(session: SubscriptionSession, table_state: TableState, log_start: Lsn) -> bool:
    if isinstance(table_state, Pending | Copying):
        return True
    return session.subscription.copy_data and _is_stale(table_state, log_start)


def _is_stale(table_state: TableState | None, log_start: Lsn) -> bool:
    """Whether the log was started after what its rows hold (R1.33)."""
    return isinstance(table_state, Parked | Ready) and table_state.applied_lsn < log_start


def _start_without_copy(session: SubscriptionSession, context: _SnapshotContext) -> Lsn:
    """Make tables ready without a copy, for transactions from now on (`copy_data: false`)."""
    name = session.subscription.name
    published = read_published_tables_now(context.source.dsn, session)
    tables = _tables_to_copy(session, published.tables, context)
    check_captured(published.catalog, session.subscription, tables)
    lsn = published.catalog.lsn
    with session.connection.transaction():
        for table in tables:
            subscription_tables.set_table_state(session.connection, name, table.table.name, Ready(lsn))
        record_copy_definitions(session.connection, name, lsn, tables)
    return lsn


def _copy(
    session: SubscriptionSession, exported: ExportedSnapshot, context: _SnapshotContext
) -> tuple[CopiedTable, ...]:
    name = session.subscription.name
    published = read_published_tables(session, exported)
    candidates = _tables_to_copy(session, published.tables, context)
    check_captured(published.catalog, session.subscription, candidates)
    copied: list[CopiedTable] = []
    # An initial copy deletes no row (R7.13); a resync replaces existing rows.
    for replace in (False, True):
        tables = tuple(
            synced
            for synced in candidates
            if replace is (bool(context.named) or _is_stale(context.state_of(synced), context.log_start))
        )
        if tables:
            request = _request(session, exported, context, tables, replace=replace)
            if not replace:
                # Before any row is copied; a killed resync keeps rows copied by the old definition.
                record_copy_definitions(session.connection, name, exported.consistent_point, tables)
            with translated_spark_errors(f'snapshot of subscription "{name}"'):
                copied += load_tables(spark_session("cdc-replay"), request, session.report)
            if replace:
                record_copy_definitions(session.connection, name, exported.consistent_point, tables)
    return tuple(copied)


def _request(
    session: SubscriptionSession,
    exported: ExportedSnapshot,
    context: _SnapshotContext,
    tables: tuple[SyncedTable, ...],
    *,
    replace: bool,
) -> SnapshotRequest:
    feeds = other_feeds(session, (synced.table.name for synced in tables)) if replace else {}
    return SnapshotRequest(
        session.subscription.name,
        exported,
        session.dsn,
        tables,
        replace=replace,
        chunk_bytes=context.options.chunk_bytes,
        log_identity=log_identity(context.change_log.header),
        read_log=log_reader(context.source),
        readers=context.options.readers,
        bytes_per_second=context.options.bytes_per_second,
        run_as_owner=session.subscription.run_as_owner,
        shared={table: names[0] for table, names in feeds.items()},
        while_copying=partial(context.options.while_copying, session),
    )


def _tables_to_copy(
    session: SubscriptionSession, published: Mapping[QualifiedName, SyncedTable], context: _SnapshotContext
) -> tuple[SyncedTable, ...]:
    name = session.subscription.name
    if unknown := [str(table) for table in context.named if table not in published]:
        raise SubscriberNotReady(
            f'subscription "{name}" has no table {", ".join(unknown)}',
            detail=f"Its publications have: {', '.join(map(str, sorted(published))) or 'none'}.",
            hint=did_you_mean(unknown[0], map(str, published)),
        )
    entered = set(context.states)
    # A table added to a publication later is not in the subscription before a refresh (R7.12).
    if not session.tables_are_listed():
        subscription_tables.add_tables(session.connection, name, published)
        entered = set(published)
    if new := [str(table) for table in context.named if table not in entered]:
        raise SubscriberNotReady(
            f'table {", ".join(new)} is not in subscription "{name}" yet',
            hint=f"Run `cdc-replay refresh {name}`.",
            rule="R7.12",
        )
    if context.named:
        return tuple(published[table] for table in dict.fromkeys(context.named))
    return tuple(
        synced
        for table, synced in published.items()
        if table in entered and _needs_copy(session, context.states.get(table, Pending()), context.log_start)
    )


def snapshot_lsn(result: SnapshotResult, otherwise: Lsn) -> Lsn:
    """The consistent point of a snapshot, or `otherwise` if nothing was copied."""
    return result.to_lsn if result.to_lsn is not None else otherwise
