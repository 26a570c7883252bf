"""What each publication of a subscription contributes to the fate of a change; pure.

`publication.resolve` says what a set of publications does together. Here the set is listed one by one, by the
same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cdc_replay.model.explained_row import Answer, Clause, ClauseRole
from cdc_replay.model.publication import Publication, PublishAction, PublisherCatalog, RowFilter
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.publication.effective_filter import filter_in
from cdc_replay.publication.partition_root import PartitionRoot, partition_root


@dataclass(frozen=True, slots=True)
class PublicationPart:
    """One publication's part; `row_filter` is its clause if that counts."""

    publication: str
    role: ClauseRole
    row_filter: RowFilter | None = None

    def to_clause(
        self, old: Answer | None = None, new: Answer | None = None, error: str | None = None
    ) -> Clause:
        """The part with the values of its row filter."""
        text = None if self.row_filter is None else self.row_filter.sql
        return Clause(self.publication, self.role, text, old, new, error)


def publication_parts(
    catalog: PublisherCatalog, publications: Sequence[str], leaf: RelationId, action: PublishAction
) -> tuple[PublicationPart, ...]:
    """The parts of the named publications in changes of this kind to a leaf, in the order given."""
    root = partition_root(catalog, catalog.existing(publications), leaf)
    return tuple(_part(catalog, name, root, action) for name in dict.fromkeys(publications))


def copy_parts(
    catalog: PublisherCatalog, publications: Sequence[str], leaf: RelationId
) -> tuple[PublicationPart, ...]:
    """The parts of the named publications in a copy of a row, which ignores the publish actions (R7.3)."""
    root = partition_root(catalog, catalog.existing(publications), leaf)
    return tuple(_part(catalog, name, root, None) for name in dict.fromkeys(publications))


def _part(
    catalog: PublisherCatalog, name: str, root: PartitionRoot | None, action: PublishAction | None
) -> PublicationPart:
    publication = catalog.publications.get(name)
    if publication is None:
        return PublicationPart(name, ClauseRole.MISSING)
    if root is None or publication not in (*root.effective, *root.lower):
        return PublicationPart(name, ClauseRole.NOT_LISTED)
    if action is not None and action not in publication.actions:
        return PublicationPart(name, ClauseRole.OTHER_ACTIONS)
    if publication in root.lower:
        return PublicationPart(name, ClauseRole.LOWER_LEVEL)
    row_filter = None if action is PublishAction.TRUNCATE else filter_in(publication, root.table)
    role = ClauseRole.EVERY_ROW if row_filter is None else ClauseRole.FILTER
    return PublicationPart(name, role, row_filter)


def why_published_as(root: PartitionRoot, leaf: QualifiedName) -> str:
    """Under which name changes of the leaf are published, and which publications decide that (R2.4-R2.6)."""
    names = _listed(root.effective)
    if root.level == 0:
        return f"changes of the table are published under its own name, by {names}"
    verb = "has" if len(root.effective) == 1 else "have"
    return (
        f"changes of partition {leaf} are published as those of {root.table.name}, because {names} {verb}"
        " publish_via_partition_root (R2.4)"
    )


def _listed(publications: Sequence[Publication]) -> str:
    names = ", ".join(f'"{publication.name}"' for publication in publications)
    return f"publication{'s' if len(publications) > 1 else ''} {names}"
