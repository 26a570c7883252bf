"""Reconcile tables: compare and stage one after another, then merge all of them in one transaction.

| killed at                 | durable                          | the next run            |
|---------------------------|----------------------------------|-------------------------|
| `reconcile.after_digests` | nothing                          | begins again            |
| `reconcile.after_staging` | nothing: temporary tables        | begins again            |
| `reconcile.mid_merge`     | nothing                          | begins again            |
| `reconcile.before_commit` | nothing                          | begins again            |
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

from cdc_replay.compare.buckets import UnequalBuckets, unequal_buckets
from cdc_replay.compare.digest import TableSide
from cdc_replay.compare.merge import Merged, MergedValues, Preview, merge, merge_values, preview
from cdc_replay.compare.staging import StagedRows, TablePair, comparing, stage, stage_unpublished_keys
from cdc_replay.errors import SubscriberLocked
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, import_snapshot
from cdc_replay.postgres.planned_tables import PlannedTable, lock_planned_tables
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.subscriber.apply_connection import (
    connect_as_apply_worker,
    pinned_text_formats,
    set_lock_timeout,
)
from cdc_replay.subscriber.as_owner import TargetSessions, act_on, target_reference
from cdc_replay.subscriber.replication_origin import replication_origin
from cdc_replay.subscriber.subscription_tables import set_table_state
from cdc_replay.subscriber.target_checks import check_names, check_targets
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables
from cdc_replay.subscriber.triggers import disable_statement_triggers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReconcileRequest:
    """Which tables to reconcile with what the snapshot holds.

    `claims` are, by table, conditions of rows that other feeds of the subscriber's table may have brought:
    they stay.
    """

    subscribed: Subscription
    snapshot: ExportedSnapshot
    subscriber_dsn: str
    tables: tuple[SyncedTable, ...]
    claims: Mapping[QualifiedName, sql.Composed] = field(default_factory=dict)

    @property
    def subscription(self) -> str:
        """The subscription's name."""
        return self.subscribed.name

    @property
    def purpose(self) -> str:
        """What the connections are for."""
        return f"reconcile {self.subscription}"

    @property
    def lsn(self) -> Lsn:
        """The position that the tables are brought to."""
        return self.snapshot.consistent_point


@dataclass(frozen=True, slots=True)
class ReconciledTable:
    """What was changed in a table of the subscriber; with `preview`, what would be.

    `rows` were read from the publisher because they could differ; `bytes` are those rows in COPY's text
    format and the digests of both sides.
    """

    name: QualifiedName
    insert: int
    update: int
    delete: int
    rows: int
    bytes: int
    seconds: float
    preview: Preview | None = None


BeforeCommit: TypeAlias = Callable[[Connection, Sequence[ReconciledTable]], None]
"""Called inside the transaction, to record what it has come to."""


def reconcile_tables(
    request: ReconcileRequest, before_commit: BeforeCommit | None = None
) -> tuple[ReconciledTable, ...]:
    """Make all tables exactly what the snapshot publishes, and `Ready` at its LSN, in one transaction.

    The caller holds the subscription's lock, keeps the snapshot exported until this returns, and knows that
    the change log gets the tables' changes from its LSN on.

    Raises:
        TargetMismatch: listing every table and column that the subscriber lacks.
        InvalidFilter: if a row filter fails on a row.
        ApplyConflict: if a constraint of the subscriber does not allow a row.
        SubscriberLocked: if other sessions hold what is needed.
        MissingPrivilege, ServerUnavailable: as from every command. Nothing is changed by any of them.
    """
    with (
        contextlib.closing(import_snapshot(request.snapshot, purpose=request.purpose)) as publisher,
        contextlib.closing(
            connect_as_apply_worker(request.subscriber_dsn, purpose=request.purpose)
        ) as subscriber,
    ):
        work = _compared(request, publisher, subscriber)
        publisher.rollback()
        failpoint("reconcile.after_staging")
        with _lock_errors(request), replication_origin(subscriber, request.subscription, request.lsn):
            targets = [each.staged.pair.target for each in work]
            set_lock_timeout(subscriber, request.subscribed.lock_timeout)
            with act_on(subscriber, targets) as sessions:
                _lock(sessions, targets)
                check_names(subscriber, {each.name: each.oid for each in targets})
                with disable_statement_triggers(subscriber, sessions, targets):
                    done = tuple(_merged(request, subscriber, sessions, each) for each in work)
            if before_commit is not None:
                before_commit(subscriber, done)
            failpoint("reconcile.before_commit")
    failpoint("reconcile.after_commit")
    return done


def preview_tables(request: ReconcileRequest) -> tuple[ReconciledTable, ...]:
    """Compare as `reconcile_tables` does, and change nothing: no row, no state, no sequence, no lock.

    Raises:
        TargetMismatch, InvalidFilter, MissingPrivilege, ServerUnavailable: as `reconcile_tables`.
    """
    with (
        contextlib.closing(import_snapshot(request.snapshot, purpose=request.purpose)) as publisher,
        contextlib.closing(
            connect_as_apply_worker(request.subscriber_dsn, purpose=request.purpose)
        ) as subscriber,
    ):
        work = _compared(request, publisher, subscriber)
        publisher.rollback()
        return tuple(_previewed(subscriber, each) for each in work)


def _previewed(connection: Connection, work: _Work) -> ReconciledTable:
    began = time.monotonic()
    seen, staged = preview(connection, work.staged), work.staged
    counts = (seen.insert.rows, seen.update.rows, seen.delete.rows)
    seconds = work.seconds + time.monotonic() - began
    return ReconciledTable(staged.pair.name, *counts, staged.rows, work.bytes, seconds, seen)


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """What comparing the values of one table has come to; `rows` and `bytes` as in `ReconciledTable`."""

    name: QualifiedName
    values: MergedValues
    rows: int
    bytes: int
    seconds: float


def compare_values(
    request: ReconcileRequest, before_commit: Callable[[Connection, ComparedTable], None], *, moves: bool
) -> ComparedTable:
    """Bring the values of the rows that both sides have, of one table, if it `moves` any; count the others.

    No row comes or goes, and the table's state stays. The caller holds the subscription's lock, keeps the
    snapshot exported until this returns, and has brought the table to its LSN.

    Raises:
        CdcReplayError: as `reconcile_tables`.
    """
    with (
        contextlib.closing(import_snapshot(request.snapshot, purpose=request.purpose)) as publisher,
        contextlib.closing(
            connect_as_apply_worker(request.subscriber_dsn, purpose=request.purpose)
        ) as subscriber,
    ):
        (work,) = _compared(request, publisher, subscriber)
        with comparing(work.staged.pair.name):
            unpublished = stage_unpublished_keys(work.staged, 0, publisher, subscriber)
        publisher.rollback()
        failpoint("reconcile.after_staging")
        with _lock_errors(request), replication_origin(subscriber, request.subscription, request.lsn):
            target = work.staged.pair.target
            targets = [target] if moves and work.staged.buckets.numbers else []
            set_lock_timeout(subscriber, request.subscribed.lock_timeout)
            with act_on(subscriber, [target], only_reads=not targets) as sessions:
                _lock(sessions, targets)
                with disable_statement_triggers(subscriber, sessions, targets):
                    values = merge_values(
                        subscriber, sessions.session_for(target), work.staged, unpublished, moves=moves
                    )
            staged = work.staged
            done = ComparedTable(staged.pair.name, values, staged.rows, work.bytes, work.seconds)
            before_commit(subscriber, done)
            failpoint("reconcile.before_commit")
    failpoint("reconcile.after_commit")
    return done


@dataclass(frozen=True, slots=True)
class _Work:
    """What there is to merge into one table, and what finding it took."""

    staged: StagedRows
    bytes: int
    seconds: float


def _compared(request: ReconcileRequest, publisher: Connection, subscriber: Connection) -> list[_Work]:
    targets = read_target_tables(
        subscriber,
        [each.table.name for each in request.tables],
        run_as_owner=request.subscribed.run_as_owner,
    )
    check_targets({each.table.name: each.columns for each in request.tables}, targets)
    work = []
    for number, synced in enumerate(request.tables):
        began = time.monotonic()
        logger.info(
            "subscription %s: comparing %s at %s", request.subscription, synced.table.name, request.lsn
        )
        lock_planned_tables(publisher, [PlannedTable.from_catalog(synced.table)])
        target = targets[synced.table.name]
        with (
            comparing(synced.table.name),
            pinned_text_formats(subscriber),
            subscriber.transaction(),
            act_on(subscriber, [target], only_reads=True) as sessions,
        ):
            session = sessions.session_for(target)
            pair = TablePair.of(synced, target, publisher, subscriber, session)
            pair = dataclasses.replace(pair, claimed=request.claims.get(synced.table.name))
            pair, unequal = _unequal(pair, publisher, pair.subscriber(subscriber, session))
        failpoint("reconcile.after_digests")
        staged = stage(pair, number, unequal.buckets, publisher, subscriber)
        work.append(_Work(staged, unequal.bytes + staged.bytes, time.monotonic() - began))
        logger.info(
            "subscription %s: %s compared (%d of %d): %d buckets differ, %d rows of them read, %d bytes",
            *(request.subscription, pair.name, number + 1, len(request.tables)),
            *(len(unequal.buckets.numbers), staged.rows, work[-1].bytes),
        )
    return work


def _unequal(
    pair: TablePair, publisher: Connection, subscriber: TableSide
) -> tuple[TablePair, UnequalBuckets]:
    """The buckets that differ. A filter that fails on a row of the subscriber is not asked there."""
    if pair.outside is not None:
        # Savepoints: the imported snapshot must survive.
        with (
            contextlib.suppress(psycopg.DataError),
            publisher.transaction(),
            subscriber.connection.transaction(),
        ):
            return pair, unequal_buckets(pair.publisher(publisher), subscriber)
        pair = dataclasses.replace(pair, outside=None)
        subscriber = pair.subscriber(subscriber.connection, subscriber.reader)
    return pair, unequal_buckets(pair.publisher(publisher), subscriber)


def _lock(sessions: TargetSessions, targets: Sequence[TargetTable]) -> None:
    """Shut other writers out until the commit: rows are found by their place. Readers go on."""
    for target in sorted(targets, key=lambda each: each.name):
        lock = sql.SQL("lock table {} in share row exclusive mode").format(target_reference(target))
        sessions.session_for(target).execute(lock)


def _merged(
    request: ReconcileRequest, connection: Connection, sessions: TargetSessions, work: _Work
) -> ReconciledTable:
    began = time.monotonic()
    name = work.staged.pair.name
    merged: Merged = merge(connection, sessions.session_for(work.staged.pair.target), work.staged)
    set_table_state(connection, request.subscription, name, Ready(request.lsn))
    seconds = work.seconds + time.monotonic() - began
    done = ReconciledTable(
        name, merged.insert, merged.update, merged.delete, work.staged.rows, work.bytes, seconds
    )
    logger.info(
        "subscription %s: %s merged: %d inserts, %d updates, %d deletes, %.2f s",
        *(request.subscription, name, done.insert, done.update, done.delete, done.seconds),
    )
    failpoint("reconcile.mid_merge")
    return done


@contextlib.contextmanager
def _lock_errors(request: ReconcileRequest) -> Iterator[None]:
    try:
        yield
    except (pg.LockNotAvailable, pg.DeadlockDetected) as error:
        raise SubscriberLocked(
            f'cannot lock the tables of subscription "{request.subscription}": {error.diag.message_primary}',
            detail=error.diag.message_detail,
            hint="Another session of the subscriber writes to them: run the command again when it has ended.",
        ) from error
