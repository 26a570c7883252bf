"""What validations have proven, per table and bucket of its rows, and which buckets come next.

A bucket has the rows whose key's hash begins with its bits (`compare.buckets`). A validation compares some
buckets of some tables at its fence, and only these get a new proof.

| proof of       | is                                                                               |
|----------------|----------------------------------------------------------------------------------|
| a bucket       | its last comparison, if both sides had the same rows in it                       |
| a table        | the oldest of its buckets': all rows were equal at that position or later        |
| a subscription | the oldest of its tables'                                                        |

There is no proof while a part was never compared, or differed when it last was. A table that the subscriber
need not mirror is proven by being compared: nothing else is claimed of it. If the columns, the key or the row
filters have changed since, the buckets are others, and the table's proof begins anew.

Buckets are compared in turns: those that were compared longest ago come first. With `k` of `n` buckets in
each run, all rows have been compared after `n / k` runs, rounded up.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cdc_replay.model.lsn import Lsn

BUCKET_BITS: Final = 8
BUCKETS: Final = 1 << BUCKET_BITS
"""Buckets of each table: the resolution of samples, and of differences before rows are listed."""


@dataclass(frozen=True, slots=True)
class BucketProof:
    """The last comparison of a bucket: its turn, the fence, the time of the fence, whether it was equal."""

    turn: int
    lsn: Lsn
    at: dt.datetime
    is_equal: bool


@dataclass(frozen=True, slots=True)
class ProvenPoint:
    """A position and the time at which the publisher was there."""

    lsn: Lsn
    at: dt.datetime


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one run has seen of a table at `lsn`: the `compared` buckets, and those of them that `differ`.

    `owed` buckets were chosen too, but not reached. `definition` identifies columns, key and filters.
    """

    definition: str
    turn: int
    lsn: Lsn
    at: dt.datetime
    compared: frozenset[int]
    differing: frozenset[int] = frozenset()
    owed: int = 0


@dataclass(frozen=True, slots=True)
class ProofSummary:
    """The proof of a table: buckets that were never compared, buckets that differed last, the oldest point.

    `last_compared` is when any of its buckets was last compared.
    """

    never_compared: int = BUCKETS
    differing: int = 0
    oldest: ProvenPoint | None = None
    last_compared: dt.datetime | None = None

    @property
    def proven(self) -> ProvenPoint | None:
        """All rows were equal at this point or later; None while there is no proof."""
        return None if self.never_compared or self.differing else self.oldest

    def describe(self) -> str:
        """The proof in words, without its age."""
        if (proven := self.proven) is not None:
            return f"proven through {proven.lsn}"
        if self.never_compared == BUCKETS:
            return "never validated"
        parts = []
        if self.differing:
            parts.append(f"{self.differing} of {BUCKETS} buckets differ")
        if self.never_compared:
            parts.append(f"{self.never_compared} of {BUCKETS} buckets were never compared")
        return f"not proven: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class TableProof:
    """The last comparison of each bucket; None: it was never compared."""

    buckets: tuple[BucketProof | None, ...]
    definition: str = ""
    owed: int = 0
    """Buckets that the last run had chosen and did not reach."""

    @classmethod
    def nothing(cls) -> TableProof:
        """No bucket was ever compared."""
        return cls((None,) * BUCKETS)

    @property
    def summary(self) -> ProofSummary:
        """The buckets' proofs as one."""
        compared = [bucket for bucket in self.buckets if bucket is not None]
        return ProofSummary(
            never_compared=self.buckets.count(None),
            differing=sum(not bucket.is_equal for bucket in compared),
            oldest=oldest(ProvenPoint(bucket.lsn, bucket.at) for bucket in compared),
            last_compared=max((bucket.at for bucket in compared), default=None),
        )

    @property
    def next_turn(self) -> int:
        """The turn of the next run."""
        return 1 + max((bucket.turn for bucket in self.buckets if bucket is not None), default=0)

    def choose(self, count: int) -> tuple[int, ...]:
        """The ids of the `count` buckets that were compared longest ago, the first to compare first."""

        def waits(bucket_id: int) -> tuple[int, int]:
            bucket = self.buckets[bucket_id]
            return (0 if bucket is None else bucket.turn, bucket_id)

        return tuple(sorted(range(len(self.buckets)), key=waits)[:count])

    def add(self, evidence: Evidence) -> TableProof:
        """The proof with what a run has seen.

        A bucket that another run has compared meanwhile, at a later position, keeps that.
        """
        before = self.buckets if evidence.definition == self.definition else (None,) * len(self.buckets)

        def after(bucket_id: int) -> BucketProof | None:
            known = before[bucket_id]
            if bucket_id not in evidence.compared:
                return known
            if known is not None and known.turn >= evidence.turn and known.lsn > evidence.lsn:
                return known
            is_equal = bucket_id not in evidence.differing
            return BucketProof(evidence.turn, evidence.lsn, evidence.at, is_equal)

        return dataclasses.replace(
            self,
            buckets=tuple(map(after, range(len(self.buckets)))),
            definition=evidence.definition,
            owed=evidence.owed,
        )


def oldest(points: Iterable[ProvenPoint]) -> ProvenPoint | None:
    """The oldest position, and the oldest time, of these points; None without any."""
    known: Sequence[ProvenPoint] = list(points)
    if not known:
        return None
    return ProvenPoint(min(point.lsn for point in known), min(point.at for point in known))


def subscription_proof(tables: Collection[ProofSummary]) -> ProvenPoint | None:
    """The proof of a subscription with these tables: the oldest of theirs; None if one has none."""
    points = [table.proven for table in tables]
    return None if None in points else oldest(point for point in points if point is not None)


def buckets_of_share(share: float) -> int:
    """How many buckets a run compares for this share of the rows: at least one."""
    return max(1, min(BUCKETS, math.ceil(round(share * BUCKETS, 6))))


def runs_for_all(share: float) -> int:
    """After how many runs that each compare this share all rows have been compared."""
    return math.ceil(BUCKETS / buckets_of_share(share))
