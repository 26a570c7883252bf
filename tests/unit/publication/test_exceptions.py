"""FOR ALL TABLES EXCEPT (19): excluded tables, and captured ones (R2.18)."""

from __future__ import annotations

import pytest

from cdc_replay.model.publication import Publication, PublishAction, PublisherCatalog
from cdc_replay.model.relation import RelationId
from cdc_replay.publication.capture_coverage import is_captured
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS, capture_set, root_set
from cdc_replay.publication.resolve import resolve, synced_tables
from fixtures.catalogs import catalog, excepted, listed, publication, table

ROOT, MIDDLE, LEAF, OTHER_LEAF, PLAIN = 1, 2, 3, 4, 5

TABLES = (
    table(ROOT, "s.root", is_partitioned=True),
    table(MIDDLE, "s.middle", parent=ROOT, is_partitioned=True),
    table(LEAF, "s.leaf", parent=MIDDLE),
    table(OTHER_LEAF, "other.leaf", parent=ROOT),
    table(PLAIN, "s.plain"),
)


def known(*publications: Publication) -> PublisherCatalog:
    return catalog(*TABLES, publications=publications, server_version=190000)


def streamed(*publications: Publication) -> dict[int, str]:
    """The published relation of each leaf that is published."""
    names = [publication.name for publication in publications]
    relations = {
        oid: resolve(known(*publications), names, RelationId(oid)) for oid in (LEAF, OTHER_LEAF, PLAIN)
    }
    return {oid: str(relation.table.name) for oid, relation in relations.items() if relation is not None}


def copied(*publications: Publication) -> list[str]:
    tables = synced_tables(known(*publications), [publication.name for publication in publications])
    return [str(synced.table.name) for synced in tables]


@pytest.mark.parametrize("via_root", [False, True])
def test_exception_of_a_root_excludes_its_partition_tree(via_root: bool) -> None:
    everything = publication("p", excepted(ROOT), all_tables=True, via_root=via_root)
    assert streamed(everything) == {PLAIN: "s.plain"}
    assert copied(everything) == ["s.plain"]
    assert resolve(known(everything), ["p"], RelationId(ROOT)) is None  # of a TRUNCATE (R2.11)
    assert resolve(known(everything), ["p"], RelationId(MIDDLE)) is None


def test_attached_partition_is_excluded_and_detached_one_is_included() -> None:
    everything = publication("p", excepted(ROOT), all_tables=True)
    detached = catalog(
        table(ROOT, "s.root", is_partitioned=True), table(LEAF, "s.leaf"), publications=[everything]
    )
    assert resolve(detached, ["p"], RelationId(LEAF)) is not None


def test_another_publication_that_contains_the_table_publishes_it() -> None:
    everything = publication("p", excepted(ROOT), excepted(PLAIN), all_tables=True, via_root=True)
    lists = publication("q", listed(LEAF, "a > 1"), listed(PLAIN), publish="insert")
    assert streamed(everything, lists) == {LEAF: "s.leaf", PLAIN: "s.plain"}
    assert copied(everything, lists) == ["s.leaf", "s.plain"]
    resolved = resolve(known(everything, lists), ["p", "q"], RelationId(LEAF))
    assert resolved is not None
    assert resolved.actions == {PublishAction.INSERT}
    assert resolved.filters[PublishAction.INSERT] is not None
    assert streamed(everything, publication("q", schemas=["other"])) == {OTHER_LEAF: "other.leaf"}
    assert len(streamed(everything, publication("q", all_tables=True))) == 3


def exceptions(*publications: Publication) -> dict[str, list[str]]:
    """The exceptions of the capture publication of each action."""
    members = capture_set(known(*publications), [publication.name for publication in publications])
    return {
        action.value: [str(name) for name in resolved.exceptions]
        for action, resolved in members.items()
        if resolved.all_tables
    }


def test_capture_excludes_tables_that_no_subscribed_publication_publishes() -> None:
    """R2.17: UPDATE of a table without identity must not fail because of the capture publications."""
    p = publication("p", excepted(ROOT), excepted(PLAIN), all_tables=True, publish="update")
    q = publication("q", excepted(PLAIN), all_tables=True, publish="update, delete")
    assert exceptions(p) == {"insert": ["s.plain", "s.root"], "update": ["s.plain", "s.root"]}
    assert exceptions(p, q) == {"insert": ["s.plain"], "update": ["s.plain"], "delete": ["s.plain"]}
    assert exceptions(p, publication("r", listed(LEAF), publish="update"))["update"] == ["s.plain"]
    assert exceptions(p, publication("r", schemas=["other"], publish="update"))["update"] == ["s.plain"]
    assert exceptions(p, publication("r", listed(PLAIN), publish="delete"))["update"] == ["s.plain", "s.root"]


def test_root_publications_exclude_the_tree() -> None:
    everything = publication("p", excepted(ROOT), all_tables=True, via_root=True)
    topmost, *below = root_set(known(everything), ["p"])
    assert (topmost.all_tables, [str(name) for name in topmost.exceptions]) == (True, ["s.root"])
    assert all(not members.tables for members in below)


def test_exceptions_of_a_capture_publication_are_not_captured() -> None:
    name = CAPTURE_PUBLICATIONS[PublishAction.INSERT]
    with_exception = known(publication(name, excepted(ROOT), all_tables=True))
    captured = [table.id for table in TABLES if is_captured(with_exception, table, PublishAction.INSERT)]
    assert captured == [PLAIN]
