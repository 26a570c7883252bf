"""Which tables a row can be in: the named one, the one as which it is published, and partitions; pure.

A table is named as the publisher has it, or as the subscriber has it if both sides were renamed alike: the
published table, or a partition. Partitions that were dropped or detached since are included, because the log
has their changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.publication import PublisherCatalog, Table
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.model.suggestion import did_you_mean
from cdc_replay.publication.partition_root import partition_root


@dataclass(frozen=True, slots=True)
class RowTable:
    """`table` is the table as which the rows are published in `catalog`, or the named one.

    `leaf` is a table that stores its rows, `leaves` are all of them, at any time, `truncated` also the
    partitioned tables above them. `names` are the names under which they were published at any time.
    """

    catalog: PublisherCatalog
    table: Table
    leaf: RelationId
    leaves: frozenset[RelationId]
    truncated: frozenset[RelationId]
    names: frozenset[QualifiedName]
    target: QualifiedName
    is_published: bool

    @property
    def key(self) -> tuple[str, ...]:
        """The columns by which its rows are found in the log; empty if it has no key."""
        leaf = self.catalog.tables[self.leaf]
        keys = (leaf.key_columns, self.table.key_columns, self.table.primary_key, leaf.primary_key)
        return next((key for key in keys if key), ())

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of its columns."""
        return tuple(column.name for column in self.table.columns)


def find_table(
    name: QualifiedName,
    catalogs: Sequence[PublisherCatalog],
    publications: Sequence[str],
    renamed: Mapping[RelationId, QualifiedName],
) -> RowTable:
    """The table of that name; `catalogs` are in order, and the last one that has it counts.

    Raises:
        InvalidConfiguration: if no catalog has it.
    """
    catalog, named = _last_with(name, catalogs, renamed)
    leaf = next(iter(_leaves_below(catalog, named)), named.id)
    root = partition_root(catalog, catalog.existing(publications), leaf)
    table = named if root is None else root.table
    family = frozenset(_family({named.id, table.id}, catalogs))
    partitioned = {
        relation
        for catalog_then in catalogs
        for relation in family & catalog_then.tables.keys()
        if catalog_then.tables[relation].is_partitioned
    }
    ancestors = {above.id for above in catalog.ancestors(table.id)}
    leaves = family - partitioned
    return RowTable(
        catalog=catalog,
        table=table,
        leaf=leaf,
        leaves=leaves,
        truncated=family | ancestors,
        names=frozenset(_published_names(catalogs, publications, leaves, renamed)),
        target=renamed.get(table.id, table.name),
        is_published=root is not None,
    )


def _last_with(
    name: QualifiedName, catalogs: Sequence[PublisherCatalog], renamed: Mapping[RelationId, QualifiedName]
) -> tuple[PublisherCatalog, Table]:
    wanted = {relation for relation, renamed_to in renamed.items() if renamed_to == name}
    for catalog in reversed(catalogs):
        for table in catalog.tables.values():
            if table.name == name or table.id in wanted:
                return catalog, table
    known = {str(table.name) for catalog in catalogs for table in catalog.tables.values()}
    raise InvalidConfiguration(
        f'the publisher has no table "{name}"',
        hint=did_you_mean(str(name), sorted(known))
        or "Give the published table, or a partition of it; `cdc-replay explain` lists them.",
    )


def _leaves_below(catalog: PublisherCatalog, table: Table) -> Iterator[RelationId]:
    if not table.is_partitioned:
        return
    for other in sorted(catalog.tables.values(), key=lambda other: other.name):
        if not other.is_partitioned and table.id in {above.id for above in catalog.ancestors(other.id)}:
            yield other.id


def _family(roots: set[RelationId], catalogs: Iterable[PublisherCatalog]) -> set[RelationId]:
    """The tables, and those below them in any of the catalogs."""
    family = set(roots)
    for catalog in catalogs:
        for relation in catalog.tables:
            if relation not in family and roots & {above.id for above in catalog.ancestors(relation)}:
                family.add(relation)
    return family


def _published_names(
    catalogs: Iterable[PublisherCatalog],
    publications: Sequence[str],
    leaves: Iterable[RelationId],
    renamed: Mapping[RelationId, QualifiedName],
) -> Iterator[QualifiedName]:
    listed = sorted(leaves)
    for catalog in catalogs:
        existing = catalog.existing(publications)
        for leaf in listed:
            if leaf in catalog.tables and (root := partition_root(catalog, existing, leaf)) is not None:
                yield renamed.get(root.table.id, root.table.name)
