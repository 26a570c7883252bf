"""Which route a change takes: relation version and catalog version → what it is published as, and its target.

A route is everything that is the same for all changes of one relation version under one version of the
publisher's catalog. The routes of a window are few; tasks look them up in arrays (`route_index`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, Self

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import Generated, PublishAction, PublisherCatalog
from cdc_replay.model.relation import QualifiedName, Relation, RelationId, ReplicaIdentity
from cdc_replay.model.subscription import SubscribedTable
from cdc_replay.publication.resolve import PublishedRelation, resolve
from cdc_replay.replay.route.row_identity import key_of, row_identity
from cdc_replay.subscriber.target_tables import Leaves, TargetTable

_SEARCHING: Final = frozenset({PublishAction.UPDATE, PublishAction.DELETE})
"""The actions that have to find a row."""


@dataclass(frozen=True, slots=True)
class Target:
    """What routing needs to know of a table on the subscriber.

    `identity` is its replica identity index or primary key, empty if it has none; its partitions may have
    some.
    """

    identity: tuple[str, ...]
    applied_lsn: Lsn
    is_partitioned: bool = False
    leaves: Leaves = field(default_factory=Leaves)

    @classmethod
    def from_table(cls, table: TargetTable | None, applied_lsn: Lsn) -> Self:
        """The table as it was read; None is one that must be created."""
        if table is None:
            return cls((), applied_lsn)
        return cls(table.identity, applied_lsn, table.is_partitioned, table.leaves)


@dataclass(frozen=True, slots=True)
class Route:
    """How all changes of one relation version under one catalog version reach their target."""

    route_id: int
    relation: Relation
    catalog_version: int
    published: PublishedRelation
    target: SubscribedTable
    columns: frozenset[str]
    """The columns of the target that these changes have: column lists can change between them (R9.10)."""

    @property
    def truncate(self) -> tuple[RelationId, int]:
        """What TRUNCATEs are routed by: they have no relation version (R1.1)."""
        return self.relation.id, self.catalog_version

    @property
    def publishes_truncate(self) -> bool:
        """Whether a TRUNCATE passes: it is published, and for this very relation (R2.13).

        Row filters do not matter (R3.12). The log names leaves and partitioned tables alike (R2.14), so one
        rule serves both: a leaf that is published as an ancestor is never truncated alone; the ancestor is,
        if the message names it.
        """
        is_own = self.published.table.id == self.published.leaf
        return is_own and PublishAction.TRUNCATE in self.published.actions

    @property
    def refusal(self) -> str | None:
        """Why an UPDATE or DELETE cannot find its row on the subscriber; None where it can (R8.6, R8.7)."""
        if self.relation.replica_identity is ReplicaIdentity.FULL:
            return None
        sent = key_of(self.relation)
        sends = f'table "{self.relation.name}" of the publisher sends {_listed(sent)} of an old row'
        if not self.target.is_keyed:
            return (
                f'logical replication target relation "{self.target.name}" has neither a usable key nor does'
                f" the published relation have REPLICA IDENTITY FULL: {sends}; give the target a key of such"
                " columns, or set the REPLICA IDENTITY to FULL (R8.6)"
            )
        missing = [name for name in self.target.identity if name not in sent]
        if not missing:
            return None
        return (
            f"publisher did not send replica identity column {_listed(missing)} of table"
            f' "{self.target.name}": {sends}; set its REPLICA IDENTITY to FULL or to an index that has these'
            " columns (R8.7)"
        )

    @property
    def finds_by_new_row(self) -> bool:
        """Whether an UPDATE without an old row finds its row in spite of a refusal, by the new row (R8.3).

        A native worker compares the target's key with that of the published relation (R8.7), which may be
        another than the leaf's (R1.7).
        """
        published = self.published.table
        key = (
            self.target.columns
            if published.replica_identity is ReplicaIdentity.FULL
            else published.key_columns
        )
        return (
            self.target.is_keyed
            and published.id != self.relation.id
            and set(self.target.identity) <= set(key)
        )


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of one subscription in one window, and their targets.

    `unsubscribed` are published relations that are not among the targets.
    """

    tables: tuple[SubscribedTable, ...]
    routes: tuple[Route, ...]
    unsubscribed: tuple[Unrouted, ...]


@dataclass(frozen=True, slots=True)
class Unrouted:
    """What is published under a name that is not among the targets.

    `actions` are those that are published, `columns` those of its changes.
    """

    name: QualifiedName
    relation: Relation
    catalog_version: int
    actions: frozenset[PublishAction]
    columns: tuple[str, ...]


class VersionedRelation(NamedTuple):
    """A relation version, and the catalog in force for changes that have it and `catalog_version` (R9.10)."""

    relation: Relation
    catalog_version: int
    catalog: PublisherCatalog


class _PublishedVersion(NamedTuple):
    relation: Relation
    catalog_version: int
    published: PublishedRelation
    columns: tuple[str, ...]


NOT_RENAMED: Final[Mapping[RelationId, QualifiedName]] = MappingProxyType({})


def plan_routes(
    versions: Iterable[VersionedRelation],
    publications: Sequence[str],
    targets: Mapping[QualifiedName, Target],
    renamed: Mapping[RelationId, QualifiedName] = NOT_RENAMED,
) -> Routes:
    """The routes of all relation versions and catalogs of a window.

    The target has the name of the published relation at that position (R8.1), or the name in `renamed`.
    Relations that the publications do not publish, whose target is not among `targets` (R7.12), or that are
    not in their catalog have no route.

    Raises:
        PublicationRefused: where PostgreSQL refuses to decode for these publications.
    """
    by_name: dict[QualifiedName, list[_PublishedVersion]] = {}
    for version in _published_versions(versions, publications):
        name = renamed.get(version.published.table.id, version.published.table.name)
        by_name.setdefault(name, []).append(version)
    by_target = {name: published for name, published in by_name.items() if name in targets}
    tables = tuple(
        _subscribed_table(index, name, by_target[name], targets[name])
        for index, name in enumerate(sorted(by_target))
    )
    planned = [(table, version) for table in tables for version in by_target[table.name]]
    routes = tuple(
        Route(route_id, relation, catalog_version, published, table, frozenset(columns))
        for route_id, (table, (relation, catalog_version, published, columns)) in enumerate(planned)
    )
    unsubscribed = tuple(
        Unrouted(name, relation, catalog_version, published.actions, columns)
        for name in sorted(by_name.keys() - by_target.keys())
        for relation, catalog_version, published, columns in by_name[name]
    )
    return Routes(tables, routes, unsubscribed)


def _published_versions(
    versions: Iterable[VersionedRelation], publications: Sequence[str]
) -> Iterator[_PublishedVersion]:
    for relation, catalog_version, catalog in versions:
        if relation.id not in catalog.tables:
            continue
        published = resolve(catalog, publications, relation.id)
        if published is not None:
            columns = tuple(_sent_columns(relation, published))
            yield _PublishedVersion(relation, catalog_version, published, columns)


def _sent_columns(relation: Relation, published: PublishedRelation) -> Iterator[str]:
    """The published columns that this relation version has, in the published relation's order.

    A column dropped since is no longer in the catalog. Without a column list it was sent nevertheless, as the
    definitions of that time say (R9.10).
    """
    present = relation.column_names
    yield from (column for column in published.columns if column in present)
    cataloged = published.table.columns
    live = {column.name for column in cataloged if column.generated is Generated.NO}
    if live <= set(published.columns):
        names = {column.name for column in cataloged}
        yield from (column for column in present if column not in names)


def _subscribed_table(
    index: int, name: QualifiedName, versions: Sequence[_PublishedVersion], target: Target
) -> SubscribedTable:
    sent: dict[str, None] = {}
    for version in reversed(versions):
        sent.update(dict.fromkeys(version.columns))
    columns = tuple(sent)
    searching = [
        (version.relation, version.published.table)
        for version in versions
        if _SEARCHING & version.published.actions
    ]
    identity = row_identity(target.identity, columns, searching, is_partitioned=target.is_partitioned)
    return SubscribedTable(
        index=index,
        name=name,
        columns=columns,
        identity=identity.columns,
        is_keyed=identity.is_keyed,
        applied_lsn=target.applied_lsn,
        is_per_leaf=identity.is_per_leaf,
        is_by_leaf=not identity.is_keyed and bool(target.leaves.with_key(columns)),
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "nothing"
