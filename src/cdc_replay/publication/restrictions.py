"""Publications that PostgreSQL refuses to combine, and combinations with surprising results.

Refused (`check_publications`): publications with different columns for a table (R6.4, R6.5, R6.9). PostgreSQL
notices at the first change of the table, and then decoding stops for good (R1.36); we check all tables before
we read anything. The restrictions on WHERE clauses (R5.1-R5.5) need no second check: the publisher has
enforced them.

Accepted with a warning (`warnings_for`): sets that mix levels of a partition tree, or whose publish actions
do not fit their filters (R11.4, R11.5, R7.3). We replicate as PostgreSQL does, and warn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from cdc_replay.errors import PublicationRefused
from cdc_replay.model.publication import Publication, PublishAction, PublisherCatalog, Table
from cdc_replay.model.relation import RelationId
from cdc_replay.publication.column_list import POSTGRES_18
from cdc_replay.publication.effective_filter import ROW_ACTIONS, effective_filters, filter_in
from cdc_replay.publication.partition_root import PartitionRoot, actions_of, partition_root
from cdc_replay.publication.resolve import resolve, synced_tables


def missing_publications(catalog: PublisherCatalog, publications: Sequence[str]) -> tuple[str, ...]:
    """The named publications that do not exist, in the order given.

    Decoding for a missing publication fails on 15-17 and skips it on 18 (R1.19); the initial copy skips it
    everywhere (R7.11). `PublisherCatalog.publication` raises the error for a single one.
    """
    return tuple(name for name in publications if name not in catalog.publications)


def check_publications(catalog: PublisherCatalog, publications: Sequence[str]) -> None:
    """Raise if PostgreSQL refuses the set, now or at the first change of some table.

    Publications that do not exist are left to the caller (`missing_publications`).

    Raises:
        PublicationRefused: for one table; the detail names all others.
    """
    refusals: dict[str, PublicationRefused] = {}
    for table in sorted(catalog.tables.values(), key=lambda t: t.name):
        if not table.is_partitioned:
            try:
                resolve(catalog, publications, table.id)
            except PublicationRefused as refusal:
                refusals.setdefault(refusal.message, refusal)
    if refusals:
        raise _combine(tuple(refusals.values()))
    synced_tables(catalog, publications)


def _combine(refusals: Sequence[PublicationRefused]) -> PublicationRefused:
    first = refusals[0]
    others = "".join(f"\nAlso: {refusal.message}. {refusal.detail}" for refusal in refusals[1:])
    return PublicationRefused(
        first.message, detail=f"{first.detail}{others}", hint=first.hint, rule=first.rule
    )


def warnings_for(catalog: PublisherCatalog, publications: Sequence[str]) -> tuple[str, ...]:
    """What the set does that its owner may not expect: one sentence each with its rule.

    There is one warning per partition tree. `check_publications` accepts the set.
    """
    existing = catalog.existing(publications)
    warnings: dict[str, None] = {}
    for name in missing_publications(catalog, publications):
        warnings[_missing_publication(name, catalog.server_version)] = None
    inserted: set[RelationId] = set()
    for leaf in sorted(catalog.tables.values(), key=lambda t: t.name):
        root = None if leaf.is_partitioned else partition_root(catalog, existing, leaf.id)
        if root is not None:
            warnings |= dict.fromkeys((*_mixed_levels(catalog, leaf, root), *_lossy_updates(leaf, root)))
            inserted |= {root.table.id} if PublishAction.INSERT in root.actions else set()
    for synced in synced_tables(catalog, publications):
        if synced.table.id not in inserted:
            warnings[_unpublished_inserts(synced.table)] = None
    return tuple(warnings)


def _missing_publication(name: str, server_version: int) -> str:
    if server_version >= POSTGRES_18:
        return f'publication "{name}" does not exist: the publisher ignores it [R1.19]'
    return f'publication "{name}" does not exist: a native subscriber stops at the first change [R1.19]'


def _mixed_levels(catalog: PublisherCatalog, leaf: Table, root: PartitionRoot) -> Iterator[str]:
    """Publications of a lower level that leak actions, lose filters or lose TRUNCATE (R11.4)."""
    table = f'table "{root.table.name}"'
    only_lower = root.actions - actions_of(root.effective)
    if leaked := only_lower.intersection(ROW_ACTIONS):
        yield (
            f"{table}: {_action_list(leaked)} published only through partitions, by"
            f" {_publication_list(root.lower, leaked)}, and so sent without any row filter [R2.8]"
        )
    if PublishAction.TRUNCATE in only_lower:
        yield (
            f"{table}: truncate is published only through partitions, by"
            f" {_publication_list(root.lower, only_lower)}, and so never sent [R2.10]"
        )
    for publication in root.lower:
        yield from _ignored_publication(catalog, leaf, root, publication)


def _ignored_publication(
    catalog: PublisherCatalog, leaf: Table, root: PartitionRoot, publication: Publication
) -> Iterator[str]:
    """Filters of a publication of a lower level that have no effect (R2.6, R2.9)."""
    own = partition_root(catalog, (publication,), leaf.id)
    if own is None:
        return
    if filter_in(publication, own.table) is not None:
        yield (
            f'table "{own.table.name}": the row filter of publication "{publication.name}" is not used,'
            f' because changes are sent as those of table "{root.table.name}" [R2.6]'
        )
        return
    filters = effective_filters(root.effective, root.table)
    if filtered := {action for action in publication.actions if filters.get(action) is not None}:
        yield (
            f'table "{root.table.name}": publication "{publication.name}" publishes {_action_list(filtered)}'
            " without a row filter, but only through partitions: the row filter of"
            f" {_publication_list(root.effective, filtered)} still applies [R2.9]"
        )


def _lossy_updates(leaf: Table, root: PartitionRoot) -> Iterator[str]:
    """UPDATEs that are sent as unpublished INSERT or DELETE, or are lost (R11.5)."""
    absent = {PublishAction.INSERT, PublishAction.DELETE} - root.actions
    if PublishAction.UPDATE not in root.actions or not absent:
        return
    table = f'table "{root.table.name}"'
    if effective_filters(root.effective, root.table)[PublishAction.UPDATE] is not None:
        yield (
            f"{table}: {_action_list(absent)} not published, but an update that moves a row into or out of"
            " the row filter is still sent as insert or delete [R4.1]"
        )
    if leaf.parent is not None:
        yield (
            f"{table}: {_action_list(absent)} not published, so an update that moves a row to"
            " another partition loses that part [R2.15]"
        )


def _unpublished_inserts(table: Table) -> str:
    return (
        f'table "{table.name}": insert is not published, but the initial copy includes existing rows [R7.3]'
    )


def _action_list(actions: AbstractSet[PublishAction]) -> str:
    return ", ".join(action.value for action in PublishAction if action in actions)


def _publication_list(publications: Sequence[Publication], actions: AbstractSet[PublishAction]) -> str:
    return ", ".join(f'"{p.name}"' for p in publications if not p.actions.isdisjoint(actions))
