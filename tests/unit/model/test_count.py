"""Counts with their noun."""

from __future__ import annotations

import pytest

from cdc_replay.model.count import count_in_words, rows_differ


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1_100_000, "1,100,000 rows")]
)
def test_count_agrees_with_its_noun(count: int, words: str) -> None:
    assert count_in_words(count, "row") == words


def test_verb_agrees_with_count_of_rows() -> None:
    assert (rows_differ(1), rows_differ(1200)) == ("1 row differs", "1,200 rows differ")
