"""Find the rows that can differ, by digests alone.

A row is in the bucket that the first bits of its key's hash name. Both servers sum up the rows of each
bucket, first of 2^12 buckets; those whose sums differ are split by some more bits, all others are never
looked at again. Splitting ends when a bucket has about as few rows as its digests would cost to find fewer,
when there are too many unequal buckets to name them in a query, or when it does not help: then nearly
everything differs.

Both lists come in order and are merged as they arrive, so memory holds the unequal buckets' numbers alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.compare.digest import TableSide, hash_of

logger = logging.getLogger(__name__)

FIRST_BITS: Final = 12
"""The first level has 2^12 buckets: the least that is moved for a big table."""

MOST_BITS: Final = 31
"""A bucket's number is a positive integer of four bytes."""

WIDEST_SPLIT: Final = 8
"""A bucket is split into at most 2^8."""

FEW_ROWS: Final = 16
"""A bucket of so many rows is not split: its rows cost about what its digests would."""

MOST_BUCKETS: Final = 1 << 19
"""No level has more buckets than this: their numbers are held in memory, and named in a query."""

DIGESTS: Final = """
    select {bucket} as bucket,
           count(*) as rows,
           sum(('x' || left(row_hash, 16))::bit(64)::bigint) as high,
           sum(('x' || right(row_hash, 16))::bit(64)::bigint) as low
    from ({hashed}) as hashed
    group by 1
    order by 1
"""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets by the first `bits` bits of the hash of the key."""

    bits: int
    numbers: tuple[int, ...]

    def condition(self, key_hash: sql.Composable) -> sql.Composed:
        """True of the rows in them; `key_hash` is an expression, the hash in hexadecimal."""
        numbers = sql.Literal("{" + ",".join(map(str, self.numbers)) + "}")
        return sql.SQL("{} = any ({}::int[])").format(bucket_of(key_hash, self.bits), numbers)


@dataclass(frozen=True, slots=True)
class UnequalBuckets:
    """The buckets whose rows differ, of `rows` rows about; `bytes` of digests were read to find them."""

    buckets: Buckets
    rows: int
    bytes: int

    @property
    def rows_each(self) -> float:
        """The average number of rows of a bucket."""
        return self.rows / max(1, len(self.buckets.numbers))

    @property
    def split_bits(self) -> int:
        """By how many bits to split each, 0 for not at all."""
        if self.rows_each <= FEW_ROWS:
            return 0
        wanted = math.ceil(math.log2(self.rows_each / FEW_ROWS)) + 1
        room = int(math.log2(MOST_BUCKETS / len(self.buckets.numbers)))
        return max(0, min(wanted, room, WIDEST_SPLIT, MOST_BITS - self.buckets.bits))


@dataclass(frozen=True, slots=True)
class BucketDigest:
    """The number of rows of one bucket, and the sums of their hashes as the server wrote them."""

    number: int
    rows: int
    sums: bytes


def bucket_of(key_hash: sql.Composable, bits: int) -> sql.Composed:
    """The number of the bucket, as an expression."""
    return sql.SQL("('x' || left({}, 8))::bit(32)::bit({})::int").format(key_hash, sql.Literal(bits))


def unequal_buckets(publisher: TableSide, subscriber: TableSide) -> UnequalBuckets:
    """The buckets in which the two sides do not have the same rows, as small as is worth finding."""
    found = _level(publisher, subscriber, None, FIRST_BITS)
    while more := found.split_bits:
        split = _level(publisher, subscriber, found.buckets, found.buckets.bits + more)
        helps = split.rows < found.rows / 2
        found = UnequalBuckets(split.buckets, split.rows, found.bytes + split.bytes)
        if not helps:
            break
    return found


def _level(publisher: TableSide, subscriber: TableSide, within: Buckets | None, bits: int) -> UnequalBuckets:
    size = 0

    def count(length: int) -> None:
        nonlocal size
        size += length

    with contextlib.ExitStack() as stack:
        # Both queries run before a row of either is read, so the servers work at the same time.
        here = stack.enter_context(_digests(publisher, within, bits, count))
        there = stack.enter_context(_digests(subscriber, within, bits, count))
        unequal = list(differing(here, there))
    logger.debug("%d buckets differ by %d bits, %d bytes of digests", len(unequal), bits, size)
    numbers = tuple(number for number, _ in unequal)
    return UnequalBuckets(Buckets(bits, numbers), sum(rows for _, rows in unequal), size)


@contextlib.contextmanager
def _digests(
    side: TableSide, within: Buckets | None, bits: int, count: Callable[[int], None]
) -> Iterator[Iterator[BucketDigest]]:
    rows = side if within is None else _restricted(side, within)
    bucket = bucket_of(sql.Identifier("hashed", "key_hash"), bits)
    statement = sql.SQL(DIGESTS).format(bucket=bucket, hashed=rows.hashed())
    with contextlib.ExitStack() as stack:
        with side.reading():
            out = stack.enter_context(side.reader.copy(statement))

        def read() -> Iterator[BucketDigest]:
            for line in out:
                count(len(line))
                number, rows, sums = bytes(line).split(b"\t", 2)
                yield BucketDigest(int(number), int(rows), sums)

        yield read()


def _restricted(side: TableSide, within: Buckets) -> TableSide:
    """The side's rows of some buckets: of the others only the key is hashed."""
    key = sql.SQL(", ").join(map(sql.Identifier, side.key or side.columns))
    columns = sql.SQL(", ").join(map(sql.Identifier, side.columns))
    rows = sql.SQL("select {} from ({}) as rows where {}").format(
        columns, side.rows, within.condition(hash_of(key))
    )
    return dataclasses.replace(side, rows=rows)


def differing(here: Iterator[BucketDigest], there: Iterator[BucketDigest]) -> Iterator[tuple[int, int]]:
    """Numbers of the buckets that differ, each with the rows of the side that has more.

    Both lists are in order of number, and so is what comes of them.
    """
    together = heapq.merge(here, there, key=lambda each: each.number)
    for number, group in itertools.groupby(together, key=lambda each: each.number):
        found: Sequence[BucketDigest] = list(group)
        if len(found) == 1 or (found[0].rows, found[0].sums) != (found[1].rows, found[1].sums):
            yield number, max(each.rows for each in found)
