"""Whether the log gets a table's changes."""

from __future__ import annotations

from cdc_replay.capture.publications import CAPTURE_PUBLICATIONS
from cdc_replay.model.publication import PublishAction, PublisherCatalog, Table
from cdc_replay.publication.partition_root import contains


def is_captured(catalog: PublisherCatalog, table: Table, action: PublishAction) -> bool:
    """Whether the log gets the action's changes of a leaf."""
    publication = catalog.publications.get(CAPTURE_PUBLICATIONS[action])
    family = (table, *catalog.ancestors(table.id))
    return publication is not None and any(contains(publication, each) for each in family)
