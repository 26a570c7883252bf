"""Which filter applies to which action, case by case of section 3."""

from __future__ import annotations

import pytest

from cdc_replay.model.publication import Publication, PublishAction
from cdc_replay.model.relation import RelationId
from cdc_replay.publication.effective_filter import any_of, effective_filters
from cdc_replay.publication.resolve import resolve
from fixtures.catalogs import catalog, listed, publication, row_filter, table

T = table(1, "s.t")


def texts(publications: list[Publication]) -> dict[str, list[str] | None]:
    """The filters per action, by their text."""
    resolved = effective_filters(publications, T)
    return {
        action.value: None if filters is None else [row_filter.sql for row_filter in filters]
        for action, filters in resolved.items()
    }


CASES: list[tuple[str, list[Publication], dict[str, list[str] | None]]] = [
    ("one filter", [publication("p", listed(1, "a"))], {"insert": ["a"], "update": ["a"], "delete": ["a"]}),
    (
        "R3.4 a member without WHERE",
        [publication("p", listed(1, "a")), publication("q", listed(1))],
        {"insert": None, "update": None, "delete": None},
    ),
    (
        "R3.4 only for its own actions",
        [publication("p", listed(1, "a")), publication("q", listed(1), publish="insert")],
        {"insert": None, "update": ["a"], "delete": ["a"]},
    ),
    (
        "R3.4 all tables",
        [publication("p", listed(1, "a")), publication("q", all_tables=True, publish="delete")],
        {"insert": ["a"], "update": ["a"], "delete": None},
    ),
    (
        "R3.4 the table's schema, even where its own publication has a filter",
        [publication("p", listed(1, "a"), schemas=["s"])],
        {"insert": None, "update": None, "delete": None},
    ),
    (
        "R3.7 another schema",
        [publication("p", listed(1, "a"), schemas=["other"])],
        {"insert": ["a"], "update": ["a"], "delete": ["a"]},
    ),
    (
        "R3.4 no membership of its own",
        [publication("p", listed(2, "a"))],
        {"insert": None, "update": None, "delete": None},
    ),
    (
        "R3.5 OR in the order of the set, each for its own actions",
        [publication("p", listed(1, "a > 100"), publish="insert"), publication("q", listed(1, "id > 10"))],
        {"insert": ["a > 100", "id > 10"], "update": ["id > 10"], "delete": ["id > 10"]},
    ),
    (
        "R3.6 no effective publication publishes it",
        [publication("p", listed(1, "a"), publish="insert")],
        {"insert": ["a"], "update": None, "delete": None},
    ),
    (
        "the same filter twice",
        [publication("p", listed(1, "a")), publication("q", listed(1, "a"))],
        {"insert": ["a"], "update": ["a"], "delete": ["a"]},
    ),
]


@pytest.mark.parametrize(
    ("publications", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_filters_are_combined_per_action(
    publications: list[Publication], expected: dict[str, list[str] | None]
) -> None:
    assert texts(publications) == expected


def test_publication_without_filter_makes_the_or_true() -> None:
    assert any_of([row_filter("a"), None]) is None
    assert any_of([]) is None
    assert any_of([row_filter("b"), row_filter("a")]) == (row_filter("b"), row_filter("a"))


ROOT, LEAF = 1, 2
TREE = (table(ROOT, "a.root", is_partitioned=True), table(LEAF, "b.leaf", parent=ROOT))


def resolved(*publications: Publication) -> dict[str, list[str] | None]:
    names = [publication.name for publication in publications]
    resolved = resolve(catalog(*TREE, publications=publications), names, RelationId(LEAF))
    assert resolved is not None
    return {
        action.value: None if filters is None else [row_filter.sql for row_filter in filters]
        for action, filters in resolved.filters.items()
        if action in resolved.actions
    }


def test_filter_is_that_of_the_published_relation() -> None:
    """R3.2, the manual's example: via root the parent's filter, and the leaf's is ignored."""
    root, leaf = listed(ROOT, "a < 5"), listed(LEAF, "a >= 5")

    assert resolved(publication("p", root, leaf, via_root=True, publish="insert")) == {"insert": ["a < 5"]}
    assert resolved(publication("p", listed(ROOT), leaf, publish="insert")) == {"insert": ["a >= 5"]}


def test_schema_is_that_of_the_published_relation() -> None:
    """R3.7, both halves."""
    via_root = publication("p", listed(ROOT, "r"), schemas=["b"], via_root=True, publish="insert")
    as_leaf = publication("p", listed(LEAF, "l"), schemas=["a"], publish="insert")

    assert resolved(via_root) == {"insert": ["r"]}
    assert resolved(as_leaf) == {"insert": ["l"]}


def test_actions_of_a_lower_level_leak_unfiltered() -> None:
    """R2.8: the rule's own example."""
    assert resolved(
        publication("pub1", listed(ROOT, "id > 50"), via_root=True, publish="insert"),
        publication("pub2", listed(LEAF, "id > 90"), publish="update, delete"),
    ) == {"insert": ["id > 50"], "update": None, "delete": None}


def test_all_tables_below_a_filtered_root_does_not_unfilter() -> None:
    """R2.9, and its opposite where both are via root."""
    root = publication("q", listed(ROOT, "r"), via_root=True)

    assert resolved(publication("p", all_tables=True, publish="insert"), root)["insert"] == ["r"]
    assert resolved(publication("p", all_tables=True, via_root=True), root)["insert"] is None


def test_every_row_action_has_filters() -> None:
    resolved = resolve(
        catalog(*TREE, publications=[publication("p", all_tables=True)]), ["p"], RelationId(LEAF)
    )

    assert resolved is not None
    assert set(resolved.filters) == {PublishAction.INSERT, PublishAction.UPDATE, PublishAction.DELETE}
