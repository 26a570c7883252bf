"""Which relation a change is published as, case by case of section 2."""

from __future__ import annotations

import pytest

from cdc_replay.model.publication import Publication
from cdc_replay.model.relation import RelationId
from cdc_replay.publication.partition_root import contains, partition_root
from fixtures.catalogs import actions, catalog, listed, publication, table

ROOT, MIDDLE, LEAF, OTHER_LEAF, PLAIN = 1, 2, 3, 4, 5

TREE = (
    table(ROOT, "a.root", is_partitioned=True),
    table(MIDDLE, "b.middle", parent=ROOT, is_partitioned=True),
    table(LEAF, "c.leaf", parent=MIDDLE),
    table(OTHER_LEAF, "a.other_leaf", parent=ROOT),
    table(PLAIN, "a.plain"),
)


def published_as(publications: list[Publication], relation: int) -> tuple[int, int, tuple[str, ...]] | None:
    """Published relation, level and effective publications."""
    published = partition_root(catalog(*TREE, publications=publications), publications, RelationId(relation))
    if published is None:
        return None
    return published.table.id, published.level, tuple(effective.name for effective in published.effective)


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        (publication("p", listed(LEAF)), True),
        (publication("p", schemas=["c"]), True),
        (publication("p", all_tables=True), True),
        (publication("p", listed(ROOT)), False),
        (publication("p", schemas=["a", "b"]), False),
        (publication("p"), False),
    ],
)
def test_table_is_contained_by_name_own_schema_or_all_tables(member: Publication, expected: bool) -> None:
    """R2.2: an ancestor, or an ancestor's schema, does not contain the leaf."""
    assert contains(member, catalog(*TREE).tables[RelationId(LEAF)]) is expected


CASES: list[tuple[str, list[Publication], int, tuple[int, int, tuple[str, ...]] | None]] = [
    ("R2.3 nothing names it", [publication("p", listed(PLAIN))], LEAF, None),
    ("R2.3 a root covers its leaves", [publication("p", listed(ROOT))], LEAF, (LEAF, 0, ("p",))),
    ("R2.3 in another schema too", [publication("p", schemas=["a"])], LEAF, (LEAF, 0, ("p",))),
    ("R2.4 via root", [publication("p", listed(ROOT), via_root=True)], LEAF, (ROOT, 2, ("p",))),
    (
        "R2.4 the highest contained",
        [publication("p", listed(LEAF), listed(MIDDLE), via_root=True)],
        LEAF,
        (MIDDLE, 1, ("p",)),
    ),
    ("R2.4 a listed leaf", [publication("p", listed(LEAF), via_root=True)], LEAF, (LEAF, 0, ("p",))),
    ("R2.4 all tables", [publication("p", all_tables=True, via_root=True)], LEAF, (ROOT, 2, ("p",))),
    ("R2.4 schema of the root", [publication("p", schemas=["a"], via_root=True)], LEAF, (ROOT, 2, ("p",))),
    (
        "R2.4 schema of the middle",
        [publication("p", schemas=["b"], via_root=True)],
        LEAF,
        (MIDDLE, 1, ("p",)),
    ),
    ("R2.4 not a partition", [publication("p", all_tables=True, via_root=True)], PLAIN, (PLAIN, 0, ("p",))),
    (
        "R2.4 not via root does not raise",
        [publication("p", listed(ROOT)), publication("q", listed(MIDDLE), via_root=True)],
        LEAF,
        (MIDDLE, 1, ("q",)),
    ),
    (
        "R2.5 the highest over all, whatever it publishes",
        [publication("p", listed(LEAF)), publication("q", listed(ROOT), via_root=True, publish="truncate")],
        LEAF,
        (ROOT, 2, ("q",)),
    ),
    (
        "R2.6 all at that level",
        [
            publication("p", listed(ROOT), via_root=True),
            publication("q", listed(MIDDLE), via_root=True),
            publication("r", all_tables=True, via_root=True),
        ],
        LEAF,
        (ROOT, 2, ("p", "r")),
    ),
    (
        "R2.9 all tables below a root",
        [publication("p", all_tables=True), publication("q", listed(ROOT), via_root=True)],
        LEAF,
        (ROOT, 2, ("q",)),
    ),
    ("R2.11 a root, not via root", [publication("p", listed(ROOT), all_tables=True)], ROOT, None),
    ("R2.11 a root, via root", [publication("p", listed(ROOT), via_root=True)], ROOT, (ROOT, 0, ("p",))),
    ("R2.11 a middle, via root", [publication("p", listed(ROOT), via_root=True)], MIDDLE, (ROOT, 1, ("p",))),
]


@pytest.mark.parametrize(
    ("publications", "relation", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_highest_level_wins(
    publications: list[Publication], relation: int, expected: tuple[int, int, tuple[str, ...]] | None
) -> None:
    assert published_as(publications, relation) == expected


def test_actions_of_lower_levels_count() -> None:
    """R2.7."""
    publications = [
        publication("p", listed(ROOT), via_root=True, publish="insert"),
        publication("q", listed(LEAF), publish="update, delete"),
        publication("r", listed(PLAIN), publish="truncate"),
    ]
    published = partition_root(catalog(*TREE), publications, RelationId(LEAF))

    assert published is not None
    assert published.actions == actions("insert, update, delete")
    assert [lower.name for lower in published.lower] == ["q"]
