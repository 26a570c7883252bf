"""The tables that a subscription's publications list, with PostgreSQL's checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.errors import PublisherNotReady
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.postgres.connection import connect
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, import_snapshot
from cdc_replay.publication.capture_coverage import uncaptured_leaves
from cdc_replay.publication.resolve import SyncedTable, synced_tables
from cdc_replay.publication.restrictions import check_publications
from cdc_replay.subscriber.session import SubscriptionSession
from cdc_replay.subscriber.target_checks import check_targets


@dataclass(frozen=True, slots=True)
class PublishedTables:
    """The tables that the publications list, by name, and the catalog that this is read from."""

    catalog: PublisherCatalog
    tables: Mapping[QualifiedName, SyncedTable]


def read_published_tables(session: SubscriptionSession, exported: ExportedSnapshot) -> PublishedTables:
    """Read the tables of the subscription's publications as of the snapshot, with PostgreSQL's checks."""
    with import_snapshot(exported, purpose="catalog") as connection:
        return _check_published_tables(session, read_catalog(connection, exported.consistent_point))


def read_published_tables_now(publisher_dsn: str, session: SubscriptionSession) -> PublishedTables:
    """The same as of now, without the wait of an exported snapshot for open transactions (R1.34)."""
    with connect(publisher_dsn, purpose="catalog") as connection:
        return _check_published_tables(session, read_catalog(connection))


def _check_published_tables(session: SubscriptionSession, catalog: PublisherCatalog) -> PublishedTables:
    publications = session.subscription.publications
    check_publications(catalog, publications)
    synced = {table.table.name: table for table in synced_tables(catalog, publications)}
    targets = session.read_targets(synced)
    # Without a copy only the tables must exist: a missing column is reported at the first change (R8.1).
    is_copied = session.subscription.copy_data
    check_targets({name: table.columns if is_copied else () for name, table in synced.items()}, targets)
    return PublishedTables(catalog, synced)


def check_captured(
    catalog: PublisherCatalog, subscription: Subscription, tables: Sequence[SyncedTable]
) -> None:
    """Check that changes of these tables are captured: otherwise they would silently fall behind.

    Raises:
        PublisherNotReady: naming the leaves that are not captured.
    """
    missing = uncaptured_leaves(catalog, subscription, tables)
    if missing:
        raise PublisherNotReady(
            f'changes that subscription "{subscription.name}" needs are not captured yet',
            detail=f"No capture publication carries {', '.join(missing)}.",
            hint=f"Run `cdc-replay setup {subscription.publisher}`: it updates the capture publications.",
            rule="R2.3",
        )
