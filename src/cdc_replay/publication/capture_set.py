"""Which tables the capture publications contain (R2.17, R5.6).

A publication for UPDATE or DELETE makes those statements *fail on the publisher* if the table has no usable
replica identity. So the capture publications must never cover more than the subscribed ones. There is one
capture publication per publish action, with the contents of the subscribed publications for this action:

| a subscribed publication that publishes the action | adds to the action's capture publication             |
|----------------------------------------------------|------------------------------------------------------|
| FOR ALL TABLES                                     | everything                                           |
| FOR ALL TABLES EXCEPT … (R2.18)                    | everything but what no subscribed one publishes      |
| FOR TABLES IN SCHEMA s                             | schema s, tables created in it later included        |
| FOR TABLE t                                        | t; for a partitioned table its leaves with it (R2.3) |

Tables published for UPDATE are also captured for INSERT, which makes no statement fail. Otherwise a new row
with a reused key could not be distinguished from the old one, and unchanged TOAST values not be proved (R4.6,
`replay.toast`).

Row filters, column lists and `publish_via_partition_root` are left out: the log is unfiltered, in leaf
identity.

Leaf identity does not distinguish TRUNCATE of a partitioned table from TRUNCATE of its leaves (R2.14). So
*root publications* publish TRUNCATE alone, via root, for the partitioned tables that the subscribed
publications publish under their own identity. TRUNCATE alone makes no statement fail (R2.17). There is one
root publication per depth in the partition tree, because an ancestor hides the tables below it in the same
publication (R2.5, R2.13). The first one, of the roots, contains schemas and all tables if a subscribed
publication via root does, so that new tables are included at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.model.publication import Publication, PublishAction, PublisherCatalog, Table
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.publication.partition_root import contains, excepts, publishes

CAPTURE_PUBLICATIONS: Final[Mapping[PublishAction, str]] = {
    PublishAction.INSERT: "cdc_replay_capture_i",
    PublishAction.UPDATE: "cdc_replay_capture_u",
    PublishAction.DELETE: "cdc_replay_capture_d",
    PublishAction.TRUNCATE: "cdc_replay_capture_t",
}
"""The publications of the change stream: leaf identity, unfiltered."""

ROOT_DEPTHS: Final = 4
"""The number of root publications: for roots, their partitions, and two levels below."""

CAUSES: Final[Mapping[PublishAction, frozenset[PublishAction]]] = {
    PublishAction.INSERT: frozenset({PublishAction.INSERT, PublishAction.UPDATE}),
    PublishAction.UPDATE: frozenset({PublishAction.UPDATE}),
    PublishAction.DELETE: frozenset({PublishAction.DELETE}),
    PublishAction.TRUNCATE: frozenset({PublishAction.TRUNCATE}),
}
"""The published actions of a table that require capturing an action."""


@dataclass(frozen=True, slots=True)
class CaptureMembers:
    """The contents of one capture publication; with `all_tables`, `schemas` and `tables` are empty.

    `tables` are added with ONLY: inheritance children are separate members (R2.16). `exceptions` are the
    tables of EXCEPT.
    """

    all_tables: bool
    schemas: frozenset[str]
    tables: tuple[QualifiedName, ...]
    """In order of name, without repetition."""
    exceptions: tuple[QualifiedName, ...] = ()
    """In order of name, without repetition (R2.18)."""


def capture_set(
    catalog: PublisherCatalog, publications: Sequence[str]
) -> Mapping[PublishAction, CaptureMembers]:
    """The members of the four capture publications, by the action that each publishes.

    `publications` are the names in all subscriptions of the publisher; missing publications add nothing.
    """
    existing = catalog.existing(publications)
    return {
        action: _members(catalog, [publication for publication in existing if causes & publication.actions])
        for action, causes in CAUSES.items()
    }


def _members(catalog: PublisherCatalog, publications: Sequence[Publication]) -> CaptureMembers:
    if any(publication.all_tables for publication in publications):
        return CaptureMembers(
            all_tables=True, schemas=frozenset(), tables=(), exceptions=_exceptions(catalog, publications)
        )
    listed = {relation for publication in publications for relation in publication.memberships}
    return CaptureMembers(
        all_tables=False,
        schemas=frozenset().union(*(publication.schemas for publication in publications)),
        tables=tuple(sorted(catalog.tables[relation].name for relation in listed)),
    )


def _exceptions(catalog: PublisherCatalog, publications: Sequence[Publication]) -> tuple[QualifiedName, ...]:
    """Exceptions of which none of `publications` publishes anything, partitions included (R2.18)."""
    excepted = {relation for publication in publications for relation in publication.exceptions}
    return tuple(
        sorted(
            catalog.tables[relation].name
            for relation in excepted
            if not any(_publishes_of(catalog, publication, relation) for publication in publications)
        )
    )


def _publishes_of(catalog: PublisherCatalog, publication: Publication, relation: RelationId) -> bool:
    """Whether the publication publishes the table, or a table of its partition tree."""
    families = ((table, catalog.ancestors(table.id)) for table in catalog.tables.values())
    return any(
        publishes(publication, table, ancestors)
        for table, ancestors in families
        if relation in {member.id for member in (table, *ancestors)}
    )


def root_set(catalog: PublisherCatalog, publications: Sequence[str]) -> tuple[CaptureMembers, ...]:
    """The members of the root publications by depth, the number of a table's ancestors (R2.14).

    Routing decides which subscriptions get a TRUNCATE of a member, if any.
    """
    roots = tuple(_published_roots(catalog, publications))
    truncating = _truncating(catalog, publications)
    all_tables = any(publication.all_tables for publication in truncating)
    exceptions = _exceptions(catalog, truncating) if all_tables else ()
    schemas = frozenset().union(*(publication.schemas for publication in truncating))
    listed = [
        sorted(table.name for table in roots if len(catalog.ancestors(table.id)) == depth)
        for depth in range(ROOT_DEPTHS)
    ]
    topmost = [] if all_tables else [name for name in listed[0] if name.schema not in schemas]
    return (
        CaptureMembers(all_tables, frozenset() if all_tables else schemas, tuple(topmost), exceptions),
        *(CaptureMembers(all_tables=False, schemas=frozenset(), tables=tuple(names)) for names in listed[1:]),
    )


def roots_too_deep(catalog: PublisherCatalog, publications: Sequence[str]) -> tuple[QualifiedName, ...]:
    """Published partitioned tables with too many ancestors for any root publication."""
    roots = _published_roots(catalog, publications)
    return tuple(sorted(table.name for table in roots if len(catalog.ancestors(table.id)) >= ROOT_DEPTHS))


def _published_roots(catalog: PublisherCatalog, publications: Sequence[str]) -> Iterator[Table]:
    """Partitioned tables published under their own identity (R2.4), with TRUNCATE (R2.7)."""
    via_root = [publication for publication in catalog.existing(publications) if publication.via_root]
    truncating = _truncating(catalog, publications)
    for table in catalog.tables.values():
        if not table.is_partitioned or not table.is_publishable:
            continue
        ancestors = catalog.ancestors(table.id)
        is_topmost = any(
            contains(publication, table)
            and not any(contains(publication, ancestor) for ancestor in ancestors)
            and not excepts(publication, table, ancestors)
            for publication in via_root
        )
        if is_topmost and any(publishes(publication, table, ancestors) for publication in truncating):
            yield table


def _truncating(catalog: PublisherCatalog, publications: Sequence[str]) -> tuple[Publication, ...]:
    """The publications that publish TRUNCATE of partitioned tables (R2.11)."""
    return tuple(
        publication
        for publication in catalog.existing(publications)
        if publication.via_root and PublishAction.TRUNCATE in publication.actions
    )
