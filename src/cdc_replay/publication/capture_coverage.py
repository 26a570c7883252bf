"""What a subscription needs of its publisher, and the log does not get."""

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
    """Whether the log gets the action's changes of a leaf."""
    publication = catalog.publications.get(CAPTURE_PUBLICATIONS[action])
    return publication is not None and publishes(publication, table, catalog.ancestors(table.id))


def uncaptured_leaves(
    catalog: PublisherCatalog, subscription: Subscription, tables: Iterable[SyncedTable]
) -> list[str]:
    """The leaves of these tables of which no capture publication carries a published action, with it."""
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
    """Why changes of `tables`, those of the subscription, do not come to it: one sentence each."""
    for name in missing_publications(catalog, subscription.publications):
        yield f'publication "{name}" does not exist: what only it publishes does not arrive [R1.19]'
    try:
        synced = synced_tables(catalog, subscription.publications)
        missing = uncaptured_leaves(
            catalog, subscription, (each for each in synced if each.table.name in tables)
        )
    except PublicationRefused:
        return  # replay says why
    if missing:
        yield (
            f"changes of {', '.join(missing)} are not captured: run"
            f" `cdc-replay setup {subscription.publisher}`, then"
            f" `cdc-replay refresh {subscription.name} --reconcile` [R2.3]"
        )
