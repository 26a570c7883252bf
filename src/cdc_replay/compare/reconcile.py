"""Reconcile tables: compare and stage them one by one, then merge all of them in one transaction.

| killed at                 | durable                          | the next run            |
|---------------------------|----------------------------------|-------------------------|
| `reconcile.after_digests` | nothing                          | starts over             |
| `reconcile.after_staging` | nothing: temporary tables        | starts over             |
| `reconcile.mid_merge`     | nothing                          | starts over             |
| `reconcile.before_commit` | nothing                          | starts over             |
| `reconcile.after_commit`  | rows, states and result together | finds no difference     |
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import psycopg
from psycopg import errors as pg
from psycopg import sql

from cdc_replay.compare.buckets import Buckets, UnequalBuckets, unequal_buckets
from cdc_replay.compare.linked_merge import merge_linked
from cdc_replay.compare.merge import MergedValues, merge_values
from cdc_replay.compare.preview import preview
from cdc_replay.compare.staging import StagedRows, comparison_errors, stage, stage_unpublished_keys
from cdc_replay.compare.table_pair import TablePair
from cdc_replay.errors import SubscriberLocked
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.progress import Report, each_table, unreported
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import TableReconciled
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, import_snapshot
from cdc_replay.postgres.planned_tables import PlannedTable, check_unchanged, lock_planned_tables
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.subscriber.apply_connection import (
    connect_as_apply_worker,
    pinned_text_formats,
    set_lock_timeout,
)
from cdc_replay.subscriber.as_owner import TargetSession, TargetSessions, act_on
from cdc_replay.subscriber.firing_foreign_keys import group_tables
from cdc_replay.subscriber.replication_origin import replication_origin
from cdc_replay.subscriber.subscription_tables import set_table_state
from cdc_replay.subscriber.target_checks import check_names, check_targets
from cdc_replay.subscriber.target_statements import lock_out_writers
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables
from cdc_replay.subscriber.triggers import disable_statement_triggers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReconcileRequest:
    """Tables to reconcile with a snapshot.

    `claims` are, by table, conditions for rows that other feeds of the subscriber's table may have inserted:
    they are never deleted.
    """

    subscribed: Subscription
    snapshot: ExportedSnapshot
    subscriber_dsn: str
    tables: tuple[SyncedTable, ...]
    claims: Mapping[QualifiedName, sql.Composed] = field(default_factory=dict)
    report: Report = unreported
    lists_keys: bool = False
    """Whether the result has the first keys of each kind; a preview always has."""
    within: Mapping[QualifiedName, Buckets] = field(default_factory=dict)
    """The only buckets of a table whose rows take part; it must be at the snapshot's position already."""

    @property
    def subscription(self) -> str:
        """The subscription's name."""
        return self.subscribed.name

    @property
    def purpose(self) -> str:
        """Purpose of the connections."""
        return f"reconcile {self.subscription}"

    @property
    def lsn(self) -> Lsn:
        """The position that the tables reach."""
        return self.snapshot.consistent_point


BeforeCommit: TypeAlias = Callable[[Connection, Sequence[TableReconciled]], None]
"""Called inside the transaction, to record the result."""


def reconcile_tables(request: ReconcileRequest, before_commit: BeforeCommit) -> tuple[TableReconciled, ...]:
    """Make all tables equal what the snapshot publishes, and `Ready` at its LSN, in one transaction.

    The caller holds the subscription's lock, keeps the snapshot exported until this returns, and has checked
    that the tables' changes are captured from its LSN on.

    Raises:
        TargetMismatch: listing every table and column that the subscriber lacks.
        InvalidFilter: if a row filter fails on a row.
        ApplyConflict: if a constraint of the subscriber does not allow a row.
        SubscriberLocked: if other sessions hold locks on the tables.
        MissingPrivilege, ServerUnavailable: as from every command. Each error leaves everything unchanged.
    """
    with _connections(request) as (publisher, subscriber):
        pairs = _compare_and_stage(request, publisher, subscriber)
        publisher.rollback()
        failpoint("reconcile.after_staging")
        with _lock_errors(request), replication_origin(subscriber, request.subscription, request.lsn):
            targets = [pair.staged.pair.target for pair in pairs]
            set_lock_timeout(subscriber, request.subscribed.lock_timeout)
            with act_on(subscriber, targets) as sessions:
                _lock(sessions, targets)
                check_names(subscriber, {target.name: target.oid for target in targets})
                with disable_statement_triggers(subscriber, sessions, targets):
                    reconciled = _merge(request, subscriber, sessions, pairs)
            before_commit(subscriber, reconciled)
            failpoint("reconcile.before_commit")
    failpoint("reconcile.after_commit")
    return reconciled


def preview_tables(request: ReconcileRequest) -> tuple[TableReconciled, ...]:
    """Compare as `reconcile_tables` does, and change nothing: no row, no state, no sequence, no lock.

    Raises:
        TargetMismatch, InvalidFilter, MissingPrivilege, ServerUnavailable: as `reconcile_tables`.
    """
    with _connections(request) as (publisher, subscriber):
        pairs = _compare_and_stage(request, publisher, subscriber)
        publisher.rollback()
        return tuple(_preview(subscriber, pair) for pair in pairs)


def _preview(connection: Connection, pair: _ComparedPair) -> TableReconciled:
    started = time.monotonic()
    insert, update, delete = preview(connection, pair.staged)
    return TableReconciled(
        str(pair.staged.pair.name),
        inserted=insert.rows,
        updated=update.rows,
        deleted=delete.rows,
        rows_read=pair.staged.rows,
        bytes=pair.bytes,
        seconds=pair.seconds + time.monotonic() - started,
        deleted_keys=delete.keys,
        updated_keys=update.keys,
        inserted_keys=insert.keys,
    )


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """The compared values of one table; `rows` and `bytes` were read as for a `TableReconciled`."""

    name: QualifiedName
    values: MergedValues
    rows: int
    bytes: int
    seconds: float


def compare_values(
    request: ReconcileRequest,
    before_commit: Callable[[Connection, ComparedTable], None],
    *,
    update_rows: bool,
) -> ComparedTable:
    """Update rows of one table that are on both sides, if `update_rows`, and count the others.

    No row is inserted or deleted, and the table's state stays. The caller holds the subscription's lock,
    keeps the snapshot exported until this returns, and has replayed the table up to its LSN.

    Raises:
        CdcReplayError: as `reconcile_tables`.
    """
    with _connections(request) as (publisher, subscriber):
        (pair,) = _compare_and_stage(request, publisher, subscriber)
        with comparison_errors(pair.staged.pair.name):
            unpublished = stage_unpublished_keys(pair.staged, 0, publisher, subscriber)
        publisher.rollback()
        failpoint("reconcile.after_staging")
        with _lock_errors(request), replication_origin(subscriber, request.subscription, request.lsn):
            target = pair.staged.pair.target
            targets = [target] if update_rows and pair.staged.buckets.ids else []
            set_lock_timeout(subscriber, request.subscribed.lock_timeout)
            with act_on(subscriber, [target], only_reads=not targets) as sessions:
                _lock(sessions, targets)
                with disable_statement_triggers(subscriber, sessions, targets):
                    values = merge_values(
                        subscriber,
                        sessions.session_for(target),
                        pair.staged,
                        unpublished,
                        update_rows=update_rows,
                    )
            staged = pair.staged
            compared = ComparedTable(staged.pair.name, values, staged.rows, pair.bytes, pair.seconds)
            before_commit(subscriber, compared)
            failpoint("reconcile.before_commit")
    failpoint("reconcile.after_commit")
    return compared


@contextlib.contextmanager
def _connections(request: ReconcileRequest) -> Iterator[tuple[Connection, Connection]]:
    purpose = request.purpose
    with (
        contextlib.closing(import_snapshot(request.snapshot, purpose=purpose)) as publisher,
        contextlib.closing(connect_as_apply_worker(request.subscriber_dsn, purpose=purpose)) as subscriber,
    ):
        yield publisher, subscriber


@dataclass(frozen=True, slots=True)
class _ComparedPair:
    """One table compared and staged, with the bytes and seconds that this took."""

    staged: StagedRows
    bytes: int
    seconds: float


def _compare_and_stage(
    request: ReconcileRequest, publisher: Connection, subscriber: Connection
) -> list[_ComparedPair]:
    targets = read_target_tables(
        subscriber,
        [table.table.name for table in request.tables],
        run_as_owner=request.subscribed.run_as_owner,
    )
    check_targets({table.table.name: table.columns for table in request.tables}, targets)
    compared = []
    tables = each_table(
        request.report, "compare", request.subscription, request.tables, lambda table: table.table.name
    )
    for index, synced in enumerate(tables):
        started = time.monotonic()
        logger.info(
            "subscription %s: comparing %s at %s", request.subscription, synced.table.name, request.lsn
        )
        planned = [PlannedTable.from_catalog(synced.table)]
        lock_planned_tables(publisher, planned)
        target = targets[synced.table.name]
        with (
            comparison_errors(synced.table.name),
            pinned_text_formats(subscriber),
            subscriber.transaction(),
            act_on(subscriber, [target], only_reads=True) as sessions,
        ):
            session = sessions.session_for(target)
            pair = TablePair.from_tables(synced, target, publisher, subscriber, session)
            name = synced.table.name
            pair = dataclasses.replace(
                pair, claimed=request.claims.get(name), within=request.within.get(name)
            )
            pair, unequal = _find_unequal_buckets(pair, publisher, subscriber, session)
        failpoint("reconcile.after_digests")
        staged = stage(pair, index, unequal.buckets, publisher, subscriber)
        check_unchanged(publisher, planned)
        compared.append(_ComparedPair(staged, unequal.bytes + staged.bytes, time.monotonic() - started))
        logger.info(
            "subscription %s: %s compared (%d of %d): %d buckets differ, %d rows of them read, %d bytes",
            *(request.subscription, pair.name, index + 1, len(request.tables)),
            *(len(unequal.buckets.ids), staged.rows, compared[-1].bytes),
        )
    return compared


def _find_unequal_buckets(
    pair: TablePair, publisher: Connection, subscriber: Connection, session: TargetSession
) -> tuple[TablePair, UnequalBuckets]:
    """The buckets that differ. If the filter fails on a row of the subscriber, it is not evaluated there."""
    if pair.outside is not None:
        # Savepoints: the imported snapshot must survive a failed statement.
        with contextlib.suppress(psycopg.DataError), publisher.transaction(), subscriber.transaction():
            return pair, unequal_buckets(
                pair.publisher(publisher), pair.subscriber(session).inside(), pair.within
            )
        pair = dataclasses.replace(pair, outside=None)
    return pair, unequal_buckets(pair.publisher(publisher), pair.subscriber(session), pair.within)


def _lock(sessions: TargetSessions, targets: Sequence[TargetTable]) -> None:
    """Lock out other writers until the commit: rows are located by ctid. Readers are not blocked."""
    for target in sorted(targets, key=lambda table: table.name):
        sessions.session_for(target).execute(lock_out_writers(target))


def _merge(
    request: ReconcileRequest,
    connection: Connection,
    sessions: TargetSessions,
    pairs: Sequence[_ComparedPair],
) -> tuple[TableReconciled, ...]:
    by_name = {pair.staged.pair.name: pair for pair in pairs}
    groups = [
        [by_name[target.name] for target in group]
        for group in group_tables(pair.staged.pair.target for pair in pairs)
    ]
    reconciled: dict[QualifiedName, TableReconciled] = {}
    for group in each_table(request.report, "merge", request.subscription, groups, _names):
        started = time.monotonic()
        previews = [_preview(connection, pair) for pair in group if request.lists_keys]
        merged = merge_linked(connection, sessions, [pair.staged for pair in group])
        tables = previews or [
            TableReconciled(str(pair.staged.pair.name), 0, 0, 0, pair.staged.rows, pair.bytes, 0.0)
            for pair in group
        ]
        for pair, table in zip(group, tables, strict=True):
            name = pair.staged.pair.name
            counts = merged[name]
            set_table_state(connection, request.subscription, name, Ready(request.lsn))
            seconds = pair.seconds + time.monotonic() - started
            logger.info(
                "subscription %s: %s merged: %d inserts, %d updates, %d deletes, %.2f s",
                *(request.subscription, name, counts.insert, counts.update, counts.delete, seconds),
            )
            failpoint("reconcile.mid_merge")
            reconciled[name] = dataclasses.replace(
                table,
                inserted=counts.insert,
                updated=counts.update,
                deleted=counts.delete,
                seconds=seconds,
            )
    return tuple(reconciled[name] for name in by_name)


def _names(group: Sequence[_ComparedPair]) -> str:
    return ", ".join(str(pair.staged.pair.name) for pair in group)


@contextlib.contextmanager
def _lock_errors(request: ReconcileRequest) -> Iterator[None]:
    try:
        yield
    except (pg.LockNotAvailable, pg.DeadlockDetected) as error:
        raise SubscriberLocked(
            f'cannot lock the tables of subscription "{request.subscription}": {error.diag.message_primary}',
            detail=error.diag.message_detail,
            hint="Another session of the subscriber writes to them: run the command again after it ends.",
        ) from error
