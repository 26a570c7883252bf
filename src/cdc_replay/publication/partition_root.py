"""Which relation a change is published as (R2.2-R2.7, R2.11).

A row changes in a leaf. Each publication that publishes the leaf determines an identity for the change: the
leaf's own (level 0), or, with `publish_via_partition_root`, that of the highest ancestor it contains (level =
distance from the leaf). The highest level wins for the whole set. The publications at that level are the
*effective* ones: only their row filters and column lists count. The publish actions of all publications
count.

| set                                          | level | effective  | published as |
|----------------------------------------------|-------|------------|--------------|
| p: root, via root                            | 1     | p          | root         |
| p: root, not via root                        | 0     | p          | leaf         |
| p: root, via root; q: leaf                   | 1     | p          | root         |
| p: all tables, not via root; q: root, via    | 1     | q          | root (R2.9)  |
| p: root, via root; q: all tables, via root   | 1     | p and q    | root         |

PostgreSQL implements this in `get_rel_sync_entry` (pgoutput.c).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cdc_replay.model.publication import STATE_SCHEMA, Publication, PublishAction, PublisherCatalog, Table
from cdc_replay.model.relation import RelationId


@dataclass(frozen=True, slots=True)
class PartitionRoot:
    """Under whose identity a relation's changes are published, and by which publications."""

    table: Table
    """The published relation: the relation itself or one of its ancestors."""
    level: int
    """0 for the relation itself, 1 for its parent, and so on."""
    effective: tuple[Publication, ...]
    """The publications at that level, in the order of the set (R2.6)."""
    lower: tuple[Publication, ...]
    """The other publications of the relation: only their actions count (R2.7)."""

    @property
    def actions(self) -> frozenset[PublishAction]:
        """What is published for the relation by any publication of the set (R2.7)."""
        return actions_of((*self.effective, *self.lower))


def actions_of(publications: Iterable[Publication]) -> frozenset[PublishAction]:
    """The publish actions of any of them."""
    return frozenset(action for publication in publications for action in publication.actions)


def contains(publication: Publication, table: Table) -> bool:
    """Whether the publication lists the table, lists its own schema, or is FOR ALL TABLES (R2.2).

    Partitions of a table in EXCEPT are excluded by `excepts` (R2.18). ALL TABLES excludes this project's own
    tables, as PostgreSQL's excludes system catalogs.
    """
    if (membership := publication.memberships.get(table.id)) is not None:
        return not membership.is_exception
    if table.name.schema in publication.schemas:
        return True
    return publication.all_tables and table.name.schema != STATE_SCHEMA


def excepts(publication: Publication, table: Table, ancestors: Iterable[Table]) -> bool:
    """Whether the table or the root of its partition tree is in EXCEPT (R2.18).

    Then the publication does not publish it under any identity.
    """
    memberships = (publication.memberships.get(candidate.id) for candidate in (table, *ancestors))
    return any(membership is not None and membership.is_exception for membership in memberships)


def publishes(publication: Publication, table: Table, ancestors: Sequence[Table]) -> bool:
    """Whether the publication contains the table or one of its ancestors (R2.3), and excepts none (R2.18)."""
    is_contained = any(contains(publication, candidate) for candidate in (table, *ancestors))
    return is_contained and not excepts(publication, table, ancestors)


def level_in(publication: Publication, table: Table, ancestors: Sequence[Table]) -> int | None:
    """The level at which the publication publishes the table, None if it does not (R2.3, R2.4, R2.11, R2.18).

    `ancestors` are in order from the parent to the root.
    """
    if (table.is_partitioned and not publication.via_root) or excepts(publication, table, ancestors):
        return None
    levels = [
        level for level, candidate in enumerate((table, *ancestors)) if contains(publication, candidate)
    ]
    if not levels:
        return None
    return levels[-1] if publication.via_root else 0


def partition_root(
    catalog: PublisherCatalog, publications: Sequence[Publication], relation: RelationId
) -> PartitionRoot | None:
    """How the set publishes changes of `relation`, None if it does not (R2.3-R2.7).

    `relation` is a leaf, or, for TRUNCATE, a partitioned table, which only publications via root publish.
    """
    table = catalog.tables[relation]
    if not table.is_publishable:
        return None
    ancestors = catalog.ancestors(relation)
    levels = [(publication, level_in(publication, table, ancestors)) for publication in publications]
    highest = max((level for _, level in levels if level is not None), default=None)
    if highest is None:
        return None
    return PartitionRoot(
        table=(table, *ancestors)[highest],
        level=highest,
        effective=tuple(publication for publication, level in levels if level == highest),
        lower=tuple(publication for publication, level in levels if level is not None and level < highest),
    )
