"""A subscription refreshed, as by ALTER SUBSCRIPTION … REFRESH PUBLICATION, and more with `--reconcile`.

The publications are read again. New tables are copied, dropped ones are forgotten, rows that are already
there stay (R7.13, R9.12). A table of the subscriber is new if it was not subscribed to, whatever its name:
one that was renamed on both sides is not, one that was made anew on the subscriber is (R7.12).

With `reconcile`, every table then is what a new subscription would copy at one LSN, the result's `to_lsn`:
rows that a changed filter shuts out are deleted, rows that it lets in are brought, rows that differ are
updated, without a full copy (`cdc_replay.compare`). New tables that are empty on the subscriber are copied
first, in parallel; new ones with rows, and tables that are parked, are reconciled as they are.

| killed                      | durable                                    | the next run       |
|-----------------------------|--------------------------------------------|--------------------|
| before tables are entered   | capture publications that carry more       | does all of it     |
| behind that                 | new tables are `Pending`, others forgotten | goes on with these |
| while new ones are copied   | as for `snapshot`                          | as for `snapshot`  |
| while tables are reconciled | nothing of it, before its one commit       | begins that again  |

A table that is entered and not copied waits, and replay leaves it out: nothing passes it by.

What `reconcile` must not delete is known before anything is changed: rows of other feeds
(`compare.other_feeds`), and with `origin: none` all rows that are there, because those that were made on
this side cannot be told from the publisher's (R8.19). Where a person is to be asked, or with `origin: none`,
the comparison is made once more before, as with `dry_run`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.capture.setup import SetupRequest, setup_publisher
from cdc_replay.compare.other_feeds import LogState, rows_of_other_feeds
from cdc_replay.compare.reconcile import (
    ReconciledTable,
    ReconcileRequest,
    preview_tables,
    reconcile_tables,
)
from cdc_replay.errors import NotConfirmed, ReconcileRefused
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import RefreshResult, SnapshotResult, TableReconciled
from cdc_replay.model.subscription import OriginPolicy, Subscription
from cdc_replay.model.table_state import Copying, Pending
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.replay.definition_drift import definition_drifts, record_copy_definitions
from cdc_replay.replay.rewritten_values import compare_marked_tables
from cdc_replay.snapshot.run import (
    PublishedTables,
    SnapshotOptions,
    bind_subscription,
    check_captured,
    published_now,
    published_tables,
    snapshot_session,
)
from cdc_replay.subscriber import recorded_results, subscription_records, subscription_tables
from cdc_replay.subscriber.as_owner import has_rows
from cdc_replay.subscriber.session import SubscriptionSession, export_snapshot_unlocked
from cdc_replay.subscriber.target_checks import check_targets
from cdc_replay.subscriber.target_tables import TargetTable, read_target_tables

logger = logging.getLogger(__name__)


Confirm: TypeAlias = Callable[[RefreshResult], bool]
"""Asked before rows are deleted, with the result of a dry run."""


@dataclass(frozen=True, slots=True)
class RefreshRequest:
    """A subscription to be refreshed.

    `setup` is what all subscriptions want of the publisher, `configured` are all of them by name: they may
    feed the same tables. `reconcile`: rows are made those of a new subscription.
    """

    source: CaptureSource
    setup: SetupRequest
    configured: Mapping[str, Subscription]
    options: SnapshotOptions
    reconcile: bool = False


def refresh_subscription(
    request: RefreshRequest, session: SubscriptionSession, confirm: Confirm | None = None
) -> RefreshResult:
    """Bring the subscription's list of tables up to date and copy the new ones.

    With `copy_data: false` the new ones start as they are, with what is committed from now on; with
    `reconcile` they get all their rows. A parked subscription is replayed again.

    Raises:
        PublicationRefused, PublicationMissing, TargetMismatch, ReconcileRefused: with nothing changed.
        NotConfirmed: if `confirm` says no to what a reconciliation would delete, with nothing changed.
        CdcReplayError: as from `snapshot_session`; with `reconcile`, as `reconcile_tables`.
    """
    began, source = time.monotonic(), request.source
    before = lsn = session.position()
    if request.reconcile:
        _check_reconciliation(request, session, confirm)
    published, added, removed = _entered_and_forgotten(request, session)
    if request.reconcile:
        copied = _copied_where_empty(request, session, published)
        lsn, reconciled = _reconciled(request, session)
        warnings: tuple[str, ...] = ()
    else:
        # Also where no table is new: a refresh that was killed may have left some waiting.
        copied = snapshot_session(source, session, request.options)
        # The table that stopped it may have left; otherwise the next replay parks it again.
        subscription_records.unpark(session.connection, session.subscription.name)
        copied = dataclasses.replace(copied, compared=compare_marked_tables(source, session))
        before = lsn = session.position()
        told = (table.warning for table in copied.compared)
        reconciled, warnings = (), (*_warnings(source, session, published), *filter(None, told))
    return RefreshResult(
        subscription=session.subscription.name,
        from_lsn=before,
        to_lsn=lsn,
        seconds=time.monotonic() - began,
        added=tuple(map(str, added)),
        removed=tuple(map(str, removed)),
        snapshot=copied,
        warnings=warnings,
    ).with_tables(map(_table_result, reconciled))


def preview_refresh(request: RefreshRequest, session: SubscriptionSession) -> RefreshResult:
    """What `refresh_subscription` would do. Nothing is written on either side."""
    began, source = time.monotonic(), request.source
    reconciled: tuple[ReconciledTable, ...] = ()
    if request.reconcile:
        with export_snapshot_unlocked(source.dsn, session) as exported:
            published = published_tables(session, exported)
            tables = tuple(published.tables.values())
            reconciled = preview_tables(
                _reconcile_request(request, session, exported, published.catalog, tables)
            )
        _check_origin(session, reconciled)
    else:
        published = published_now(source.dsn, session)
    states = session.table_states()
    return RefreshResult(
        subscription=session.subscription.name,
        from_lsn=session.position(),
        to_lsn=published.catalog.lsn,
        seconds=time.monotonic() - began,
        added=tuple(str(table) for table in published.tables if table not in states),
        removed=tuple(str(table) for table in states if table not in published.tables),
        snapshot=SnapshotResult.nothing(session.subscription.name),
        dry_run=True,
    ).with_tables(map(_table_result, reconciled))


def _check_reconciliation(
    request: RefreshRequest, session: SubscriptionSession, confirm: Confirm | None
) -> None:
    """No row goes that is not ours, or that a person wants to keep. Before anything is changed."""
    if confirm is None and session.subscription.origin is OriginPolicy.ANY:
        published = published_now(request.source.dsn, session)
        rows_of_other_feeds(session, _log_state(request, published.catalog), published.tables)
        return
    told = preview_refresh(request, session)
    if confirm is not None and told.deleted and not confirm(told):
        raise NotConfirmed(
            f'subscription "{session.subscription.name}" was not reconciled: nothing was changed',
            detail=f"{told.deleted} rows of the subscriber would have been deleted.",
        )


def _log_state(request: RefreshRequest, catalog: PublisherCatalog) -> LogState:
    return LogState(request.source.change_log, catalog, request.configured)


def _check_origin(session: SubscriptionSession, tables: Sequence[ReconciledTable]) -> None:
    """With `origin: none`, both sides may write: a row that the publisher lacks may have been made here.

    Raises:
        ReconcileRefused: if rows would be deleted or updated.
    """
    changed = [table for table in tables if table.delete or table.update]
    if session.subscription.origin is OriginPolicy.ANY or not changed:
        return
    raise ReconcileRefused(
        f'subscription "{session.subscription.name}" has origin: none, and rows that were made on this side'
        " cannot be told from the publisher's: it is not reconciled",
        detail="\n".join(
            f'table "{table.name}": {table.delete} rows would be deleted, {table.update} updated'
            for table in changed
        ),
        hint="Nothing was changed. Correct these rows by hand; rows that are only missing are brought.",
        rule="R8.19",
    )


def _reconcile_request(
    request: RefreshRequest,
    session: SubscriptionSession,
    exported: ExportedSnapshot,
    catalog: PublisherCatalog,
    tables: tuple[SyncedTable, ...],
) -> ReconcileRequest:
    names = [table.table.name for table in tables]
    claims = rows_of_other_feeds(session, _log_state(request, catalog), names)
    return ReconcileRequest(session.subscription, exported, session.dsn, tables, claims)


def _entered_and_forgotten(
    request: RefreshRequest, session: SubscriptionSession
) -> tuple[PublishedTables, tuple[QualifiedName, ...], tuple[QualifiedName, ...]]:
    """Take over what the publications list; returns it, with the tables that entered and those that left."""
    published = published_now(request.source.dsn, session)
    if request.reconcile:
        _check_columns(session, published.tables)
    # The slot must carry the new tables' changes before their rows are copied, or what happens in between
    # would be in neither.
    setup_publisher(request.setup, dry_run=False)
    bind_subscription(request.source, session)
    known = session.known_tables()
    names = {each.name for each in known}
    added = {table: each for table, each in published.tables.items() if table not in names}
    # One that was dropped on the subscriber is forgotten; what has its name is another table (R7.12).
    removed = tuple(each for each in known if each.name not in published.tables)
    with session.connection.transaction():
        subscription_tables.add_tables(session.connection, session.subscription.name, added)
        for each in removed:
            subscription_tables.remove_table(session.connection, session.subscription.name, each.relation)
    return published, tuple(added), tuple(each.name or each.recorded_name for each in removed)


def _targets(
    session: SubscriptionSession, names: Iterable[QualifiedName]
) -> dict[QualifiedName, TargetTable]:
    return read_target_tables(
        session.connection, tuple(names), run_as_owner=session.subscription.run_as_owner
    )


def _check_columns(session: SubscriptionSession, tables: Mapping[QualifiedName, SyncedTable]) -> None:
    """Also with `copy_data: false`: reconciling brings rows, so the columns must be there."""
    targets = _targets(session, tables)
    check_targets({name: each.columns for name, each in tables.items()}, targets)


def _warnings(
    source: CaptureSource, session: SubscriptionSession, published: PublishedTables
) -> tuple[str, ...]:
    subscription = session.subscription
    found = definition_drifts(session.connection, subscription, source.change_log, published.catalog)
    warnings = tuple(map(str, found.values()))
    for warning in warnings:
        logger.warning("subscription %s: %s", subscription.name, warning)
    return warnings


def _copied_where_empty(
    request: RefreshRequest, session: SubscriptionSession, published: PublishedTables
) -> SnapshotResult:
    """Copy the tables that wait for their first rows and have none: many readers are faster than one."""
    targets = _targets(session, published.tables)
    incomplete = [
        name for name, found in session.table_states().items() if isinstance(found, Pending | Copying)
    ]
    # Not in the session that holds the subscription's lock: what a table's owner runs could let it go.
    with connect(session.dsn, purpose=f"refresh {session.subscription.name}") as connection:
        waiting = [name for name in incomplete if name in targets and not has_rows(connection, targets[name])]
    if not waiting:
        return SnapshotResult.nothing(session.subscription.name)
    options = dataclasses.replace(request.options, tables=tuple(waiting))
    return snapshot_session(request.source, session, options)


def _reconciled(
    request: RefreshRequest, session: SubscriptionSession
) -> tuple[Lsn, tuple[ReconciledTable, ...]]:
    """Reconcile all tables of the subscription with one snapshot; returns its LSN too."""
    name = session.subscription.name
    with export_snapshot_unlocked(request.source.dsn, session) as exported:
        # Once more: what was published before may have changed, and its changes must be in the log.
        published = published_tables(session, exported)
        states = session.table_states()
        tables = tuple(each for table, each in published.tables.items() if table in states)
        check_captured(published.catalog, session.subscription, tables)
        lsn = exported.consistent_point

        def record(connection: Connection, done: Sequence[ReconciledTable]) -> None:
            record_copy_definitions(connection, name, lsn, tables)
            subscription_records.unpark(connection, name)
            recorded = {
                "subscription": name,
                "to_lsn": str(lsn),
                "tables": [_table_result(each).to_dict() for each in done],
            }
            _check_origin(session, done)
            recorded_results.record_result(connection, name, "reconcile", recorded)

        wanted = _reconcile_request(request, session, exported, published.catalog, tables)
        return lsn, reconcile_tables(wanted, record)


def _table_result(done: ReconciledTable) -> TableReconciled:
    result = TableReconciled(
        str(done.name), done.insert, done.update, done.delete, done.rows, done.bytes, done.seconds
    )
    if done.preview is None:
        return result
    return dataclasses.replace(
        result,
        deleted_keys=done.preview.delete.keys,
        updated_keys=done.preview.update.keys,
        inserted_keys=done.preview.insert.keys,
    )
