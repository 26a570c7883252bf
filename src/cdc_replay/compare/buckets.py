"""Compare the two sides of a table by digests of buckets of its rows, computed by each server.

The first bits of its key's hash decide a row's bucket. Both servers sum the row hashes of each bucket, so a
digest depends on neither order nor plan. The two lists arrive in order and are merged as they arrive.

To find the rows that can differ (`unequal_buckets`), buckets with unequal sums are split by more bits, until
one of these holds:

- a bucket has so few rows that further digests would cost about as much as its rows;
- there are too many unequal buckets to name them in a query;
- splitting does not reduce the rows: nearly everything differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.compare.digest import TableSide, hash_of
from cdc_replay.postgres.identifiers import names

logger = logging.getLogger(__name__)

FIRST_BITS: Final = 12
"""The first level has 2^12 buckets: the minimum that is moved for a big table."""

MOST_BITS: Final = 31
"""A bucket id is a positive integer of four bytes."""

WIDEST_SPLIT: Final = 8
"""A bucket is split into at most 2^8."""

FEW_ROWS: Final = 16
"""A bucket with so few rows is not split: its rows cost about as much as digests."""

MOST_BUCKETS: Final = 1 << 19
"""Most buckets of one level: their ids are held in memory, and named in a query."""

DIGESTS: Final = """
    select {bucket} as bucket,
           count(*) as rows,
           count(*) filter (where outside) as outside,
           sum(('x' || left(row_hash, 16))::bit(64)::bigint) as high,
           sum(('x' || right(row_hash, 16))::bit(64)::bigint) as low
    from ({hashed}) as hashed
    group by 1
    order by 1
"""


_DIGEST: Final = re.compile(rb"(\d{1,10})\t(\d{1,18})\t(\d{1,18})\t(-?\d{1,38}\t-?\d{1,38}\n)")
"""A row of `DIGESTS` in COPY's text format."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets by the first `bits` bits of the hash of the key."""

    bits: int
    ids: tuple[int, ...]

    def condition(self, key_hash: sql.Composable) -> sql.Composed:
        """The condition for their rows; `key_hash` is an expression, the hash in hexadecimal."""
        ids = sql.Literal("{" + ",".join(map(str, self.ids)) + "}")
        return sql.SQL("{} = any ({}::int[])").format(bucket_of(key_hash, self.bits), ids)


@dataclass(frozen=True, slots=True)
class UnequalBuckets:
    """Buckets whose rows differ, with about `rows` rows; reading the digests took `bytes`."""

    buckets: Buckets
    rows: int
    bytes: int

    @property
    def rows_per_bucket(self) -> float:
        """Average rows of a bucket."""
        return self.rows / max(1, len(self.buckets.ids))

    @property
    def split_bits(self) -> int:
        """The number of bits to split each bucket by; 0: do not split."""
        if self.rows_per_bucket <= FEW_ROWS:
            return 0
        needed = math.ceil(math.log2(self.rows_per_bucket / FEW_ROWS)) + 1
        room = int(math.log2(MOST_BUCKETS / len(self.buckets.ids)))
        return max(0, min(needed, room, WIDEST_SPLIT, MOST_BITS - self.buckets.bits))


@dataclass(frozen=True, slots=True)
class BucketDigest:
    """Rows of a bucket, those outside the filter, and the two sums of row hashes as the server sends them."""

    bucket_id: int
    rows: int
    outside_filter: int
    sums: bytes

    @property
    def text(self) -> str:
        """The sums for people."""
        return self.sums.decode("ascii").strip().replace("\t", ":")


@dataclass(frozen=True, slots=True)
class BucketComparison:
    """One bucket of both sides."""

    publisher: BucketDigest
    subscriber: BucketDigest

    @property
    def bucket_id(self) -> int:
        """The bucket's id."""
        return self.publisher.bucket_id

    @property
    def rows(self) -> int:
        """The rows of the side that has more."""
        return max(self.publisher.rows, self.subscriber.rows)

    @property
    def is_equal(self) -> bool:
        """Whether both sides have the same rows in it."""
        return (self.publisher.rows, self.publisher.sums) == (self.subscriber.rows, self.subscriber.sums)


def bucket_of(key_hash: sql.Composable, bits: int) -> sql.Composed:
    """The bucket id, as an expression."""
    return sql.SQL("('x' || left({}, 8))::bit(32)::bit({})::int").format(key_hash, sql.Literal(bits))


def unequal_buckets(
    publisher: TableSide, subscriber: TableSide, within: Buckets | None = None
) -> UnequalBuckets:
    """The buckets with different rows on the two sides, split as far as it pays; of rows `within`, if given.

    These are buckets by at most `FIRST_BITS`.
    """
    unequal = _compare_level(publisher, subscriber, within, FIRST_BITS)
    while extra_bits := unequal.split_bits:
        split = _compare_level(publisher, subscriber, unequal.buckets, unequal.buckets.bits + extra_bits)
        helps = split.rows < unequal.rows / 2
        unequal = UnequalBuckets(split.buckets, split.rows, unequal.bytes + split.bytes)
        if not helps:
            break
    return unequal


def _compare_level(
    publisher: TableSide, subscriber: TableSide, within: Buckets | None, bits: int
) -> UnequalBuckets:
    size = 0

    def count(length: int) -> None:
        nonlocal size
        size += length

    if within is not None:
        publisher, subscriber = restrict(publisher, within), restrict(subscriber, within)
    with compare_buckets(publisher, subscriber, bits, count) as buckets:
        unequal = [(bucket.bucket_id, bucket.rows) for bucket in buckets if not bucket.is_equal]
    logger.debug("%d buckets differ by %d bits, %d bytes of digests", len(unequal), bits, size)
    ids = tuple(bucket_id for bucket_id, _ in unequal)
    return UnequalBuckets(Buckets(bits, ids), sum(rows for _, rows in unequal), size)


@contextlib.contextmanager
def compare_buckets(
    publisher: TableSide, subscriber: TableSide, bits: int, count: Callable[[int], None] = lambda _: None
) -> Iterator[Iterator[BucketComparison]]:
    """All buckets that have rows, by id; `count` is called with the size of each digest.

    A server answers when it has hashed its whole table, so both are asked before either answer is awaited.
    """
    sides = (publisher, subscriber)
    readers = [_read_digests(side, bits, count) for side in sides]
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(sides), thread_name_prefix="digests") as threads:
            try:
                digests = list(threads.map(stack.enter_context, readers))
            except BaseException:
                for side in sides:
                    side.session.cancel()
                raise
        yield compare_digests(*digests)


@contextlib.contextmanager
def _read_digests(
    side: TableSide, bits: int, count: Callable[[int], None]
) -> Iterator[Iterator[BucketDigest]]:
    bucket = bucket_of(sql.Identifier("hashed", "key_hash"), bits)
    statement = sql.SQL(DIGESTS).format(bucket=bucket, hashed=side.hashed())
    with contextlib.ExitStack() as stack:
        with side.read_errors():
            out = stack.enter_context(side.session.copy(statement))

        def read() -> Iterator[BucketDigest]:
            with side.read_errors():
                for line in out:
                    count(len(line))
                    if (digest := _DIGEST.fullmatch(bytes(line))) is None:
                        raise ValueError("not a digest")
                    bucket_id, rows, outside, sums = digest.groups()
                    yield BucketDigest(int(bucket_id), int(rows), int(outside), sums)

        yield read()


def restrict(side: TableSide, within: Buckets) -> TableSide:
    """The side's rows of some buckets; of other rows only the key is hashed."""
    # All columns: the condition for rows outside the filter may read some that are not compared.
    rows = sql.SQL("select * from ({}) as rows where {}").format(
        side.rows, within.condition(hash_of(names(side.hashed_key)))
    )
    return dataclasses.replace(side, rows=rows)


def compare_digests(
    publisher: Iterator[BucketDigest], subscriber: Iterator[BucketDigest]
) -> Iterator[BucketComparison]:
    """The buckets of both sides; input and output in order of id."""
    tagged = heapq.merge(
        ((digest.bucket_id, 0, digest) for digest in publisher),
        ((digest.bucket_id, 1, digest) for digest in subscriber),
        key=lambda entry: entry[0],
    )
    for bucket_id, group in itertools.groupby(tagged, key=lambda entry: entry[0]):
        empty = BucketDigest(bucket_id, 0, 0, b"0\t0\n")
        sides = {0: empty, 1: empty} | {side: digest for _, side, digest in group}
        yield BucketComparison(sides[0], sides[1])
