"""Which tables the capture publications hold (R2.17, R5.6).

A publication that publishes UPDATE or DELETE for a table makes those statements *fail on the publisher* if
the table has no usable replica identity. So the capture publications must never cover more than the real
ones do: there is one capture publication per publish action, and it holds what the subscribed publications
hold that publish this action:

| a subscribed publication that publishes the action | adds to the action's capture publication             |
|----------------------------------------------------|------------------------------------------------------|
| FOR ALL TABLES                                     | everything                                           |
| FOR TABLES IN SCHEMA s                             | schema s, tables created in it later included        |
| FOR TABLE t                                        | t; for a partitioned table its leaves with it (R2.3) |

Row filters, column lists and `publish_via_partition_root` are left out: the log is unfiltered, in leaf
identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cdc_replay.model.publication import Publication, PublishAction, PublisherCatalog
from cdc_replay.model.relation import QualifiedName


@dataclass(frozen=True, slots=True)
class CaptureMembers:
    """What one capture publication holds; with `all_tables`, `schemas` and `tables` are empty.

    `tables` are to be added with ONLY: inheritance children are members of their own (R2.16).
    """

    all_tables: bool
    schemas: frozenset[str]
    tables: tuple[QualifiedName, ...]
    """In order of name, without repetition."""


def capture_set(
    catalog: PublisherCatalog, publications: Sequence[str]
) -> Mapping[PublishAction, CaptureMembers]:
    """The members of the four capture publications, by the action that each publishes.

    `publications` are the names that the subscriptions of the publisher use; those that do not exist add
    nothing.
    """
    existing = catalog.existing(publications)
    return {
        action: _members(catalog, [publication for publication in existing if action in publication.actions])
        for action in PublishAction
    }


def _members(catalog: PublisherCatalog, publications: Sequence[Publication]) -> CaptureMembers:
    if any(publication.all_tables for publication in publications):
        return CaptureMembers(all_tables=True, schemas=frozenset(), tables=())
    listed = {relation for publication in publications for relation in publication.memberships}
    return CaptureMembers(
        all_tables=False,
        schemas=frozenset().union(*(publication.schemas for publication in publications)),
        tables=tuple(sorted(catalog.tables[relation].name for relation in listed)),
    )
