"""Slices of a buffer are the values that Arrow gets, wherever they lie, and keep little else in memory."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_replay.arrow.byte_slices import VIEWS, ByteSlices, view_bytes, with_views, without_views

values = st.lists(st.binary(max_size=30), max_size=20)


@st.composite
def slices_and_values(draw: st.DrawFn) -> tuple[ByteSlices, list[bytes]]:
    """Some of the values of a buffer, in any order."""
    every_value = draw(values)
    numbers = st.lists(st.integers(0, len(every_value) - 1)) if every_value else st.just([])
    chosen = draw(numbers)
    slices = ByteSlices.from_values(every_value)[np.array(chosen, dtype=np.int64)]
    return slices, [every_value[number] for number in chosen]


@settings(deadline=None)
@given(slices_and_values())
def test_views_are_the_values(given_slices: tuple[ByteSlices, list[bytes]]) -> None:
    slices, expected = given_slices
    views = slices.views()
    views.validate(full=True)
    assert views.type == VIEWS
    assert views.to_pylist() == expected
    assert [slices[number] for number in range(len(slices))] == expected
    assert view_bytes(views) == sum(map(len, expected))


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 11, 12, 13, 16, 17])
def test_short_values_are_within_their_views(length: int) -> None:
    expected = [bytes(range(start, start + length)) for start in range(3)]
    views = ByteSlices.from_values(expected).views()
    views.validate(full=True)
    assert views.to_pylist() == expected
    assert views.equals(pa.array(expected, VIEWS))


def test_mask_selects_values() -> None:
    slices = ByteSlices.from_values([b"a", b"bc", b"def"])
    chosen = slices[np.array([True, False, True])]
    assert chosen.views().to_pylist() == [b"a", b"def"]
    assert chosen.first_bytes().tolist() == [*b"ad"]


def test_few_values_do_not_keep_the_buffer() -> None:
    slices = ByteSlices.from_values([b"x" * 1000] * 1000)
    for count, most_bytes in ((1, 2_000), (400, 500_000), (1000, 1_020_000)):
        views = slices[np.arange(count)].views()
        assert views.nbytes <= most_bytes
        assert views.to_pylist() == [b"x" * 1000] * count


def test_bytes_of_a_part_are_counted_alone() -> None:
    views = ByteSlices.from_values([b"a", b"bc", b"d" * 20, b""]).views()
    assert [view_bytes(views.slice(start)) for start in range(5)] == [23, 22, 20, 0, 0]


def test_only_binary_columns_become_views() -> None:
    batch = pa.record_batch({"message": pa.array([b"a", b"b" * 20]), "kind": ["I", "U"], "lsn": [1, 2]})
    viewed = with_views(batch)
    assert viewed.schema.types == [VIEWS, pa.string(), pa.int64()]
    assert with_views(viewed).equals(viewed)
    assert without_views(viewed).equals(batch)
    assert without_views(batch).equals(batch)
