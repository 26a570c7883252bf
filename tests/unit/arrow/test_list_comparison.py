"""Lists of texts are compared as Python does, with NULLs and with offsets."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_replay.arrow.list_comparison import lists_differ

TEXTS = pa.list_(pa.string())
texts = st.none() | st.sampled_from(["", "a", "ab", "ä", "b"])
pairs = st.lists(
    st.tuples(*[st.none() | st.lists(texts, max_size=3)] * 2)
    | st.lists(texts, max_size=3).map(lambda equal: (equal, equal)),
    max_size=12,
)


@settings(deadline=None)
@given(pairs, st.integers(0, 3), st.integers(0, 3))
def test_lists_differ_as_in_python(
    rows: list[tuple[list[str | None] | None, list[str | None] | None]], left_skips: int, right_skips: int
) -> None:
    """Whatever precedes the arrays' slices."""
    left = pa.array([["before"]] * left_skips + [pair[0] for pair in rows], TEXTS).slice(left_skips)
    right = pa.array([["x", None]] * right_skips + [pair[1] for pair in rows], TEXTS).slice(right_skips)
    differ = [None not in pair and pair[0] != pair[1] for pair in rows]
    assert lists_differ(left, right).tolist() == differ


def test_rows_are_compared_with_those_before_them() -> None:
    keys = pa.array([["1", None], ["1", None], ["1", ""], None, ["2"], ["2", "3"]], TEXTS)
    differ = lists_differ(keys.slice(1), keys.slice(0, len(keys) - 1))
    assert differ.tolist() == [False, True, False, False, True]
