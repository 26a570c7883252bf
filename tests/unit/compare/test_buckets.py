"""How far buckets are split, and which of two lists differ."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pytest
from psycopg import sql

from cdc_replay.compare.buckets import (
    FEW_ROWS,
    FIRST_BITS,
    MOST_BITS,
    MOST_BUCKETS,
    WIDEST_SPLIT,
    BucketDigest,
    Buckets,
    UnequalBuckets,
    compare_buckets,
    compare_digests,
)
from cdc_replay.compare.digest import TableSide
from cdc_replay.errors import PublisherNotReady
from cdc_replay.subscriber.as_owner import TargetSession


def unequal(rows: int, buckets: int, bits: int = FIRST_BITS) -> UnequalBuckets:
    return UnequalBuckets(Buckets(bits, tuple(range(buckets))), rows, 0)


@pytest.mark.parametrize(
    ("buckets", "bits"),
    [
        (unequal(0, 0), 0),
        (unequal(1, 1), 0),
        (unequal(FEW_ROWS * 10, 10), 0),
        (unequal(FEW_ROWS * 10 + 1, 10), 2),  # into 4: of 16 rows about 4 are left in each
        (unequal(FEW_ROWS * 10 * 4, 10), 3),
        (unequal(10**9, 10), WIDEST_SPLIT),
        (unequal(10**9, 10, MOST_BITS - 3), 3),
        (unequal(10**9, 10, MOST_BITS), 0),
        (unequal(10**9, MOST_BUCKETS), 0),
        (unequal(10**9, MOST_BUCKETS // 2 + 1), 0),  # twice as many would be too many
        (unequal(10**9, MOST_BUCKETS // 8), 3),
    ],
)
def test_bucket_is_split_until_it_has_few_rows(buckets: UnequalBuckets, bits: int) -> None:
    assert buckets.split_bits == bits


def digests(*listed: tuple[int, int, bytes]) -> Iterator[BucketDigest]:
    return (BucketDigest(bucket_id, rows, 0, sums) for bucket_id, rows, sums in listed)


def unequal_rows(here: Iterator[BucketDigest], there: Iterator[BucketDigest]) -> list[tuple[int, int]]:
    return [(bucket.bucket_id, bucket.rows) for bucket in compare_digests(here, there) if not bucket.is_equal]


def test_buckets_differ_in_their_sums_or_exist_on_one_side() -> None:
    here = digests((1, 5, b"a"), (2, 5, b"a"), (4, 1, b"c"), (6, 2, b"d"), (7, 9, b"e"))
    there = digests((1, 5, b"a"), (2, 7, b"b"), (3, 1, b"a"), (6, 2, b"x"), (7, 9, b"e"), (9, 1, b"a"))
    assert unequal_rows(here, there) == [(2, 7), (3, 1), (4, 1), (6, 2), (9, 1)]


def test_equal_sums_with_different_row_counts_differ() -> None:
    """A row whose hash is 0 would not change the sum."""
    assert unequal_rows(digests((1, 5, b"a")), digests((1, 6, b"a"))) == [(1, 6)]


def test_two_empty_sides_are_equal() -> None:
    assert unequal_rows(digests(), digests()) == []


@dataclass(frozen=True)
class Hashing:
    """A server that answers once both are asked, or that fails while the other one still hashes."""

    asked: threading.Barrier
    cancelled: threading.Event
    error: Exception | None = None

    @contextlib.contextmanager
    def copy(self, _query: sql.Composed) -> Iterator[list[bytes]]:
        self.asked.wait(10)
        if self.error is not None:
            raise self.error
        yield [b"1\t5\t0\t7\t9\n"]

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass(frozen=True)
class HashingUntilCancelled(Hashing):
    @contextlib.contextmanager
    def copy(self, _query: sql.Composed) -> Iterator[list[bytes]]:
        self.asked.wait(10)
        assert self.cancelled.wait(10)
        yield []


def side(session: Hashing) -> TableSide:
    rows = sql.SQL("select id from t")
    return TableSide(rows, ("id",), ("id",), cast("TargetSession", session), "table t")


def test_both_servers_hash_at_the_same_time() -> None:
    asked = threading.Barrier(2)
    publisher, subscriber = (side(Hashing(asked, threading.Event())) for _ in range(2))
    with compare_buckets(publisher, subscriber, 8) as compared:
        assert [(bucket.bucket_id, bucket.rows, bucket.is_equal) for bucket in compared] == [(1, 5, True)]


def test_a_refused_side_ends_the_other_one() -> None:
    asked = threading.Barrier(2)
    refused = Hashing(asked, threading.Event(), error=PublisherNotReady("refused"))
    hashing = HashingUntilCancelled(asked, threading.Event())
    with pytest.raises(PublisherNotReady, match="refused"), compare_buckets(side(refused), side(hashing), 8):
        pass
    assert hashing.cancelled.is_set()
