"""`snapshot`: initial sync of the tables that need it, or a resync of named ones.

A snapshot is (LSN, data): the publisher's catalog and rows are read under one exported snapshot, whose
consistent point becomes the tables' applied LSN. The change log must reach back to that point, so the slot
comes first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.opened import Opened, opened
from cdc_replay.commands.results import SnapshotResult, TableCopied
from cdc_replay.commands.spark_errors import translated_spark_errors
from cdc_replay.config import Config
from cdc_replay.errors import SubscriberNotReady
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Pending, Ready, TableState
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, export_snapshot, import_snapshot
from cdc_replay.publication.resolve import SyncedTable, synced_tables
from cdc_replay.publication.restrictions import check_publications
from cdc_replay.snapshot.load import CopiedTable, SnapshotRequest, load_tables
from cdc_replay.spark_session import spark_session
from cdc_replay.subscriber import state
from cdc_replay.subscriber.tables import check_targets, read_target_tables

log = logging.getLogger(__name__)

Progress = Callable[[QualifiedName, int, int], None]
"""Called with a table, and its rows and bytes so far."""


def snapshot(
    config: Config,
    subscription: str,
    *,
    tables: Sequence[QualifiedName] = (),
    progress: Progress | None = None,
) -> SnapshotResult:
    """Copy every table that is not ready, or copy `tables` again, replacing their rows.

    Raises:
        ChangeLogMissing: before `setup` of the publisher.
        PublicationRefused: where PostgreSQL refuses these publications.
        SubscriberNotReady: listing every table and column that the subscriber lacks.
    """
    with opened(config, subscription, "snapshot") as at_work:
        return snapshot_opened(config, at_work, tables=tables, progress=progress)


def snapshot_opened(
    config: Config,
    at_work: Opened,
    *,
    tables: Sequence[QualifiedName] = (),
    progress: Progress | None = None,
) -> SnapshotResult:
    """`snapshot` for a subscription whose lock the caller holds."""
    began = time.monotonic()
    publisher = config.publisher(at_work.subscription.publisher)
    change_log = ChangeLog.open(publisher.change_log)
    state.remember_subscription(
        at_work.connection,
        at_work.subscription.name,
        change_log.header.system_identifier,
        at_work.subscription.publications,
    )
    states = at_work.table_states()
    if states and not tables and all(isinstance(each, Ready) for each in states.values()):
        return SnapshotResult(at_work.subscription.name, None, None, time.monotonic() - began, 0, 0, ())
    with export_snapshot(config.dsn_of(publisher)) as exported:
        failpoint("snapshot.after_export")
        copied = _copy(at_work, exported, tables, states, progress)
    return SnapshotResult(
        subscription=at_work.subscription.name,
        from_lsn=exported.consistent_point,
        to_lsn=exported.consistent_point,
        seconds=time.monotonic() - began,
        rows=sum(table.rows for table in copied),
        bytes=sum(table.bytes for table in copied),
        tables=tuple(TableCopied(str(each.name), each.rows, each.bytes, each.seconds) for each in copied),
    )


def _copy(
    at_work: Opened,
    exported: ExportedSnapshot,
    tables: Sequence[QualifiedName],
    states: Mapping[QualifiedName, TableState],
    progress: Progress | None,
) -> tuple[CopiedTable, ...]:
    name = at_work.subscription.name
    wanted = _tables_to_copy(at_work, published_tables(at_work, exported), tables, states)
    if not at_work.subscription.copy_data and not tables:
        for table in wanted:
            state.set_table_state(
                at_work.connection, name, table.table.name, Ready(exported.consistent_point)
            )
        return ()
    request = SnapshotRequest(
        subscription=name,
        snapshot=exported,
        subscriber_dsn=at_work.dsn,
        tables=wanted,
        replace=bool(tables),
    )
    with translated_spark_errors(f'snapshot of subscription "{name}"'):
        return load_tables(spark_session("cdc-replay"), request, progress=progress)


def published_tables(at_work: Opened, exported: ExportedSnapshot) -> dict[QualifiedName, SyncedTable]:
    """What the subscription's publications publish as of the snapshot, checked as PostgreSQL checks it."""
    publications = at_work.subscription.publications
    with import_snapshot(exported, purpose="catalog") as connection:
        catalog = read_catalog(connection, exported.consistent_point)
    check_publications(catalog, publications)
    found = {each.table.name: each for each in synced_tables(catalog, publications)}
    targets = read_target_tables(at_work.connection, tuple(found))
    check_targets({name: each.columns for name, each in found.items()}, targets)
    return found


def _tables_to_copy(
    at_work: Opened,
    published: Mapping[QualifiedName, SyncedTable],
    named: Sequence[QualifiedName],
    states: Mapping[QualifiedName, TableState],
) -> tuple[SyncedTable, ...]:
    if unknown := [str(each) for each in named if each not in published]:
        raise SubscriberNotReady(
            f'subscription "{at_work.subscription.name}" has no table {", ".join(unknown)}',
            detail=f"Its publications have: {', '.join(map(str, sorted(published))) or 'none'}.",
        )
    if named:
        return tuple(published[each] for each in named)
    if not states:
        enter_tables(at_work, published)
        return tuple(published.values())
    # A table that entered a publication later is not in the subscription before a refresh (R7.12).
    return tuple(each for name, each in published.items() if name in states and not _is_ready(states[name]))


def _is_ready(found: TableState) -> bool:
    return isinstance(found, Ready)


def enter_tables(at_work: Opened, published: Mapping[QualifiedName, SyncedTable]) -> None:
    """Take tables into the subscription: from now on they wait for their snapshot."""
    for name in published:
        state.set_table_state(at_work.connection, at_work.subscription.name, name, Pending())


def snapshot_lsn(result: SnapshotResult, otherwise: Lsn) -> Lsn:
    """The consistent point of a snapshot, or `otherwise` where nothing was copied."""
    return result.to_lsn if result.to_lsn is not None else otherwise
