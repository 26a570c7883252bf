"""Whether the change log gets what a subscription needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from cdc_replay.errors import PublicationRefused
from cdc_replay.model.publication import PublishAction, PublisherCatalog, Table
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS
from cdc_replay.publication.partition_root import publishes
from cdc_replay.publication.resolve import SyncedTable, resolve, synced_tables
from cdc_replay.publication.restrictions import missing_publications


def is_captured(catalog: PublisherCatalog, table: Table, action: PublishAction) -> bool:
    """Whether changes of this kind to a leaf are captured."""
    publication = catalog.publications.get(CAPTURE_PUBLICATIONS[action])
    return publication is not None and publishes(publication, table, catalog.ancestors(table.id))


def uncaptured_leaves(
    catalog: PublisherCatalog, subscription: Subscription, tables: Iterable[SyncedTable]
) -> list[str]:
    """The leaves of these tables with a published action that no capture publication has, and the action."""
    return sorted(
        f"{leaf.name} ({action.value})"
        for table in tables
        for leaf in table.leaves
        if (published := resolve(catalog, subscription.publications, leaf.id)) is not None
        for action in PublishAction
        if action in published.actions and not is_captured(catalog, leaf, action)
    )


def capture_warnings(
    catalog: PublisherCatalog, subscription: Subscription, tables: Collection[QualifiedName]
) -> Iterator[str]:
    """Why changes of `tables`, those of the subscription, do not arrive: one sentence each."""
    for name in missing_publications(catalog, subscription.publications):
        yield (
            f'publication "{name}" does not exist: changes that only it publishes do not arrive; create it on'
            f" the publisher, or correct `publications` of subscription {subscription.name} [R1.19]"
        )
    if not _lacks_any(catalog, tables):
        return
    try:
        synced = synced_tables(catalog, subscription.publications)
        missing = uncaptured_leaves(
            catalog, subscription, (table for table in synced if table.table.name in tables)
        )
    except PublicationRefused:
        return  # replay reports it
    if missing:
        yield (
            f"changes of {', '.join(missing)} are not captured: run"
            f" `cdc-replay setup {subscription.publisher}`, then"
            f" `cdc-replay refresh {subscription.name} --reconcile` [R2.3]"
        )


def _lacks_any(catalog: PublisherCatalog, tables: Collection[QualifiedName]) -> bool:
    """Whether some change of these tables or their leaves is not captured, published or not: a quick look."""
    return any(
        not is_captured(catalog, table, action)
        for table in catalog.tables.values()
        if table.name in tables or any(above.name in tables for above in catalog.ancestors(table.id))
        for action in PublishAction
    )
