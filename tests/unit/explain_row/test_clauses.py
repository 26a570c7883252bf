"""What each publication contributes, one by one, and which tables a row can be in."""

from __future__ import annotations

import pytest

from cdc_replay.errors import InvalidConfiguration
from cdc_replay.explain_row.clauses import copy_parts, publication_parts, why_published_as
from cdc_replay.explain_row.row_table import find_table
from cdc_replay.model.explained_row import ClauseRole
from cdc_replay.model.publication import PublishAction
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.publication.partition_root import partition_root
from fixtures.catalogs import catalog, listed, publication, table

ROOT = table(1, "s.root", is_partitioned=True)
LEAF = table(2, "s.leaf", parent=1)
DROPPED = table(3, "s.dropped", parent=1)
OTHER = table(4, "s.other")

PUBLICATIONS = [
    publication("via_root", listed(1, where="a > 5"), via_root=True),
    publication("inserts", listed(1, where="a > 7"), via_root=True, publish="insert"),
    publication("whole", listed(1), via_root=True),
    publication("of_leaf", listed(2, where="b > 5")),
    publication("others", listed(4)),
]
NAMES = ("via_root", "inserts", "whole", "of_leaf", "others", "nowhere")
NOW = catalog(ROOT, LEAF, OTHER, publications=PUBLICATIONS)
BEFORE = catalog(ROOT, LEAF, DROPPED, OTHER, publications=PUBLICATIONS)


def test_the_part_of_each_publication() -> None:
    """Filters of the highest level count, each for the actions that its publication publishes."""
    parts = publication_parts(NOW, NAMES, LEAF.id, PublishAction.UPDATE)
    assert {part.publication: part.role for part in parts} == {
        "via_root": ClauseRole.FILTER,
        "inserts": ClauseRole.OTHER_ACTIONS,
        "whole": ClauseRole.EVERY_ROW,
        "of_leaf": ClauseRole.LOWER_LEVEL,
        "others": ClauseRole.NOT_LISTED,
        "nowhere": ClauseRole.MISSING,
    }
    assert [part.row_filter.sql for part in parts if part.row_filter] == ["a > 5"]
    copied = copy_parts(NOW, NAMES, LEAF.id)
    assert [part.row_filter.sql for part in copied if part.row_filter] == ["a > 5", "a > 7"]


def test_truncate_has_no_row_filter() -> None:
    parts = publication_parts(NOW, NAMES, ROOT.id, PublishAction.TRUNCATE)
    assert [part.row_filter for part in parts] == [None] * len(NAMES)


def test_the_name_of_the_published_relation_has_its_reason() -> None:
    root, own = (
        partition_root(NOW, NOW.existing(names), LEAF.id) for names in (("via_root", "of_leaf"), ("of_leaf",))
    )
    assert root is not None
    assert 'publication "via_root" has publish_via_partition_root' in why_published_as(root, LEAF.name)
    assert own is not None
    assert 'under its own name, by publication "of_leaf"' in why_published_as(own, LEAF.name)


@pytest.mark.parametrize("name", ["root", "leaf", "dropped"])
def test_a_table_is_named_by_any_table_of_its_tree(name: str) -> None:
    """Rows of a partition that was dropped since are still in the log."""
    found = find_table(QualifiedName("s", name), [BEFORE, NOW], ("via_root",), {})
    assert (found.table, found.target) == (ROOT, ROOT.name)
    assert (set(found.leaves), set(found.truncated)) == (
        {LEAF.id, DROPPED.id},
        {ROOT.id, LEAF.id, DROPPED.id},
    )
    assert (found.key, set(found.names), found.is_published) == (("id",), {ROOT.name}, True)


def test_a_partition_that_is_published_itself_is_its_own_table() -> None:
    found = find_table(LEAF.name, [NOW], ("of_leaf",), {})
    assert (found.table, set(found.leaves), set(found.truncated)) == (LEAF, {LEAF.id}, {ROOT.id, LEAF.id})
    renamed = find_table(
        QualifiedName("s", "new"), [NOW], ("others",), {RelationId(4): QualifiedName("s", "new")}
    )
    assert (renamed.table, renamed.target) == (OTHER, QualifiedName("s", "new"))


def test_an_unpublished_table_is_known_and_an_unknown_one_refused() -> None:
    assert not find_table(OTHER.name, [NOW], ("via_root",), {}).is_published
    with pytest.raises(InvalidConfiguration, match=r'(?s)no table "s\.othr".*HINT: Did you mean s\.other\?'):
        find_table(QualifiedName("s", "othr"), [NOW], ("via_root",), {})
