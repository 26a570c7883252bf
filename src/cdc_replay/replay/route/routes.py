"""Which route a change takes: relation version and catalog version → what it is published as, and its target.

A route is everything that is the same for all changes of one relation version under one version of the
publisher's catalog. The routes of a window are few; the changes find theirs by a broadcast join.
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

    `identity` is its replica identity index or primary key, empty where it has none; then its partitions may
    have some.
    """

    identity: tuple[str, ...]
    applied_lsn: Lsn
    is_partitioned: bool = False
    leaves: Leaves = field(default_factory=Leaves)

    @classmethod
    def of(cls, table: TargetTable | None, applied_lsn: Lsn) -> Self:
        """The table as it was read, or as it must be created."""
        if table is None:
            return cls((), applied_lsn)
        return cls(table.identity, applied_lsn, table.is_partitioned, table.leaves)


@dataclass(frozen=True, slots=True)
class Route:
    """The way of all changes of one relation version under one catalog version."""

    number: int
    relation: Relation
    catalog_version: int
    published: PublishedRelation
    target: SubscribedTable
    columns: frozenset[str]
    """The columns of the target that these changes bring: column lists can change between them (R9.10)."""

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


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of one subscription in one window, and the tables that they lead to.

    `elsewhere` is what the window has of published relations that are not among its targets.
    """

    tables: tuple[SubscribedTable, ...]
    routes: tuple[Route, ...]
    elsewhere: tuple[Unrouted, ...]


@dataclass(frozen=True, slots=True)
class Unrouted:
    """What is published under a name of which the window has no target.

    `actions` are those that are published, `columns` what its changes bring.
    """

    name: QualifiedName
    relation: Relation
    catalog_version: int
    actions: frozenset[PublishAction]
    columns: tuple[str, ...]


class VersionedRelation(NamedTuple):
    """A relation version, and the catalog that is in force for changes that have it (R9.10).

    `catalog_version` is the number that these changes carry.
    """

    relation: Relation
    catalog_version: int
    catalog: PublisherCatalog


@dataclass(frozen=True, slots=True)
class _PublishedVersion:
    relation: Relation
    catalog_version: int
    published: PublishedRelation


NOT_RENAMED: Final[Mapping[RelationId, QualifiedName]] = MappingProxyType({})


def plan_routes(
    defined: Iterable[VersionedRelation],
    publications: Sequence[str],
    targets: Mapping[QualifiedName, Target],
    renamed: Mapping[RelationId, QualifiedName] = NOT_RENAMED,
) -> Routes:
    """The routes of all that changes of the window are defined by, which is what may be refused too.

    The target is the table with the name that the published relation has at the position (R8.1), or for those
    in `renamed` the one that is given there, whatever they are called. Relations that the publications do not
    publish, or whose target is not among `targets`, have no route (R7.12). A table that its catalog does not
    know has none.

    Raises:
        PublicationRefused: where PostgreSQL refuses to decode for these publications.
    """
    by_name: dict[QualifiedName, list[_PublishedVersion]] = {}
    for way in _ways(defined, publications):
        name = renamed.get(way.published.table.id, way.published.table.name)
        by_name.setdefault(name, []).append(way)
    by_target = {name: ways for name, ways in by_name.items() if name in targets}
    tables = tuple(
        _subscribed_table(index, name, by_target[name], targets[name])
        for index, name in enumerate(sorted(by_target))
    )
    arrivals = [(way, table) for table in tables for way in by_target[table.name]]
    routes = tuple(
        Route(number, way.relation, way.catalog_version, way.published, table, frozenset(_sent_columns(way)))
        for number, (way, table) in enumerate(arrivals)
    )
    elsewhere = tuple(
        Unrouted(name, way.relation, way.catalog_version, way.published.actions, tuple(_sent_columns(way)))
        for name in sorted(by_name.keys() - by_target.keys())
        for way in by_name[name]
    )
    return Routes(tables, routes, elsewhere)


def _ways(defined: Iterable[VersionedRelation], publications: Sequence[str]) -> Iterator[_PublishedVersion]:
    for relation, number, catalog in defined:
        if relation.id not in catalog.tables:
            continue
        published = resolve(catalog, publications, relation.id)
        if published is not None:
            yield _PublishedVersion(relation, number, published)


def _sent_columns(way: _PublishedVersion) -> Iterator[str]:
    """The published columns that this relation version has, in the published relation's order.

    A column that was dropped since is not in the catalog any more. Without a column list it was sent all the
    same, as the definitions of that time said (R9.10).
    """
    present = way.relation.column_names
    yield from (column for column in way.published.columns if column in present)
    known = way.published.table.columns
    live = {column.name for column in known if column.generated is Generated.NO}
    if live <= set(way.published.columns):
        yield from (column for column in present if column not in {each.name for each in known})


def _subscribed_table(
    index: int, name: QualifiedName, ways: Sequence[_PublishedVersion], target: Target
) -> SubscribedTable:
    sent: dict[str, None] = {}
    for way in reversed(ways):
        sent.update(dict.fromkeys(_sent_columns(way)))
    columns = tuple(sent)
    searching = [(way.relation, way.published.table) for way in ways if _SEARCHING & way.published.actions]
    found = row_identity(target.identity, columns, searching, is_partitioned=target.is_partitioned)
    return SubscribedTable(
        index=index,
        name=name,
        columns=columns,
        identity=found.columns,
        is_keyed=found.is_keyed,
        applied_lsn=target.applied_lsn,
        is_per_leaf=found.is_per_leaf,
        is_by_leaf=not found.is_keyed and bool(target.leaves.with_key(columns)),
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "nothing"
