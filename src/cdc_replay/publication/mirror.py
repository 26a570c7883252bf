"""Whether a subscriber's table mirrors what is published, or may rightly hold something else (R7.5).

Its rows as a whole, or only the values of those rows that both sides have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cdc_replay.model.publication import PublishAction, PublisherCatalog
from cdc_replay.publication.effective_filter import ROW_ACTIONS
from cdc_replay.publication.resolve import SyncedTable, resolve

_WRITING: Final = (PublishAction.INSERT, PublishAction.UPDATE)
"""The actions that bring values."""


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


def why_values_may_differ(
    catalog: PublisherCatalog, publications: Sequence[str], synced: SyncedTable
) -> str | None:
    """None if a row that both sides have must have the same values; else why it need not natively.

    A DELETE or TRUNCATE that is not published leaves rows, and changes no values.
    """
    for leaf in synced.leaves:
        published = resolve(catalog, publications, leaf.id)
        if published is None:
            return f"changes of {leaf.name} are not published"
        if missing := [action.value for action in _WRITING if action not in published.actions]:
            return f"the publications do not publish {', '.join(missing)}"
        if any(published.filters[action] != synced.filters for action in _WRITING):
            return "its row filters differ between publish actions and the initial copy"
        if published.table.id != synced.table.id:
            return f"changes of {leaf.name} are published as those of {published.table.name}"
        if set(published.columns) != set(synced.columns):
            return "its columns differ between changes and the initial copy"
    return None
