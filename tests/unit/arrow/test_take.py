"""Rows are taken as by Arrow, with NULLs and with offsets."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_replay.arrow.take import take_lists, take_rows

TEXTS = pa.list_(pa.string())
texts = st.none() | st.text(max_size=5)
rows_of_texts = st.lists(st.none() | st.lists(texts, max_size=4), max_size=12)


@st.composite
def lists_and_rows(draw: st.DrawFn) -> tuple[pa.ListArray, list[int]]:
    """An array that may be a slice of another, and rows of it."""
    array = pa.array(draw(rows_of_texts), TEXTS)
    start = draw(st.integers(0, len(array)))
    array = array.slice(start, draw(st.integers(0, len(array) - start)))
    rows = st.lists(st.integers(0, len(array) - 1), max_size=20) if len(array) else st.just([])
    return array, draw(rows)


@settings(deadline=None)
@given(lists_and_rows())
def test_take_lists_equals_arrows_take(given_lists: tuple[pa.ListArray, list[int]]) -> None:
    lists, rows = given_lists
    rows_taken = take_lists(lists, np.array(rows, dtype=np.int64))
    rows_taken.validate(full=True)
    assert rows_taken.equals(lists.take(pa.array(rows, pa.int64())))


def test_batch_keeps_its_schema_and_other_columns() -> None:
    schema = pa.schema([("number", pa.int64()), ("kinds", pa.string()), ("values", TEXTS)])
    batch = pa.RecordBatch.from_pylist(
        [
            {"number": 1, "kinds": "tn", "values": ["a", None]},
            {"number": 2, "kinds": None, "values": None},
            {"number": 3, "kinds": "tt", "values": ["ä", ""]},
        ],
        schema=schema,
    )
    order = np.array([2, 0, 1, 2])
    rows_taken = take_rows(batch.slice(0), order)
    rows_taken.validate(full=True)
    assert rows_taken.schema == schema
    assert rows_taken.equals(batch.take(pa.array(order)))


def test_lists_over_values_with_an_offset_are_taken() -> None:
    values = pa.array(["skipped", "a", "b", None, "c"]).slice(1)
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 4], pa.int32()), values)
    assert take_lists(lists, np.array([1, 0])).to_pylist() == [["b", None, "c"], ["a"]]


def test_texts_beyond_the_limit_of_an_array_are_refused() -> None:
    lists = pa.array([["x" * (1 << 20)]], TEXTS)
    with pytest.raises(pa.ArrowInvalid, match="exceed the limit of an array"):
        take_lists(lists, np.zeros(2048, dtype=np.int64))
