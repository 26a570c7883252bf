"""Which Ts of a pull may be those of a partitioned table, and so need another peek (R2.13, R2.14)."""

from __future__ import annotations

from collections.abc import Set

import pytest

from cdc_replay.capture.root_truncates import PullRange, may_name_a_member
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import RelationId
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


def may_name(
    truncated: Set[int],
    *catalogs: PublisherCatalog,
    before: PublisherCatalog | None = TREE,
    is_exact: bool = True,
) -> bool:
    """With these `catalogs` after `before`."""
    *between, now = catalogs or (TREE,)
    pull = PullRange(Lsn(1), Lsn(2), before, now, lambda: between, is_exact)
    return may_name_a_member(pull, {RelationId(oid) for oid in truncated})


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
    assert may_name(truncated) is expected


@pytest.mark.parametrize(("truncated", "expected"), [({DEEP}, True), ({SOUTH}, False)])
def test_a_member_below_another_one_has_fewer_leaves(truncated: set[int], expected: bool) -> None:
    assert may_name(truncated, TREE_WITH_MIDDLE, before=TREE_WITH_MIDDLE) is expected


def test_a_leaf_of_a_member_suffices_without_event_triggers() -> None:
    assert may_name({SOUTH}, is_exact=False)
    assert not may_name({PLAIN}, is_exact=False)


def test_a_leaf_of_a_member_suffices_if_its_leaves_changed() -> None:
    """In between only, too; a leaf that the capture publications do not contain is none of them."""
    fewer = catalog(*WITHOUT_SOUTH, publications=ROOTS)
    capture_of_deep = publication("cdc_replay_capture_t", listed(DEEP))
    uncaptured = catalog(*WITHOUT_SOUTH, SOUTH_OF_ROOT, publications=(capture_of_deep, ROOTS[1]))
    assert may_name({DEEP}, fewer, TREE)
    assert may_name({DEEP}, fewer)
    assert may_name({DEEP}, TREE, before=fewer)
    assert may_name({DEEP}, uncaptured, before=uncaptured)


def test_any_relation_suffices_if_no_earlier_catalog_is_known() -> None:
    assert may_name({PLAIN}, before=None)
    assert not may_name(set(), before=None)
