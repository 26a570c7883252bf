"""Which row filter applies to each publish action (R3.2-R3.7).

Only the effective publications (those at the highest level, `partition_root`) count, each only for the
actions that it publishes, and only with its filter for the *published relation*:

| effective publications that publish the action | filter of the action                              |
|------------------------------------------------|---------------------------------------------------|
| one of them has no filter                      | none: every row passes (R3.4)                     |
| all of them have a filter                      | their OR, in the order of the set (R3.5, R3.8)    |
| there is none (a lower level publishes it)     | none: every row passes (R3.6)                     |

A publication has no filter for a table if it is FOR ALL TABLES, names the table's own schema, does not list
the table itself, or lists it without WHERE.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from cdc_replay.model.publication import Publication, PublishAction, RowFilter, Table

ROW_ACTIONS: Final = (PublishAction.INSERT, PublishAction.UPDATE, PublishAction.DELETE)
"""The actions that row filters apply to; TRUNCATE ignores them (R3.12)."""


def filter_in(publication: Publication, table: Table) -> RowFilter | None:
    """The publication's filter for the table itself, None if it has none (R3.4, R3.7)."""
    if publication.all_tables or table.name.schema in publication.schemas:
        return None
    membership = publication.memberships.get(table.id)
    if membership is None or membership.row_filter is None:
        return None
    return dataclasses.replace(membership.row_filter, publication=publication.name)


def effective_filters(
    effective: Sequence[Publication], table: Table
) -> Mapping[PublishAction, tuple[RowFilter, ...] | None]:
    """Per row action the filters to OR, None where every row passes (R3.4-R3.6).

    `table` is the published relation.
    """
    return {
        action: any_of(
            filter_in(publication, table) for publication in effective if action in publication.actions
        )
        for action in ROW_ACTIONS
    }


def any_of(filters: Iterable[RowFilter | None]) -> tuple[RowFilter, ...] | None:
    """The filters to OR, without duplicates; None (every row passes) if one is None or there is none."""
    distinct: dict[RowFilter, None] = {}
    for row_filter in filters:
        if row_filter is None:
            return None
        distinct[row_filter] = None
    return tuple(distinct) or None
