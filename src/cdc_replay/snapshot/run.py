"""The initial copy of the tables that need it, or a resync of named ones.

A snapshot is (LSN, data): the publisher's catalog and rows are read under one exported snapshot, whose
consistent point becomes the tables' applied LSN. The change log must reach back to that point, so the slot
comes first.

While rows are read and staged, others may work on the subscription: replay goes on with the
tables that are ready, a table that is copied again among them. It takes the subscription back to make the new
rows visible. A table that was replayed beyond the snapshot meanwhile goes back to it, and the next replay
brings it forward again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.capture.slot_continuity import check_header
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.compare.reconcile import ReconciledTable, ReconcileRequest, reconcile_tables
from cdc_replay.errors import PublisherNotReady, SubscriberNotReady
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import SnapshotResult, TableCopied
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready, TableState
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, export_snapshot, import_snapshot
from cdc_replay.postgres.slot import check_server
from cdc_replay.publication.capture_coverage import uncaptured_leaves
from cdc_replay.publication.resolve import SyncedTable, synced_tables
from cdc_replay.publication.restrictions import check_publications
from cdc_replay.replay.definition_drift import record_copy_definitions
from cdc_replay.replay.table_rewrites import release_rewritten
from cdc_replay.snapshot.copy_tables import CopiedTable, load_tables
from cdc_replay.snapshot.log_reader import history_of, log_reader_of
from cdc_replay.snapshot.planning import SnapshotRequest
from cdc_replay.spark.errors import translated_spark_errors
from cdc_replay.spark.session import spark_session
from cdc_replay.subscriber import subscription_records, subscription_tables
from cdc_replay.subscriber.session import (
    SubscriptionSession,
    export_snapshot_unlocked,
    release_subscription_lock,
    snapshot_lock,
)
from cdc_replay.subscriber.target_checks import check_targets
from cdc_replay.subscriber.target_tables import read_target_tables

logger = logging.getLogger(__name__)

Progress = Callable[[QualifiedName, int, int], None]
"""Called with a table, and its rows and bytes so far."""


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """What to copy and how.

    `tables` are copied again, replacing their rows; without any, every table that is not ready is copied.
    With `release_subscription_lock` others may work on the subscription while transactions of the publisher
    are waited for, and while rows are read and staged.
    """

    tables: tuple[QualifiedName, ...] = ()
    progress: Progress | None = None
    release_lock: bool = False
    chunk_bytes: int = 256 * 1024 * 1024
    readers: int | None = None
    """Most tasks at a time, each with one connection to both sides; None: Spark's cores."""
    bytes_per_second: int | None = None
    """For all readers together; None: no limit."""

    def export(
        self, publisher_dsn: str, session: SubscriptionSession
    ) -> AbstractContextManager[ExportedSnapshot]:
        """The snapshot to copy from."""
        if self.release_lock:
            return export_snapshot_unlocked(publisher_dsn, session)
        return export_snapshot(publisher_dsn)

    def while_copying(self, session: SubscriptionSession) -> AbstractContextManager[None]:
        """What is entered while rows are read."""
        return release_subscription_lock(session) if self.release_lock else contextlib.nullcontext()


def snapshot_session(
    source: CaptureSource, session: SubscriptionSession, options: SnapshotOptions
) -> SnapshotResult:
    """Copy every table that is not ready, or copy the named ones again, replacing their rows.

    A table that was ready before the change log was begun anew is copied again, too. Copying named tables
    lets a parked subscription be replayed again.

    Raises:
        ChangeLogMissing: before `setup` of the publisher.
        PublisherNotReady: if `setup` was not run since the configuration got these publications.
        PublicationRefused: where PostgreSQL refuses these publications.
        SubscriberNotReady: listing every table and column that the subscriber lacks.
    """
    tables = options.tables
    began = time.monotonic()
    change_log = bind_subscription(source, session)
    release_rewritten(session, change_log.start_lsn)
    states = session.table_states()
    if not tables and not _needed(session, states, change_log.start_lsn):
        return SnapshotResult.nothing(session.subscription.name, time.monotonic() - began)
    _check_server(source, change_log)
    work = _SnapshotContext(source, options, states, change_log)
    if not tables and not session.subscription.copy_data:
        lsn = _start_as_they_are(session, work)
        return SnapshotResult(session.subscription.name, lsn, lsn, time.monotonic() - began, 0, 0, ())
    with snapshot_lock(session), options.export(source.dsn, session) as exported:
        failpoint("snapshot.after_export")
        copied = _copy(session, exported, dataclasses.replace(work, states=session.table_states()))
    if tables:
        # What could not be passed was a change of one of them, or the next replay parks it again.
        subscription_records.unpark(session.connection, session.subscription.name)
    return SnapshotResult(
        subscription=session.subscription.name,
        from_lsn=exported.consistent_point,
        to_lsn=exported.consistent_point,
        seconds=time.monotonic() - began,
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
    """Check that the rows are those of the database whose changes are in the log.

    Raises:
        ChangeLogMismatch: if they are not.
    """
    with connect(source.dsn, purpose="snapshot") as connection:
        check_server(connection)
        check_header(connection, change_log, source.slot)


def bind_subscription(source: CaptureSource, session: SubscriptionSession) -> ChangeLog:
    """Bind the subscription to the publisher's change log and to its publications; returns the log.

    Raises:
        ChangeLogMissing: before `setup` of the publisher.
        SubscriberNotReady: if the subscription's rows come from another publisher.
    """
    change_log = ChangeLog.open(source.change_log)
    subscription_records.bind_subscription(
        session.connection,
        session.subscription.name,
        change_log.header.system_identifier,
        session.subscription.publications,
        change_log.header.database,
    )
    # Of a table that the subscriber has dropped nothing can be seen from before the log (R1.33).
    before = [
        each.relation
        for each in session.known_tables()
        if each.name is None
        and isinstance(each.state, Ready)
        and each.state.applied_lsn < change_log.start_lsn
    ]
    subscription_tables.advance_tables(
        session.connection, session.subscription.name, before, change_log.start_lsn
    )
    return change_log


@dataclass(frozen=True, slots=True)
class _SnapshotContext:
    """What a snapshot of one subscription works with; `states` are those of all its tables."""

    source: CaptureSource
    options: SnapshotOptions
    states: Mapping[QualifiedName, TableState]
    change_log: ChangeLog

    @property
    def named(self) -> tuple[QualifiedName, ...]:
        """The tables that were named."""
        return self.options.tables

    @property
    def log_start(self) -> Lsn:
        """Where the change log starts."""
        return self.change_log.start_lsn


def _needed(session: SubscriptionSession, states: Mapping[QualifiedName, TableState], log_start: Lsn) -> bool:
    is_listed = bool(states) or session.tables_are_listed()
    return not is_listed or any(_needs_copy(session, each, log_start) for each in states.values())


def _needs_copy(session: SubscriptionSession, found: TableState, log_start: Lsn) -> bool:
    if isinstance(found, Pending | Copying):
        return True
    return session.subscription.copy_data and _is_stale(found, log_start)


def _is_stale(found: TableState | None, log_start: Lsn) -> bool:
    """Whether its rows cannot be brought up to date by the log.

    Either it was begun anew since (R1.33), or a change has a value that nobody has (R4.6).
    """
    match found:
        case Parked(transaction=None):
            return True
        case Parked(applied_lsn) | Ready(applied_lsn):
            return applied_lsn < log_start
        case _:
            return False


def _start_as_they_are(session: SubscriptionSession, work: _SnapshotContext) -> Lsn:
    """Let tables start as they are, with what is committed from now on (`copy_data: false`)."""
    name = session.subscription.name
    published = published_now(work.source.dsn, session)
    wanted = _tables_to_copy(session, published.tables, work)
    check_captured(published.catalog, session.subscription, wanted)
    lsn = published.catalog.lsn
    with session.connection.transaction():
        for table in wanted:
            subscription_tables.set_table_state(session.connection, name, table.table.name, Ready(lsn))
        record_copy_definitions(session.connection, name, lsn, wanted)
    return lsn


def _copy(
    session: SubscriptionSession, exported: ExportedSnapshot, work: _SnapshotContext
) -> tuple[CopiedTable, ...]:
    name = session.subscription.name
    published = published_tables(session, exported)
    wanted = _tables_to_copy(session, published.tables, work)
    check_captured(published.catalog, session.subscription, wanted)
    copied: list[CopiedTable] = []
    parked = tuple(each for each in wanted if not work.named and _is_parked(work, each))
    # An initial copy deletes no row (R7.13); a resync replaces those that are there.
    for replace in (False, True):
        tables = tuple(
            each
            for each in wanted
            if each not in parked
            and replace is (bool(work.named) or _is_stale(work.states.get(each.table.name), work.log_start))
        )
        if tables:
            request = _request(session, exported, work, tables, replace=replace)
            if not replace:
                # Before any row is there; a resync that is killed keeps rows that came by the old definition.
                record_copy_definitions(session.connection, name, exported.consistent_point, tables)
            with translated_spark_errors(f'snapshot of subscription "{name}"'):
                copied += load_tables(spark_session("cdc-replay"), request, progress=work.options.progress)
            if replace:
                record_copy_definitions(session.connection, name, exported.consistent_point, tables)
    if parked:
        copied += _reconciled(session, exported, parked)
    return tuple(copied)


def _is_parked(work: _SnapshotContext, table: SyncedTable) -> bool:
    found = work.states.get(table.table.name)
    return isinstance(found, Parked) and found.transaction is None and found.applied_lsn >= work.log_start


def _reconciled(
    session: SubscriptionSession, exported: ExportedSnapshot, tables: tuple[SyncedTable, ...]
) -> Iterator[CopiedTable]:
    """Tables whose rows the log has but for a value (R4.6): little is moved."""
    name, lsn = session.subscription.name, exported.consistent_point

    def record(connection: Connection, _: Sequence[ReconciledTable]) -> None:
        record_copy_definitions(connection, name, lsn, tables)

    request = ReconcileRequest(session.subscription, exported, session.dsn, tables)
    for each in reconcile_tables(request, record):
        yield CopiedTable(each.name, each.rows, each.bytes, each.seconds, lsn)


def _request(
    session: SubscriptionSession,
    exported: ExportedSnapshot,
    work: _SnapshotContext,
    tables: tuple[SyncedTable, ...],
    *,
    replace: bool,
) -> SnapshotRequest:
    return SnapshotRequest(
        session.subscription.name,
        exported,
        session.dsn,
        tables,
        replace=replace,
        chunk_bytes=work.options.chunk_bytes,
        history=history_of(work.change_log.header),
        read_log=log_reader_of(work.source),
        readers=work.options.readers,
        bytes_per_second=work.options.bytes_per_second,
        run_as_owner=session.subscription.run_as_owner,
        while_copying=partial(work.options.while_copying, session),
    )


@dataclass(frozen=True, slots=True)
class PublishedTables:
    """What the publications list, by the published tables' names, and the catalog that says so."""

    catalog: PublisherCatalog
    tables: Mapping[QualifiedName, SyncedTable]


def published_tables(session: SubscriptionSession, exported: ExportedSnapshot) -> PublishedTables:
    """What the subscription's publications list as of the snapshot, checked as PostgreSQL checks it."""
    with import_snapshot(exported, purpose="catalog") as connection:
        return _published(session, read_catalog(connection, exported.consistent_point))


def published_now(publisher_dsn: str, session: SubscriptionSession) -> PublishedTables:
    """The same as of now; an exported snapshot waits for all transactions that are open (R1.34)."""
    with connect(publisher_dsn, purpose="catalog") as connection:
        return _published(session, read_catalog(connection))


def _published(session: SubscriptionSession, catalog: PublisherCatalog) -> PublishedTables:
    publications = session.subscription.publications
    check_publications(catalog, publications)
    found = {each.table.name: each for each in synced_tables(catalog, publications)}
    run_as_owner = session.subscription.run_as_owner
    targets = read_target_tables(session.connection, tuple(found), run_as_owner=run_as_owner)
    # Without a copy only the tables must be there: a missing column shows with the first change (R8.1).
    is_copied = session.subscription.copy_data
    check_targets({name: each.columns if is_copied else () for name, each in found.items()}, targets)
    return PublishedTables(catalog, found)


def check_captured(
    catalog: PublisherCatalog, subscription: Subscription, tables: Sequence[SyncedTable]
) -> None:
    """Check that the log gets the changes of these tables: otherwise they would silently stand still.

    Raises:
        PublisherNotReady: naming those that it does not get.
    """
    missing = uncaptured_leaves(catalog, subscription, tables)
    if missing:
        raise PublisherNotReady(
            f'changes that subscription "{subscription.name}" needs are not captured yet',
            detail=f"No capture publication carries {', '.join(missing)}.",
            hint=f"Run `cdc-replay setup {subscription.publisher}`: it follows the configuration.",
            rule="R2.3",
        )


def _tables_to_copy(
    session: SubscriptionSession, published: Mapping[QualifiedName, SyncedTable], work: _SnapshotContext
) -> tuple[SyncedTable, ...]:
    name = session.subscription.name
    if unknown := [str(each) for each in work.named if each not in published]:
        raise SubscriberNotReady(
            f'subscription "{name}" has no table {", ".join(unknown)}',
            detail=f"Its publications have: {', '.join(map(str, sorted(published))) or 'none'}.",
        )
    entered = set(work.states)
    # A table that entered a publication later is not in the subscription before a refresh (R7.12).
    if not session.tables_are_listed():
        subscription_tables.add_tables(session.connection, name, published)
        entered = set(published)
    if new := [str(each) for each in work.named if each not in entered]:
        raise SubscriberNotReady(
            f'table {", ".join(new)} is not in subscription "{name}" yet',
            hint=f"Run `cdc-replay refresh {name}`.",
            rule="R7.12",
        )
    if work.named:
        return tuple(published[each] for each in dict.fromkeys(work.named))
    return tuple(
        each
        for table, each in published.items()
        if table in entered and _needs_copy(session, work.states.get(table, Pending()), work.log_start)
    )


def snapshot_lsn(result: SnapshotResult, otherwise: Lsn) -> Lsn:
    """The consistent point of a snapshot, or `otherwise` where nothing was copied."""
    return result.to_lsn if result.to_lsn is not None else otherwise
