"""Which transient rows need not be staged, and how their keys reach the driver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_replay.model.relation import QualifiedName
from cdc_replay.replay.apply.stage_table import StageTable
from cdc_replay.replay.apply.transient_keys import TransientKeys, split_transient_keys, tracks_integer_keys
from cdc_replay.replay.compact.fold_frames import OUTPUT
from cdc_replay.subscriber.target_tables import Operator, TargetColumn
from fixtures.target_tables import target_column

KEYS = st.lists(st.integers(-(2**63), 2**63 - 1))


def net(kind: str, *key: str | None, **more: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(OUTPUT.names)
    counts = {"target": 0, "update_missing": 0, "delete_missing": 0, "last_lsn": 1}
    return nothing | counts | {"kind": kind, "base_key": list(key)} | more


@given(KEYS)
def test_transient_keys_are_encoded_without_loss(keys: list[int]) -> None:
    sent = TransientKeys.encode(np.array(keys, dtype=np.int64))
    assert TransientKeys(sent.count, sent.steps).keys.tolist() == sorted(keys)


def test_new_keys_take_two_bytes_at_most() -> None:
    keys = np.arange(10**9, 10**9 + 300_000, 3)
    assert len(TransientKeys.encode(keys).steps) < 2 * len(keys)


def test_transient_rows_are_split_off_unless_they_have_conflicts() -> None:
    rows = [
        net("N", "7"),
        net("I", "8", values=["8"], kinds="t"),
        net("N", "-9", delete_missing=1),
        net("N", "10", update_missing=2),
        net("N", "11", conflicts='{"insert_exists": 1}'),
        net("N", None),
        net("U", "12", values=["12"], kinds="t"),
        net("N", "-13"),
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=OUTPUT)
    staged, keys = split_transient_keys(batch)
    assert keys.tolist() == [7, -13]
    assert staged.to_pylist() == rows[1:7]


@pytest.mark.parametrize("text", ["1.0", "x", "", str(2**63)])
def test_keys_that_are_not_integers_are_staged(text: str) -> None:
    """The publisher's column has another type: the subscriber decides what its text means (R8.1)."""
    batch = pa.RecordBatch.from_pylist([net("N", "7"), net("N", text)], schema=OUTPUT)
    staged, keys = split_transient_keys(batch)
    assert staged.equals(batch)
    assert keys.tolist() == []


EQUAL, LESS = Operator("pg_catalog", "="), Operator("pg_catalog", "<")


def key(type_sql: str = "integer", equality: Operator = EQUAL, less: Operator | None = LESS) -> TargetColumn:
    return target_column("id", type_sql, equality=equality, less=less)


@pytest.mark.parametrize(
    ("keys", "has_own_key", "expected"),
    [
        ((key("smallint"),), True, True),
        ((key(),), True, True),
        ((key("bigint"),), True, True),
        ((key("numeric"),), True, False),
        ((key(less=None),), True, False),
        ((key(equality=Operator("public", "=")),), True, False),
        ((key(less=Operator("public", "<")),), True, False),
        ((key(), key()), True, False),
        ((key(),), False, False),
    ],
)
def test_transient_keys_are_tracked_if_the_index_compares_integers(
    keys: tuple[TargetColumn, ...], has_own_key: bool, expected: bool
) -> None:
    key_columns = tuple(range(len(keys)))
    table = StageTable(
        0, QualifiedName("public", "t"), "stage", keys, keys, key_columns, True, has_own_key, False
    )
    assert tracks_integer_keys(table) is expected
