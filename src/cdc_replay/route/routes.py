"""Which route a change takes: relation version and catalog version → what it is published as, and its target.

A route is everything that is the same for all changes of one relation version under one version of the
publisher's catalog. The routes of a window are few; the changes find theirs by a broadcast join.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import Generated, PublisherCatalog
from cdc_replay.model.relation import QualifiedName, Relation, ReplicaIdentity
from cdc_replay.model.subscription import SubscribedTable
from cdc_replay.publication.resolve import PublishedRelation, resolve


@dataclass(frozen=True, slots=True)
class Target:
    """What routing needs to know of a table on the subscriber.

    `identity` is its replica identity index or primary key, empty where it has none.
    """

    identity: tuple[str, ...]
    applied_lsn: Lsn


@dataclass(frozen=True, slots=True)
class Route:
    """The way of all changes of one relation version under one catalog version."""

    number: int
    relation: Relation
    catalog_lsn: int
    published: PublishedRelation
    target: SubscribedTable

    @property
    def refusal(self) -> str | None:
        """Why an UPDATE or DELETE cannot find its row on the subscriber; None where it can (R8.6, R8.7)."""
        if self.relation.replica_identity is ReplicaIdentity.FULL:
            return None
        if not self.target.is_keyed:
            return (
                f'logical replication target relation "{self.target.name}" has neither a usable key nor does'
                " the published relation have REPLICA IDENTITY FULL"
            )
        sent = {column.name for column in self.relation.columns if column.is_key}
        missing = [name for name in self.target.identity if name not in sent]
        if not missing:
            return None
        names = ", ".join(f'"{name}"' for name in missing)
        return f'publisher did not send replica identity column {names} of table "{self.target.name}"'


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of one subscription in one window, and the tables that they lead to."""

    tables: tuple[SubscribedTable, ...]
    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True)
class _Way:
    relation: Relation
    catalog_lsn: int
    published: PublishedRelation


def plan_routes(
    relations: Iterable[Relation],
    catalogs: Sequence[PublisherCatalog],
    publications: Sequence[str],
    targets: Mapping[QualifiedName, Target],
) -> Routes:
    """The routes from every relation version of the window, under every catalog version of it.

    Relations that the publications do not publish, or whose published relation is not among `targets`, have
    no route (R7.12).

    Raises:
        PublicationRefused: where PostgreSQL refuses to decode for these publications.
    """
    by_target: dict[QualifiedName, list[_Way]] = {}
    for relation in relations:
        for way in _ways(relation, catalogs, publications):
            if way.published.table.name in targets:
                by_target.setdefault(way.published.table.name, []).append(way)
    tables = tuple(
        _subscribed_table(index, name, by_target[name], targets[name])
        for index, name in enumerate(sorted(by_target))
    )
    arrivals = [(way, table) for table in tables for way in by_target[table.name]]
    routes = tuple(
        Route(number, way.relation, way.catalog_lsn, way.published, table)
        for number, (way, table) in enumerate(arrivals)
    )
    return Routes(tables, routes)


def _ways(
    relation: Relation, catalogs: Sequence[PublisherCatalog], publications: Sequence[str]
) -> Iterator[_Way]:
    known: PublisherCatalog | None = None
    for catalog in catalogs:
        # A table that was dropped before the catalog was read is still in the version before.
        known = catalog if relation.id in catalog.tables else known
        if known is None:
            continue
        published = resolve(known, publications, relation.id)
        if published is not None:
            yield _Way(relation, catalog.lsn.value, published)


def _sent_columns(way: _Way) -> Iterator[str]:
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
    index: int, name: QualifiedName, ways: Sequence[_Way], target: Target
) -> SubscribedTable:
    sent: dict[str, None] = {}
    for way in reversed(ways):
        sent.update(dict.fromkeys(_sent_columns(way)))
    columns = tuple(sent)
    is_keyed = bool(target.identity) and set(target.identity) <= sent.keys()
    return SubscribedTable(
        index=index,
        name=name,
        columns=columns,
        identity=target.identity if is_keyed else columns,
        is_keyed=is_keyed,
        applied_lsn=target.applied_lsn,
    )
