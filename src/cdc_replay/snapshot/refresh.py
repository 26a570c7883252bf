"""Refresh of a subscription, as by ALTER SUBSCRIPTION … REFRESH PUBLICATION, and more with `--reconcile`.

The publications are read again. New tables are copied, dropped ones are removed, existing rows stay (R7.13,
R9.12). A table of the subscriber is new if it was not in the subscription, whatever its name: a table renamed
on both sides is not new, a table recreated on the subscriber is (R7.12).

With `reconcile`, every table becomes what a new subscription would copy at one LSN, the result's `to_lsn`:
rows outside a changed filter are deleted, rows inside it inserted, differing rows updated, without a full
copy (`cdc_replay.compare`). New tables that are empty on the subscriber are copied first, in parallel; new
tables with rows, and parked tables, are reconciled.

| killed                      | durable                                        | the next run          |
|-----------------------------|------------------------------------------------|-----------------------|
| before tables are added     | capture publications that publish more         | does all of it        |
| after that                  | new tables are `Pending`, dropped ones removed | continues with these  |
| while new ones are copied   | as for `snapshot`                              | as for `snapshot`     |
| while tables are reconciled | nothing of it, before its one commit           | starts that over      |

Replay skips a table that is added and not copied yet; none of its changes are lost.

Rows that `reconcile` must not delete are determined before any change: rows of other feeds
(`compare.other_feeds`), and with `origin: none` all existing rows, because rows written on this side cannot
be distinguished from the publisher's (R8.19). With a confirmation, or with `origin: none`, the comparison
runs once more before, as with `dry_run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cdc_replay.capture.capture_to import ensure_captured
from cdc_replay.capture.pull import CaptureSource
from cdc_replay.capture.setup import SetupRequest, setup_publisher
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.compare.buckets import Buckets
from cdc_replay.compare.other_feeds import LogState, rows_of_other_feeds
from cdc_replay.compare.reconcile import ReconcileRequest, preview_tables, reconcile_tables
from cdc_replay.errors import NotConfirmed, NotConsistent, ReconcileRefused
from cdc_replay.model.count import count_in_words
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import RefreshResult, SnapshotResult, TableReconciled
from cdc_replay.model.subscription import OriginPolicy, Subscription
from cdc_replay.model.table_state import Copying, Pending, Ready, describe
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.replay.definition_drift import definition_drifts, record_copy_definitions
from cdc_replay.replay.engine import replay_sessions
from cdc_replay.replay.log_view import LogView
from cdc_replay.replay.rewritten_values import compare_marked_tables
from cdc_replay.snapshot.published_tables import (
    PublishedTables,
    check_captured,
    read_published_tables,
    read_published_tables_now,
)
from cdc_replay.snapshot.run import SnapshotOptions, bind_subscription, snapshot_session
from cdc_replay.subscriber import recorded_results, subscription_records, subscription_tables
from cdc_replay.subscriber.as_owner import has_rows
from cdc_replay.subscriber.session import (
    SubscriptionSession,
    export_after_applied,
    export_snapshot_unlocked,
)
from cdc_replay.subscriber.target_checks import check_targets

logger = logging.getLogger(__name__)

Confirm: TypeAlias = Callable[[RefreshResult], bool]
"""Called before rows are deleted, with the result of a dry run."""


@dataclass(frozen=True, slots=True)
class RefreshRequest:
    """A refresh of one subscription.

    `setup` covers all subscriptions of the publisher, `configured` are all subscriptions by name: they may
    feed the same tables. `reconcile`: rows become those of a new subscription.
    """

    source: CaptureSource
    setup: SetupRequest
    configured: Mapping[str, Subscription]
    options: SnapshotOptions
    reconcile: bool = False


def refresh_subscription(
    request: RefreshRequest, session: SubscriptionSession, confirm: Confirm | None = None
) -> RefreshResult:
    """Update the subscription's list of tables and copy the new ones.

    With `copy_data: false` new tables are not copied, and get transactions from now on; with `reconcile` they
    get all their rows. A parked subscription is unparked.

    Raises:
        PublicationRefused, PublicationMissing, TargetMismatch, ReconcileRefused: with nothing changed.
        NotConfirmed: if `confirm` declines the deletions of a reconciliation, with nothing changed.
        CdcReplayError: as from `snapshot_session`; with `reconcile`, as `reconcile_tables`.
    """
    started, source = time.monotonic(), request.source
    before = lsn = session.position()
    if request.reconcile:
        _check_reconciliation(request, session, confirm)
    published, added, removed = _update_tables(request, session)
    if request.reconcile:
        copied = _copy_empty_tables(request, session, published)
        lsn, reconciled = _reconcile(request, session)
        warnings: tuple[str, ...] = ()
    else:
        # Also without new tables: a killed refresh may have left pending ones.
        change_log = ChangeLog.open(source.change_log)
        copied = snapshot_session(source, change_log, session, request.options)
        # The failing table may be removed now; otherwise the next replay parks the subscription again.
        subscription_records.unpark(session.connection, session.subscription.name)
        copied = dataclasses.replace(copied, compared=compare_marked_tables(source, session))
        before = lsn = session.position()
        table_warnings = (table.warning for table in copied.compared)
        reconciled, warnings = (), (*_warnings(source, session, published), *filter(None, table_warnings))
    return RefreshResult(
        subscription=session.subscription.name,
        from_lsn=before,
        to_lsn=lsn,
        seconds=time.monotonic() - started,
        added=tuple(map(str, added)),
        removed=tuple(map(str, removed)),
        snapshot=copied,
        warnings=warnings,
    ).with_tables(reconciled)


def preview_refresh(request: RefreshRequest, session: SubscriptionSession) -> RefreshResult:
    """What `refresh_subscription` would change. Writes nothing on either side."""
    started, source = time.monotonic(), request.source
    reconciled: tuple[TableReconciled, ...] = ()
    if request.reconcile:
        published, reconciled = _preview_reconciliation(request, session)
    else:
        published = read_published_tables_now(source.dsn, session)
    states = session.table_states()
    return RefreshResult(
        subscription=session.subscription.name,
        from_lsn=session.position(),
        to_lsn=published.catalog.lsn,
        seconds=time.monotonic() - started,
        added=tuple(str(table) for table in published.tables if table not in states),
        removed=tuple(str(table) for table in states if table not in published.tables),
        snapshot=SnapshotResult.nothing(session.subscription.name),
        dry_run=True,
    ).with_tables(reconciled)


Repaired: TypeAlias = Mapping[QualifiedName, Buckets | None]
"""Tables to repair: the buckets of rows that may be written, or None for all rows."""


def preview_repair(
    request: RefreshRequest, session: SubscriptionSession, tables: Repaired
) -> tuple[TableReconciled, ...]:
    """What `repair_tables` would write, with the first keys of each kind. Writes nothing on either side."""
    return _preview_reconciliation(request, session, tables)[1]


def repair_tables(
    request: RefreshRequest, session: SubscriptionSession, tables: Repaired
) -> tuple[TableReconciled, ...]:
    """Write the rows of these tables that differ from what is published, all at one LSN.

    Other tables of the subscription, rows of other buckets, and the list of its tables, stay as they are.

    Raises:
        ReconcileRefused: if the subscription may not be reconciled, with nothing changed.
        NotConsistent: if a table of which some buckets are repaired cannot be replayed to that LSN.
        CdcReplayError: as `reconcile_tables`.
    """
    return _reconcile(request, session, tables)[1]


def _preview_reconciliation(
    request: RefreshRequest, session: SubscriptionSession, names: Repaired | None = None
) -> tuple[PublishedTables, tuple[TableReconciled, ...]]:
    """What is published, and what reconciling it, or the tables of `names`, would write."""
    with export_snapshot_unlocked(request.source.dsn, session) as exported:
        published = read_published_tables(session, exported)
        tables = tuple(
            synced for table, synced in published.tables.items() if names is None or table in names
        )
        previewed = _reconcile_request(request, session, exported, published.catalog, tables)
        reconciled = preview_tables(dataclasses.replace(previewed, within=_buckets(names)))
    _check_origin(session, reconciled)
    return published, reconciled


def _check_reconciliation(
    request: RefreshRequest, session: SubscriptionSession, confirm: Confirm | None
) -> None:
    """Refuse to delete rows of other feeds, and ask for confirmation, before anything is changed."""
    if confirm is None and session.subscription.origin is OriginPolicy.ANY:
        published = read_published_tables_now(request.source.dsn, session)
        rows_of_other_feeds(session, _log_state(request, published.catalog), published.tables)
        return
    preview = preview_refresh(request, session)
    if confirm is not None and preview.deleted and not confirm(preview):
        raise NotConfirmed(
            f'subscription "{session.subscription.name}" was not reconciled: nothing was changed',
            detail=f"{count_in_words(preview.deleted, 'row')} of the subscriber would have been deleted.",
        )


def _log_state(request: RefreshRequest, catalog: PublisherCatalog) -> LogState:
    return LogState(request.source.change_log, catalog, request.configured)


def _check_origin(session: SubscriptionSession, tables: Sequence[TableReconciled]) -> None:
    """With `origin: none`, both sides may write: a row missing on the publisher may be a local one.

    Raises:
        ReconcileRefused: if rows would be deleted or updated.
    """
    changed = [table for table in tables if table.deleted or table.updated]
    if session.subscription.origin is OriginPolicy.ANY or not changed:
        return
    raise ReconcileRefused(
        f'subscription "{session.subscription.name}" has origin: none, so rows written on this side'
        " cannot be distinguished from the publisher's: it is not reconciled",
        detail="\n".join(
            f'table "{table.table}": {count_in_words(table.deleted, "row")} would be deleted,'
            f" {table.updated:,} updated"
            for table in changed
        ),
        hint="Nothing was changed. Correct these rows manually; missing rows alone would be inserted.",
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
    return ReconcileRequest(session.subscription, exported, session.dsn, tables, claims, session.report)


def _update_tables(
    request: RefreshRequest, session: SubscriptionSession
) -> tuple[PublishedTables, tuple[QualifiedName, ...], tuple[QualifiedName, ...]]:
    """Add and remove tables as the publications list them; returns the list, added and removed tables."""
    published = read_published_tables_now(request.source.dsn, session)
    if request.reconcile:
        _check_columns(session, published.tables)
    # The new tables' changes must be captured before their rows are copied, or changes in between would be in
    # neither.
    setup_publisher(request.setup, dry_run=False)
    bind_subscription(ChangeLog.open(request.source.change_log), session)
    known = session.known_tables()
    names = {table.name for table in known}
    added = {table: synced for table, synced in published.tables.items() if table not in names}
    # A table dropped on the subscriber is removed; a new one of its name is another table (R7.12).
    removed = tuple(table for table in known if table.name not in published.tables)
    with session.connection.transaction():
        subscription_tables.add_tables(session.connection, session.subscription.name, added)
        for table in removed:
            subscription_tables.remove_table(session.connection, session.subscription.name, table.relation)
    return published, tuple(added), tuple(table.name or table.recorded_name for table in removed)


def _check_columns(session: SubscriptionSession, tables: Mapping[QualifiedName, SyncedTable]) -> None:
    """Also with `copy_data: false`: reconciling inserts rows, so the columns must exist."""
    targets = session.read_targets(tables)
    check_targets({name: synced.columns for name, synced in tables.items()}, targets)


def _warnings(
    source: CaptureSource, session: SubscriptionSession, published: PublishedTables
) -> tuple[str, ...]:
    subscription = session.subscription
    drifts = definition_drifts(
        session.connection, subscription, LogView(source.change_log), published.catalog
    )
    warnings = tuple(map(str, drifts.values()))
    for warning in warnings:
        logger.warning("subscription %s: %s", subscription.name, warning)
    return warnings


def _copy_empty_tables(
    request: RefreshRequest, session: SubscriptionSession, published: PublishedTables
) -> SnapshotResult:
    """Copy new tables that are empty on the subscriber: many readers are faster than one."""
    targets = session.read_targets(published.tables)
    incomplete = [
        name
        for name, table_state in session.table_states().items()
        if isinstance(table_state, Pending | Copying)
    ]
    # Not in the session with the subscription's lock: code of a table's owner could release it.
    with connect(session.dsn, purpose=f"refresh {session.subscription.name}") as connection:
        waiting = [name for name in incomplete if name in targets and not has_rows(connection, targets[name])]
    if not waiting:
        return SnapshotResult.nothing(session.subscription.name)
    options = dataclasses.replace(request.options, tables=tuple(waiting))
    change_log = ChangeLog.open(request.source.change_log)
    return snapshot_session(request.source, change_log, session, options)


def _reconcile(
    request: RefreshRequest, session: SubscriptionSession, names: Repaired | None = None
) -> tuple[Lsn, tuple[TableReconciled, ...]]:
    """Reconcile the subscription's tables, or those of `names`, with one snapshot; returns its LSN too."""
    name, within = session.subscription.name, _buckets(names)
    with _export_for(request.source, session, within) as exported:
        # Again: the publications may have changed since, and the tables' changes must be captured.
        published = read_published_tables(session, exported)
        states = session.table_states()
        subscribed = states if names is None else states.keys() & set(names)
        tables = tuple(synced for table, synced in published.tables.items() if table in subscribed)
        check_captured(published.catalog, session.subscription, tables)
        lsn = exported.consistent_point

        def record(connection: Connection, reconciled: Sequence[TableReconciled]) -> None:
            # Rows of other buckets are still those of an earlier definition.
            whole = [synced for synced in tables if synced.table.name not in within]
            record_copy_definitions(connection, name, lsn, whole)
            if names is None:
                subscription_records.unpark(connection, name)
            recorded = {
                "subscription": name,
                "to_lsn": str(lsn),
                "tables": [table.to_dict() for table in reconciled],
            }
            _check_origin(session, reconciled)
            recorded_results.record_result(connection, name, "reconcile", recorded)

        reconcile_request = _reconcile_request(request, session, exported, published.catalog, tables)
        reconcile_request = dataclasses.replace(
            reconcile_request, lists_keys=names is not None, within=within
        )
        return lsn, reconcile_tables(reconcile_request, record)


def _buckets(names: Repaired | None) -> dict[QualifiedName, Buckets]:
    """The tables of which only some buckets are repaired."""
    return {table: buckets for table, buckets in (names or {}).items() if buckets is not None}


@contextlib.contextmanager
def _export_for(
    source: CaptureSource, session: SubscriptionSession, within: Collection[QualifiedName]
) -> Iterator[ExportedSnapshot]:
    """A snapshot of the publisher, not before the position of any table; those `within` are replayed to it.

    A table that returned to an earlier snapshot would need changes that may have been pruned. Rows that are
    not repaired keep the table's position, so that must be the snapshot's.
    """
    with export_after_applied(source.dsn, session) as exported:
        if within:
            _replay_exactly_to(source, session, within, exported)
        yield exported


def _replay_exactly_to(
    source: CaptureSource,
    session: SubscriptionSession,
    tables: Collection[QualifiedName],
    exported: ExportedSnapshot,
) -> None:
    lsn = exported.consistent_point
    ensure_captured(source, lsn)
    replay_sessions(source, [session], lsn, fence=exported)
    states = session.table_states()
    for table in tables:
        if (state := states.get(table)) != Ready(lsn):
            reason = "it is not in the subscription" if state is None else describe(state)
            raise NotConsistent(
                f'table "{table}" of subscription "{session.subscription.name}" could not be replayed to'
                f" {lsn}, so some of its rows cannot be repaired",
                detail=reason,
            )
