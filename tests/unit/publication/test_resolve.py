"""Tables that a subscription lists and copies, case by case of section 7."""

from __future__ import annotations

import pytest

from cdc_replay.errors import PublicationRefused
from cdc_replay.model.publication import Publication
from cdc_replay.publication.resolve import SyncedTable, synced_tables
from fixtures.catalogs import catalog, listed, publication, table

ROOT, MIDDLE, LEAF, OTHER_LEAF, PLAIN = 1, 2, 3, 4, 5

TREE = (
    table(ROOT, "a.root", is_partitioned=True),
    table(MIDDLE, "b.middle", parent=ROOT, is_partitioned=True),
    table(LEAF, "c.leaf", parent=MIDDLE),
    table(OTHER_LEAF, "a.other_leaf", parent=ROOT),
    table(PLAIN, "a.plain"),
)


def synced(*publications: Publication) -> dict[str, SyncedTable]:
    names = [publication.name for publication in publications]
    published = synced_tables(catalog(*TREE, publications=publications), names)
    assert [s.table.name for s in published] == sorted(s.table.name for s in published)
    return {str(s.table.name): s for s in published}


CASES: list[tuple[str, list[Publication], str]] = [
    ("R7.1 a plain table", [publication("p", listed(PLAIN))], "a.plain"),
    ("R7.1 leaves", [publication("p", listed(ROOT))], "a.other_leaf c.leaf"),
    ("R7.1 via root", [publication("p", listed(ROOT), via_root=True)], "a.root"),
    ("R7.1 a leaf via root", [publication("p", listed(LEAF), via_root=True)], "c.leaf"),
    ("R7.1 minus partitions", [publication("p", listed(ROOT), listed(LEAF), via_root=True)], "a.root"),
    ("R7.1 all tables", [publication("p", all_tables=True)], "a.other_leaf a.plain c.leaf"),
    ("R7.1 all tables via root", [publication("p", all_tables=True, via_root=True)], "a.plain a.root"),
    ("R7.1 schema", [publication("p", schemas=["a"])], "a.other_leaf a.plain c.leaf"),
    ("R7.1 schema via root", [publication("p", schemas=["a"], via_root=True)], "a.plain a.root"),
    ("R7.1 schema of the middle", [publication("p", schemas=["b"], via_root=True)], "b.middle"),
    (
        "R7.2 mixed: the root alone",
        [publication("p", listed(MIDDLE), via_root=True), publication("q", listed(ROOT))],
        "a.other_leaf b.middle",
    ),
    (
        "R7.2 mixed with all tables",
        [publication("p", all_tables=True), publication("q", listed(ROOT), via_root=True)],
        "a.plain a.root",
    ),
]


@pytest.mark.parametrize(
    ("publications", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_set_lists_the_tables_of_its_publications(publications: list[Publication], expected: str) -> None:
    assert list(synced(*publications)) == expected.split()


def test_partitioned_table_is_stored_in_all_its_leaves() -> None:
    published = synced(publication("p", listed(ROOT), listed(PLAIN), via_root=True))

    assert [str(leaf.name) for leaf in published["a.root"].leaves] == ["a.other_leaf", "c.leaf"]
    assert [str(leaf.name) for leaf in published["a.plain"].leaves] == ["a.plain"]


def test_initial_copy_ignores_publish_actions() -> None:
    """R7.3: rows of every filter are copied, whatever the publications publish."""
    published = synced(
        publication("pub1", listed(PLAIN, "id <= 2"), publish="insert"),
        publication("pub2", listed(PLAIN, "id = 5"), publish="delete"),
    )

    assert [row_filter.sql for row_filter in published["a.plain"].filters or ()] == ["id <= 2", "id = 5"]


def test_one_publication_without_filter_copies_everything() -> None:
    """R7.4."""
    filtered = publication("p", listed(PLAIN, "id <= 2"))

    assert synced(filtered, publication("q", all_tables=True))["a.plain"].filters is None
    assert synced(filtered, publication("q", schemas=["a"]))["a.plain"].filters is None
    assert synced(filtered, publication("q", listed(PLAIN)))["a.plain"].filters is None


def test_only_publications_that_list_the_very_table_filter_it() -> None:
    """R7.4: the filter of a publication that lists a leaf is not used for the root."""
    published = synced(
        publication("p", listed(ROOT, "root"), via_root=True), publication("q", listed(LEAF, "leaf"))
    )

    assert [row_filter.sql for row_filter in published["a.root"].filters or ()] == ["root"]


def test_different_lists_are_refused_for_any_action() -> None:
    """R6.4: the list is compared when the subscription is made, TRUNCATE or not."""
    with pytest.raises(PublicationRefused):
        synced(
            publication("p", listed(PLAIN, columns="id"), publish="truncate"),
            publication("q", listed(PLAIN, columns="id a"), publish="truncate"),
        )


def test_columns_are_those_of_the_list() -> None:
    assert synced(publication("p", listed(PLAIN, columns="b id")))["a.plain"].columns == ("id", "b")


def test_missing_publication_contributes_nothing() -> None:
    """R7.11."""
    published = synced_tables(catalog(*TREE, publications=[publication("p", listed(PLAIN))]), ["gone", "p"])

    assert [str(s.table.name) for s in published] == ["a.plain"]
