"""Which Ts of a pull may be those of a partitioned table, and so need another peek (R2.13, R2.14)."""

from __future__ import annotations

from collections.abc import Sequence, Set

import pytest

from cdc_replay.capture.root_truncates import PullRange, may_have_truncated_a_member
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import Publication, PublisherCatalog, Table
from cdc_replay.model.relation import RelationId
from cdc_replay.publication.partition_root import publishes
from fixtures.catalogs import catalog, listed, publication, table

ROOT, MIDDLE, DEEP, SOUTH, PLAIN, OTHER = range(1, 7)
CAPTURED = publication("cdc_replay_capture_t", listed(ROOT), listed(PLAIN))
ROOTS = (CAPTURED, publication("cdc_replay_capture_t0", listed(ROOT), via_root=True))
ROOTS_AND_MIDDLES = (*ROOTS, publication("cdc_replay_capture_t1", listed(MIDDLE), via_root=True))
WITHOUT_SOUTH = (
    table(ROOT, "s.root", is_partitioned=True),
    table(MIDDLE, "s.middle", parent=ROOT, is_partitioned=True),
    table(DEEP, "s.deep", parent=MIDDLE),
    table(PLAIN, "s.plain"),
)
SOUTH_OF_ROOT = table(SOUTH, "s.south", parent=ROOT)
TREE = catalog(*WITHOUT_SOUTH, SOUTH_OF_ROOT, publications=ROOTS)
TREE_WITH_MIDDLE = catalog(*WITHOUT_SOUTH, SOUTH_OF_ROOT, publications=ROOTS_AND_MIDDLES)


def may_have_truncated(
    truncated: Set[int],
    *catalogs: PublisherCatalog,
    before: PublisherCatalog | None = TREE,
    is_exact: bool = True,
) -> bool:
    """With these `catalogs` after `before`."""
    *between, now = catalogs or (TREE,)
    pull = PullRange(Lsn(1), Lsn(2), before, now, lambda: between, is_exact)
    return may_have_truncated_a_member(pull, {RelationId(oid) for oid in truncated})


@pytest.mark.parametrize(
    ("truncated", "expected"),
    [
        (set(), False),
        ({PLAIN}, False),
        ({DEEP}, False),
        ({SOUTH, PLAIN}, False),
        ({DEEP, SOUTH}, True),
        ({DEEP, SOUTH, PLAIN}, True),
        ({OTHER}, True),
    ],
)
def test_all_leaves_of_a_member_must_be_truncated(truncated: set[int], expected: bool) -> None:
    """Also by several statements. A relation that no catalog has may be anything."""
    assert may_have_truncated(truncated) is expected


@pytest.mark.parametrize(("truncated", "expected"), [({DEEP}, True), ({SOUTH}, False)])
def test_a_member_below_another_one_has_fewer_leaves(truncated: set[int], expected: bool) -> None:
    assert may_have_truncated(truncated, TREE_WITH_MIDDLE, before=TREE_WITH_MIDDLE) is expected


FEWER = catalog(*WITHOUT_SOUTH, publications=ROOTS)
EMPTY = catalog(table(ROOT, "s.root", is_partitioned=True), table(PLAIN, "s.plain"), publications=ROOTS)


def test_a_leaf_of_a_member_suffices_without_event_triggers() -> None:
    assert may_have_truncated({SOUTH}, is_exact=False)
    assert not may_have_truncated({PLAIN}, is_exact=False)


def test_all_leaves_of_one_catalog_suffice() -> None:
    """Also of one in between."""
    assert may_have_truncated({DEEP}, FEWER, TREE)
    assert may_have_truncated({DEEP}, FEWER)
    assert may_have_truncated({DEEP}, TREE, before=FEWER)
    assert not may_have_truncated({SOUTH}, FEWER, TREE)


def test_the_leaf_that_is_not_truncated_may_be_another_one_in_each_catalog() -> None:
    only_south = catalog(
        WITHOUT_SOUTH[0], table(DEEP, "s.deep"), WITHOUT_SOUTH[3], SOUTH_OF_ROOT, publications=ROOTS
    )
    assert not may_have_truncated({PLAIN}, only_south, FEWER)
    assert may_have_truncated({DEEP}, only_south, FEWER)


def test_catalogs_in_between_do_not_cost_a_look_at_each_of_their_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where thousands of partitions are created between two pulls."""
    looks: list[Table] = []

    def count(publication: Publication, leaf: Table, ancestors: Sequence[Table]) -> bool:
        looks.append(leaf)
        return publishes(publication, leaf, ancestors)

    monkeypatch.setattr("cdc_replay.capture.root_truncates.publishes", count)
    leaves = [table(100 + index, f"s.leaf{index}", parent=ROOT) for index in range(50)]
    growing = [catalog(*WITHOUT_SOUTH, *leaves[:size], publications=ROOTS) for size in range(1, 50)]
    assert not may_have_truncated({PLAIN}, *growing)
    assert len(looks) <= 2 * len(growing)


def test_leaves_that_are_not_captured_do_not_count() -> None:
    capture_of_deep = publication("cdc_replay_capture_t", listed(DEEP))
    uncaptured = catalog(*WITHOUT_SOUTH, SOUTH_OF_ROOT, publications=(capture_of_deep, ROOTS[1]))
    assert may_have_truncated({DEEP}, uncaptured, before=uncaptured)


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_member_without_leaves_needs_no_truncated_relation(is_exact: bool) -> None:
    assert may_have_truncated(set(), EMPTY, TREE, is_exact=is_exact)
    assert may_have_truncated(set(), before=EMPTY, is_exact=is_exact)
    assert not may_have_truncated(set(), TREE, is_exact=is_exact)


def test_without_event_triggers_a_member_that_exchanged_all_leaves_may_have_had_none() -> None:
    south_alone = catalog(
        table(ROOT, "s.root", is_partitioned=True), SOUTH_OF_ROOT, table(PLAIN, "s.plain"), publications=ROOTS
    )
    assert may_have_truncated(set(), south_alone, before=FEWER, is_exact=False)
    assert not may_have_truncated(set(), south_alone, before=FEWER)


def test_any_relation_or_member_suffices_if_no_earlier_catalog_is_known() -> None:
    plain = catalog(table(PLAIN, "s.plain"), publications=(CAPTURED,))
    assert may_have_truncated({PLAIN}, plain, before=None)
    assert may_have_truncated(set(), before=None)
    assert not may_have_truncated(set(), plain, before=None)
