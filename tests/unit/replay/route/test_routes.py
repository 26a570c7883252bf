"""Which relation versions have a route, under which catalogs, and what their target looks like."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import pytest

from cdc_replay.errors import PublicationRefused
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName, Relation, ReplicaIdentity
from cdc_replay.replay.route.routes import Route, Routes, Target, VersionedRelation, plan_routes
from fixtures.catalogs import catalog, listed, publication, table
from unit.replay.route.changes import relation

T1 = table(1, "s.t1")
T2 = table(2, "s.t2")
SENT = relation(1, "id a b")
BOTH = publication("p", listed(1), listed(2))


def targets(**identities: str) -> Mapping[QualifiedName, Target]:
    return {QualifiedName("s", name): Target(tuple(key.split()), Lsn(7)) for name, key in identities.items()}


def planned(*catalogs: PublisherCatalog, of: Relation = SENT, key: str = "id") -> Routes:
    """The routes of one relation of table s.t1, whose target has `key`."""
    return plan_routes(defined([of], *catalogs), ["p"], targets(t1=key))


def defined(relations: Sequence[Relation], *catalogs: PublisherCatalog) -> list[VersionedRelation]:
    """Changes of all these relation versions under all of these catalogs, which are numbered from 0."""
    return [
        VersionedRelation(relation_version, catalog_version, publisher_catalog)
        for relation_version in relations
        for catalog_version, publisher_catalog in enumerate(catalogs)
    ]


def route_keys(routes: Routes) -> list[tuple[int, int, str]]:
    """(relation version, catalog version, target) of every route."""
    return [
        (route.relation.version, route.catalog_version, str(route.target.name)) for route in routes.routes
    ]


def test_table_has_a_route_only_under_catalogs_that_publish_it() -> None:
    """R9.10: the definition in force at the change counts, not a later one or an earlier one."""
    unknown = catalog(publications=[BOTH])
    unpublished = catalog(T1, publications=[publication("p")])
    published = catalog(T1, publications=[BOTH])

    assert route_keys(planned(unknown, unpublished, published, unpublished)) == [(1, 2, "s.t1")]


def test_only_catalogs_of_changes_can_be_refused() -> None:
    """R6.4, R9.10: between two commands publications may disagree, as long as no change is in between."""
    publications = [publication("p", listed(1, columns="id")), publication("q", listed(1))]
    between = catalog(T1, publications=publications)
    after = catalog(T1, publications=[publication("p", listed(1)), publication("q", listed(1))])
    names = ["p", "q"]

    routes = plan_routes([VersionedRelation(SENT, 1, after)], names, targets(t1="id"))

    assert route_keys(routes) == [(1, 1, "s.t1")]
    with pytest.raises(PublicationRefused):
        plan_routes(
            [VersionedRelation(SENT, 0, between), VersionedRelation(SENT, 1, after)], names, targets(t1="id")
        )


def test_table_that_is_published_but_not_subscribed_has_no_route() -> None:
    """R7.12: a table that entered the publication later is ignored until a refresh."""
    routes = plan_routes(
        defined([relation(1, "id a b"), relation(2, "id a b")], catalog(T1, T2, publications=[BOTH])),
        ["p"],
        targets(t2="id"),
    )

    assert route_keys(routes) == [(2, 0, "s.t2")]
    assert [(subscribed.index, str(subscribed.name)) for subscribed in routes.tables] == [(0, "s.t2")]


def test_versions_of_a_relation_share_a_target_that_has_all_their_columns() -> None:
    """A column that was added or dropped inside the window is sent by some versions only."""
    versions = [relation(1, "id a", version=10), relation(1, "id a b", version=11)]
    routes = plan_routes(defined(versions, catalog(T1, publications=[BOTH])), ["p"], targets(t1="id"))

    assert route_keys(routes) == [(10, 0, "s.t1"), (11, 0, "s.t1")]
    (target,) = routes.tables
    assert sorted(target.columns) == ["a", "b", "id"]
    assert (target.identity, target.is_keyed, target.applied_lsn) == (("id",), True, Lsn(7))


def test_partitions_lead_to_their_published_root_and_its_column_list() -> None:
    """R2.4, R6.3: via root, with the root's column list; an unlisted column does not reach the target."""
    root = table(1, "s.t1", is_partitioned=True)
    leaves = [table(2, "s.t2", "b a id", parent=1), table(3, "s.t3", parent=1)]
    via_root = publication("p", listed(1, columns="id b"), via_root=True)
    relations = [relation(2, "b a id"), relation(3, "id a b")]
    catalogs = catalog(root, *leaves, publications=[via_root])
    routes = plan_routes(defined(relations, catalogs), ["p"], targets(t1="id"))

    assert route_keys(routes) == [(2, 0, "s.t1"), (3, 0, "s.t1")]
    assert routes.tables[0].columns == ("id", "b")


def test_column_lists_that_differ_are_refused_as_postgresql_refuses_them() -> None:
    """R6.4: there is no union of column lists."""
    publications = [publication("p", listed(1, columns="id")), publication("q", listed(1))]
    with pytest.raises(PublicationRefused, match=r"s\.t1"):
        plan_routes(defined([SENT], catalog(T1, publications=publications)), ["p", "q"], targets(t1="id"))


def the_route(routes: Routes) -> Route:
    (route,) = routes.routes
    return route


@pytest.mark.parametrize(
    ("identity", "relation_key", "target_key", "refusal"),
    [
        # R8.6 (1): the target's key, all of whose columns the publisher flags as key
        (ReplicaIdentity.DEFAULT, "id", "id", None),
        # R8.7: fewer key columns on the target than on the publisher are fine
        (ReplicaIdentity.DEFAULT, "id a", "id", None),
        # R8.7: a key column of the target that the publisher does not send as key
        (ReplicaIdentity.DEFAULT, "id", "id a", 'did not send replica identity column "a" of table "s.t1"'),
        (ReplicaIdentity.DEFAULT, "id", "a b", 'replica identity column "a", "b"'),
        # R8.6 (2): without a key on the target a full row finds it
        (ReplicaIdentity.FULL, "", "", None),
        (ReplicaIdentity.FULL, "", "id", None),
        # R8.6 (3): neither
        (ReplicaIdentity.DEFAULT, "id", "", "neither a usable key nor"),
        (ReplicaIdentity.NOTHING, "", "", "neither a usable key nor"),
    ],
)
def test_update_is_refused_if_its_row_cannot_be_found(
    identity: ReplicaIdentity, relation_key: str, target_key: str, refusal: str | None
) -> None:
    """R8.6, R8.7."""
    sent = relation(1, "id a b", key=relation_key, identity=identity)
    routes = planned(catalog(T1, publications=[BOTH]), of=sent, key=target_key)

    found = the_route(routes).refusal
    if refusal is None:
        assert found is None
    else:
        assert re.search(refusal, found or "")


@pytest.mark.parametrize(
    ("root_key", "root_identity", "finds"),
    [
        ("id", ReplicaIdentity.DEFAULT, True),
        ("", ReplicaIdentity.FULL, True),
        # R8.7: natively refused, too
        ("a", ReplicaIdentity.DEFAULT, False),
    ],
)
def test_new_row_finds_the_row_of_a_leaf_with_another_key_than_the_root(
    root_key: str, root_identity: ReplicaIdentity, *, finds: bool
) -> None:
    """R1.7, R8.3, R8.7: leaves send "id" and "a" of an old row, the target's key is "id"."""
    root = dataclasses.replace(
        table(5, "s.t5", is_partitioned=True),
        key_columns=tuple(root_key.split()),
        replica_identity=root_identity,
    )
    leaves = (table(6, "s.t6", parent=5), table(7, "s.t7", parent=5))
    via_root = publication("p", listed(5), via_root=True)
    versions = defined(
        [relation(6, "id a b", key="id"), relation(7, "id a b", key="a")],
        catalog(root, *leaves, publications=[via_root]),
    )

    by_id, by_a = plan_routes(versions, ["p"], targets(t5="id")).routes

    assert by_id.refusal is None
    assert 'replica identity column "id"' in (by_a.refusal or "")
    assert by_a.finds_by_new_row is finds


def test_unpublished_key_makes_the_whole_row_the_identity() -> None:
    """R8.6: the list omits the target's key, so nothing but a full comparison is left."""
    insert_only = publication("p", listed(1, columns="a b"), publish="insert")
    routes = planned(catalog(T1, publications=[insert_only]))

    (target,) = routes.tables
    assert (target.columns, target.identity, target.is_keyed) == (("a", "b"), ("a", "b"), False)
