"""Whether a subscriber's table mirrors what is published, or may rightly hold something else (R7.5)."""

from __future__ import annotations

from collections.abc import Sequence

from cdc_replay.model.publication import PublishAction, PublisherCatalog
from cdc_replay.publication.effective_filter import ROW_ACTIONS
from cdc_replay.publication.resolve import SyncedTable, resolve


def why_not_mirrored(
    catalog: PublisherCatalog, publications: Sequence[str], synced: SyncedTable
) -> str | None:
    """None if the subscriber must mirror the filtered table; else why native replication does not (R7.5)."""
    for leaf in synced.leaves:
        published = resolve(catalog, publications, leaf.id)
        if published is None:
            return f"changes of {leaf.name} are not published"
        if missing := [action.value for action in PublishAction if action not in published.actions]:
            return f"the publications do not publish {', '.join(missing)}"
        if any(published.filters[action] != synced.filters for action in ROW_ACTIONS):
            return "its row filters differ between publish actions and the initial copy"
    return None
