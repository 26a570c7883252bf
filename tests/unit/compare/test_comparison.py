"""Merging the rows of two sides counts every difference once, missing and changed rows separately."""

from __future__ import annotations

import random
from collections import Counter
from hashlib import md5

import pytest

from cdc_replay.compare.comparison import DifferenceCounts, compare_rows
from cdc_replay.compare.difference import DifferenceKind
from cdc_replay.compare.digest import HashedRow

MISSING, UNEXPECTED = DifferenceKind.MISSING, DifferenceKind.UNEXPECTED
OUTSIDE, DIFFERENT = DifferenceKind.OUTSIDE_FILTER, DifferenceKind.DIFFERENT


def hashed(rows: list[tuple[str, str]], *, outside: str = "") -> list[HashedRow]:
    """(key, value) pairs as a server returns them: grouped, in the order of their hashes.

    Values in `outside` do not satisfy the filter.
    """

    def digest(text: str) -> str:
        return md5(text.encode(), usedforsecurity=False).hexdigest()

    hashed_rows = [
        HashedRow(digest(key), digest(key + value), count, (key,), value in outside and outside != "")
        for (key, value), count in Counter(rows).items()
    ]
    return sorted(hashed_rows, key=lambda row: (row.key_hash, row.row_hash))


def differences(
    here: list[tuple[str, str]], there: list[tuple[str, str]], *, outside: str = ""
) -> dict[DifferenceKind, int]:
    counted = DifferenceCounts(limit=5)
    compare_rows(counted, ("id",), hashed(here), hashed(there, outside=outside))
    return {kind: count for kind, count in counted.counts.items() if count}


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ([("1", "a")], [("1", "a")], {}),
        ([("1", "a")], [], {MISSING: 1}),
        ([], [("1", "a")], {UNEXPECTED: 1}),
        ([], [("1", "x")], {OUTSIDE: 1}),
        ([("1", "a")], [("1", "b")], {DIFFERENT: 1}),
        # The key exists with values outside the filter: one row differs, no other difference remains.
        ([("1", "a")], [("1", "x")], {DIFFERENT: 1}),
        # One of the two rows of the key is the publisher's.
        ([("1", "a")], [("1", "a"), ("1", "b")], {UNEXPECTED: 1}),
        ([("1", "a")], [("1", "a"), ("1", "a")], {UNEXPECTED: 1}),
        ([("1", "a")], [("1", "b"), ("1", "x")], {DIFFERENT: 1, UNEXPECTED: 1}),
        ([("1", "a"), ("1", "c")], [("1", "b")], {DIFFERENT: 1, MISSING: 1}),
    ],
)
def test_difference_is_counted_once(
    here: list[tuple[str, str]], there: list[tuple[str, str]], expected: dict[DifferenceKind, int]
) -> None:
    assert differences(here, there, outside="x") == expected


def test_counts_agree_with_multisets() -> None:
    """Surplus of each side, from the definition: the rows that remain without equal ones."""
    generator = random.Random(2013)  # test data
    for _ in range(200):
        here, there = (
            [(generator.choice("1234"), generator.choice("abc")) for _ in range(generator.randrange(8))]
            for _ in range(2)
        )
        counts = Counter(differences(here, there))

        surplus_here, surplus_there = Counter(here) - Counter(there), Counter(there) - Counter(here)
        assert counts[MISSING] + counts[DIFFERENT] == surplus_here.total()
        assert counts[UNEXPECTED] + counts[DIFFERENT] == surplus_there.total()


def test_tally_counts_all_and_keeps_the_first_of_each_kind() -> None:
    counted = DifferenceCounts(limit=2)
    for number in range(5):
        counted.add(MISSING, 1, f"id={number}")
    counted.add(UNEXPECTED, 3, "id=9")

    assert counted.counts[MISSING] == 5
    assert counted.counts[UNEXPECTED] == 3
    assert [difference.key for difference in counted.first] == ["id=0", "id=1", "id=9"]
