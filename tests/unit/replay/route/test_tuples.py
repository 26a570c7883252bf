"""Lists that are made of the tuples of a batch: by name, with what is missing and what was not sent."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cdc_replay.model.relation import (
    QualifiedName,
    Relation,
    RelationColumn,
    RelationId,
    ReplicaIdentity,
)
from cdc_replay.replay.route.attribute_map import positions
from cdc_replay.replay.route.tuples import LEAF, ColumnProjection, ProjectedRows, Tuples

LEAF_TABLE = Relation(
    RelationId(6),
    1,
    QualifiedName("s", "leaf"),
    ReplicaIdentity.DEFAULT,
    tuple(RelationColumn(name, 25, -1, is_key=name == "id") for name in ("c", "b", "a", "id")),
)
CHANGES = pa.RecordBatch.from_pydict(
    {
        "old": pa.array([None, ["c0", "long", "a0", "2"], ["c9", "b9", "a9", "3"]], pa.list_(pa.string())),
        "old_kinds": pa.array([None, "tttt", "tttt"], pa.string()),
        "new": pa.array([["c", None, "a", "1"], ["c1", None, None, "2"], None], pa.list_(pa.string())),
        "new_kinds": pa.array(["tntt", "tunt", None], pa.string()),
    }
)
ROWS, ROUTES = np.arange(3), np.array([0, 1, 0])
ALL = np.ones(3, dtype=np.bool_)


def listed(picked: ProjectedRows) -> list[tuple[list[str | None] | None, str | None]]:
    return list(zip(picked.lists.to_pylist(), picked.kind_texts.to_pylist(), strict=True))


def test_columns_are_projected_by_name_and_missing_ones_marked() -> None:
    """R2.12: a partition has its columns in another order than its root, and lacks one that is new."""
    included = positions(LEAF_TABLE, ["id", "a", None, "later"])
    assert included == (3, 2, None, None)
    layout = ColumnProjection.from_positions([(included, 4), ((0, 1, 2, 3), 4)])

    picked = Tuples.from_changes(CHANGES).new_rows(ROWS, ROUTES, layout, included=ALL, fill=~ALL)

    assert layout.is_whole.tolist() == [False, True]
    assert listed(picked) == [
        (["1", "a", None, None], "tt--"),
        (["c1", None, None, "2"], "tunt"),
        (None, None),
    ]


def test_unsent_values_are_filled_from_the_old_row_on_request() -> None:
    """R4.4: NULL stays NULL, only what was not sent is filled."""
    layout = ColumnProjection.from_positions([((0, 1, 2, 3), 4), ((1, 2), 4)])

    picked = Tuples.from_changes(CHANGES).new_rows(ROWS, ROUTES, layout, included=ALL, fill=ALL)

    assert listed(picked)[1] == (["long", None], "tn")


def test_row_is_found_by_its_old_tuple_else_by_its_new_one() -> None:
    """R1.6."""
    layout = ColumnProjection.from_positions([((3,), 4), ((3, 2), 4)])

    picked = Tuples.from_changes(CHANGES).rows_before(
        ROWS, ROUTES, layout, included=np.array([True, True, False])
    )

    assert picked.lists.to_pylist() == [["1"], ["2", "a0"], None]


def test_leaf_oid_follows_the_key() -> None:
    """Rows of two leaves may have equal keys: the leaf of the row's route is part of it."""
    layout = ColumnProjection.from_positions([((3, LEAF), 4), ((3, LEAF), 4)])

    tuples = Tuples.from_changes(CHANGES).with_leaves(["6", "7"])
    picked = tuples.rows_before(ROWS, ROUTES, layout, included=ALL)

    assert layout.has_leaf
    assert picked.lists.to_pylist() == [["1", "6"], ["2", "7"], ["3", "6"]]
