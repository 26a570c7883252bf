"""By which columns rows are identity, however leaves and target are keyed (R8.6, R8.7, R8.12)."""

from __future__ import annotations

import pytest

from cdc_replay.model.relation import ReplicaIdentity
from cdc_replay.replay.route.row_identity import LeafVersion, RowIdentity, key_of, row_identity
from fixtures.catalogs import table
from unit.replay.route.changes import relation

ROOT = table(1, "s.t1", is_partitioned=True)
LEAVES = {oid: table(oid, f"s.t{oid}", parent=1) for oid in (2, 3)}
FULL = "full"
ALL = ("id", "a", "b")


def leaf_version(key: str, *, oid: int = 2, via_root: bool = True) -> LeafVersion:
    """Of a leaf that sends this key of an old row, or all of it."""
    identity = ReplicaIdentity.FULL if key == FULL else ReplicaIdentity.DEFAULT
    sent = relation(oid, "id a b", key="" if key == FULL else key, identity=identity)
    return sent, ROOT if via_root else LEAVES[oid]


BY_ALL = RowIdentity(ALL, is_keyed=False)


def by_target(*columns: str) -> RowIdentity:
    return RowIdentity(columns, is_keyed=True)


def by_leaf(*columns: str) -> RowIdentity:
    return RowIdentity(columns, is_keyed=True, is_per_leaf=True)


@pytest.mark.parametrize(
    ("target", "keys", "expected"),
    [
        # the target's key is sent
        (("id",), ["id", "id a"], by_target("id")),
        (("id",), [FULL, "id"], by_target("id")),
        (("id", "a"), [FULL, FULL], by_target("id", "a")),
        # another key is sent, the same by all leaves
        (("id", "a"), ["id", "id"], by_leaf("id")),
        ((), ["id", "id"], by_leaf("id")),
        (("a",), ["id b", "b id"], by_leaf("b", "id")),
        # nothing is sent, or not the same by all: UPDATE and DELETE are refused for those that lack it
        (("a",), ["id", "b"], by_target("a")),
        (("a",), ["", "id"], by_target("a")),
        ((), [FULL, "id"], BY_ALL),
        ((), ["", ""], BY_ALL),
        # whole rows
        ((), [FULL, FULL], BY_ALL),
        # only INSERTs are published
        (("id",), [], by_target("id")),
        ((), [], BY_ALL),
    ],
)
def test_rows_of_partitions_are_found_by_the_key_that_is_sent(
    target: tuple[str, ...], keys: list[str], expected: RowIdentity
) -> None:
    """R8.11, R8.12, R1.7."""
    leaves = [leaf_version(key, oid=oid) for oid, key in zip((2, 3), keys, strict=False)]

    identity = row_identity(target, ALL, leaves, is_partitioned=False)

    assert (identity.is_keyed, identity.is_per_leaf) == (expected.is_keyed, expected.is_per_leaf)
    assert sorted(identity.columns) == sorted(expected.columns)


@pytest.mark.parametrize(
    ("is_partitioned", "expected"), [(True, by_leaf("id")), (False, by_target("id", "a"))]
)
def test_plain_target_alone_decides_without_partitions(is_partitioned: bool, expected: RowIdentity) -> None:
    """R8.7: a plain target whose key is not sent refuses; a partitioned one is searched by what is sent."""
    identity = row_identity(
        ("id", "a"), ALL, [leaf_version("id", via_root=False)], is_partitioned=is_partitioned
    )

    assert identity == expected


def test_unpublished_key_finds_no_rows() -> None:
    """R6.6: the column list of an insert-only publication may omit it."""
    assert row_identity((), ("a", "b"), [leaf_version("id")], is_partitioned=True) == RowIdentity(
        ("a", "b"), False
    )
    assert key_of(leaf_version("id a")[0]) == ("id", "a")
