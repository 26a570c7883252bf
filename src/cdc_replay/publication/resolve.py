"""What a set of publications publishes: per leaf for the change stream, per table for the initial copy.

The two differ, as in PostgreSQL (R7.5): the initial copy ignores the publish actions (R7.3).

|                        | change stream: `PublishedRelation` | initial copy: `SyncedTable`       |
|------------------------|------------------------------------|-----------------------------------|
| one per                | leaf                               | table that the subscription lists |
| effective publications | those at the highest level         | those that list this very table   |
| row filter             | one OR per publish action          | one OR                            |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.model.publication import Publication, PublishAction, PublisherCatalog, RowFilter, Table
from cdc_replay.model.relation import RelationId
from cdc_replay.publication.column_list import POSTGRES_18, in_order, published_columns, unlisted_columns
from cdc_replay.publication.effective_filter import ROW_ACTIONS, any_of, effective_filters, filter_in
from cdc_replay.publication.partition_root import contains, excepts, partition_root


@dataclass(frozen=True, slots=True)
class PublishedRelation:
    """How the changes of one leaf are published to a subscription."""

    leaf: RelationId
    table: Table
    """The published relation: the leaf or one of its ancestors."""
    actions: frozenset[PublishAction]
    filters: Mapping[PublishAction, tuple[RowFilter, ...] | None]
    """For INSERT, UPDATE and DELETE: the filters to OR in this order; None: every row passes."""
    columns: tuple[str, ...]
    """The published columns, in attribute-number order of `table`."""


@dataclass(frozen=True, slots=True)
class SyncedTable:
    """A table that the subscription lists, and its initial copy."""

    table: Table
    leaves: tuple[Table, ...]
    """The tables that store its rows, in order of name; the table itself unless it is partitioned."""
    filters: tuple[RowFilter, ...] | None
    """The filters to OR; None: every row is copied."""
    columns: tuple[str, ...]
    """The columns to copy, in attribute-number order of `table`."""
    unpublished: tuple[str, ...] = ()
    """Additional columns of the initial copy, if the target has them.

    If all columns of a table are generated and not published, its list of published columns is empty.
    PostgreSQL 18 (pg_get_publication_tables) returns NULL for it, "no list": the copy has all columns, the
    change stream none.
    """


def resolve(
    catalog: PublisherCatalog, publications: Sequence[str], leaf: RelationId
) -> PublishedRelation | None:
    """How changes of `leaf` are published by the set, None if they are not (R2.1-R2.9, R3.2-R3.7, R6.3-R6.9).

    Publications that do not exist contribute nothing (18; R1.19), see `restrictions.missing_publications`.
    For a partitioned table as `leaf`, the result is valid for TRUNCATE (R2.11, R2.13).

    Raises:
        PublicationRefused: if PostgreSQL refuses to decode the relation for this set (R6.4, R6.9).
    """
    root = partition_root(catalog, catalog.existing(publications), leaf)
    if root is None:
        return None
    if root.actions.isdisjoint(ROW_ACTIONS):
        # R6.7: no row is ever sent, so PostgreSQL does not read column lists, and they cannot disagree.
        columns = in_order(root.table, unlisted_columns(root.table, generated=False))
    else:
        columns = published_columns(root.effective, root.table, catalog.server_version)
    return PublishedRelation(
        leaf=leaf,
        table=root.table,
        actions=root.actions,
        filters=effective_filters(root.effective, root.table),
        columns=columns,
    )


def synced_tables(catalog: PublisherCatalog, publications: Sequence[str]) -> tuple[SyncedTable, ...]:
    """The tables that the subscription lists, in order of name, each with its initial copy (R7.1-R7.6).

    If one publication lists a partitioned table via root and another its leaves, only the root is listed, as
    in PostgreSQL 16 and later; 15 copies such rows twice (R7.2). Publications that do not exist contribute
    nothing (R7.11).

    Raises:
        PublicationRefused: if PostgreSQL refuses to create the subscription (R6.4, R6.9).
    """
    listed_in: dict[RelationId, list[Publication]] = {}
    for publication in catalog.existing(publications):
        for relation in listed_tables(catalog, publication):
            listed_in.setdefault(relation, []).append(publication)
    leaves = _leaves(catalog)
    return tuple(
        _synced_table(catalog, table, leaves[table.id], listed_in[table.id])
        for table in sorted((catalog.tables[relation] for relation in listed_in), key=lambda t: t.name)
        if not any(ancestor.id in listed_in for ancestor in catalog.ancestors(table.id))
    )


def _synced_table(
    catalog: PublisherCatalog, table: Table, leaves: tuple[Table, ...], publications: Sequence[Publication]
) -> SyncedTable:
    columns = published_columns(publications, table, catalog.server_version)
    lists_all = not columns and catalog.server_version >= POSTGRES_18
    return SyncedTable(
        table=table,
        leaves=leaves,
        filters=any_of(filter_in(publication, table) for publication in publications),
        columns=columns,
        unpublished=tuple(column.name for column in table.columns) if lists_all else (),
    )


def listed_tables(catalog: PublisherCatalog, publication: Publication) -> frozenset[RelationId]:
    """The tables that a subscription to this publication alone would list (R7.1, R2.18)."""
    is_listed = _is_listed_via_root if publication.via_root else _is_listed_as_leaf
    families = ((table, catalog.ancestors(table.id)) for table in catalog.tables.values())
    return frozenset(
        table.id
        for table, ancestors in families
        if is_listed(publication, table, ancestors) and not excepts(publication, table, ancestors)
    )


def _is_listed_via_root(publication: Publication, table: Table, ancestors: Sequence[Table]) -> bool:
    return (
        table.is_publishable
        and contains(publication, table)
        and not any(contains(publication, ancestor) for ancestor in ancestors)
    )


def _is_listed_as_leaf(publication: Publication, table: Table, ancestors: Sequence[Table]) -> bool:
    if table.is_partitioned:
        return False
    if table.is_publishable and contains(publication, table):
        return True
    # PostgreSQL lists the leaves of a partitioned table unchecked (GetPubPartitionOptionRelations): an
    # unlogged leaf is copied once, and its changes never arrive.
    return not publication.all_tables and any(contains(publication, ancestor) for ancestor in ancestors)


def _leaves(catalog: PublisherCatalog) -> Mapping[RelationId, tuple[Table, ...]]:
    leaves: dict[RelationId, list[Table]] = {relation: [] for relation in catalog.tables}
    for table in sorted(catalog.tables.values(), key=lambda t: t.name):
        if not table.is_partitioned:
            for holder in (table, *catalog.ancestors(table.id)):
                leaves[holder.id].append(table)
    return {relation: tuple(tables) for relation, tables in leaves.items()}


_WRITING: Final = (PublishAction.INSERT, PublishAction.UPDATE)
"""The actions that carry values."""


def why_not_mirrored(
    catalog: PublisherCatalog, publications: Sequence[str], synced: SyncedTable
) -> str | None:
    """None if the subscriber must equal the filtered table; else why native replication need not (R7.5)."""
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
    """None if rows of both sides must have equal values; else why native replication need not (R7.5).

    An unpublished DELETE or TRUNCATE leaves rows on the subscriber, but changes no values.
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
