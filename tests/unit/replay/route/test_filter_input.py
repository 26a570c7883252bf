"""What filters read of a row group is taken once, and again only for other rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cdc_replay.replay.route.filter_input import FilterInput, SharedInputs
from cdc_replay.replay.route.tuples import Tuples

CHANGES = pa.RecordBatch.from_pydict(
    {
        "old": pa.array([None, ["2", "two"], ["3", "three"]], pa.list_(pa.string())),
        "old_kinds": pa.array([None, "tt", "tt"], pa.string()),
        "new": pa.array([["1", "one"], ["20", None], None], pa.list_(pa.string())),
        "new_kinds": pa.array(["tt", "tu", None], pa.string()),
    }
)
ALL, TWO = np.arange(3), np.arange(2)
POSITIONS = {7: 0, 8: 1, 9: None}
"""By attribute number; the tuples lack the last one."""


def taken(rows: FilterInput) -> dict[int, list[str | None]]:
    return {attnum: texts.to_pylist() for attnum, texts in rows.columns(POSITIONS).items()}


def test_new_rows_are_filled_with_what_was_not_sent() -> None:
    """R4.4."""
    inputs = SharedInputs(Tuples.from_changes(CHANGES)).of("t", ALL)
    assert taken(inputs.old) == {7: [None, "2", "3"], 8: [None, "two", "three"], 9: [None] * 3}
    assert taken(inputs.new) == {7: ["1", "20", None], 8: ["one", "two", None], 9: [None] * 3}


def test_a_column_is_taken_once() -> None:
    rows = SharedInputs(Tuples.from_changes(CHANGES)).of("t", ALL).new
    [first] = rows.columns({7: 0}).values()
    assert rows.columns({7: 0, 8: 1})[7] is first


def test_inputs_are_shared_by_equal_rows_of_one_layout() -> None:
    shared = SharedInputs(Tuples.from_changes(CHANGES))
    inputs = shared.of("t", ALL)
    assert shared.of("u", TWO) is not inputs
    assert shared.of("t", ALL.copy()) is inputs
    assert taken(shared.of("t", TWO).new)[7] == ["1", "20"]
    assert shared.of("t", ALL) is not inputs
