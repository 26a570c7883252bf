"""Compare one table of the two sides of a fence.

    digests of all buckets, by both servers in parallel
      equal      the content is equal
      unequal    the rows of those buckets from both servers, in the order of their hashes, are merged: a row
                 that occurs only on one side, or more often, is a difference

The merge holds one key at a time. All differences are counted, and the first keys of each kind are kept.
Above `MOST_LISTED_ROWS` the remaining unequal buckets are not listed, and the counts are lower bounds.

A table without a key is a multiset of whole rows: a changed row counts as one missing and one unexpected.

A comparison may be of some buckets only: both servers choose the same rows. Each still reads its whole table
and hashes every key, but hashes and sums the other columns of the chosen rows alone. The comparisons of
several sets of buckets are joined (`join_comparisons`).

The published columns are compared; if the subscriber lacks one, the table is not compared. If the subscriber
need not mirror the publisher (`ValidatedTable.full` is False), only keys are compared, because values may
differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import itertools
import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import psycopg
from psycopg import sql

from cdc_replay.compare.buckets import BucketComparison, Buckets, compare_buckets, restrict
from cdc_replay.compare.difference import Difference, DifferenceKind
from cdc_replay.compare.digest import (
    HashedRow,
    TableSide,
    duplicate_keys,
    list_rows,
    read_values,
)
from cdc_replay.compare.fence import ComparisonFence
from cdc_replay.compare.table_pair import TablePair
from cdc_replay.errors import InvalidMessage, MissingPrivilege, PublisherNotReady, bounded
from cdc_replay.failpoints import failpoint
from cdc_replay.model.proof import BUCKET_BITS, BUCKETS
from cdc_replay.postgres.connection import translated_errors
from cdc_replay.postgres.planned_tables import PlannedTable, check_unchanged, lock_planned_tables
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.subscriber.as_owner import TargetSession, act_on
from cdc_replay.subscriber.target_checks import missing_columns
from cdc_replay.subscriber.target_tables import TargetTable

logger = logging.getLogger(__name__)

MOST_LISTED_ROWS: Final = 5_000_000
"""About the maximum of rows of one side that are read to list differences."""

TABLE_ERRORS: Final = (
    InvalidMessage,
    MissingPrivilege,
    PublisherNotReady,
    psycopg.DataError,
    psycopg.InternalError,
    psycopg.NotSupportedError,
    psycopg.ProgrammingError,
)
"""Errors of one table only: a missing privilege, a concurrent change of the table, a value that the other
type rejects, a damaged page, rows of another form."""

MISSING_TABLE: Final = (
    "the table is missing on the subscriber: no plain or partitioned table has its name [R8.1]"
)


@dataclass(frozen=True, slots=True)
class ValidatedTable:
    """A subscribed table, and whether the subscriber must mirror the publisher's filtered state in it.

    `target` is None if the subscriber has no such table. `full`: the publications publish all four actions
    with one filter. Otherwise the subscriber may differ (it keeps rows whose DELETE is not published), and
    `note` says why. `notice` tells if the rows were copied with another row filter than the current one.
    `claimed` is the condition for rows that other feeds of the target may have inserted, None if unknown.
    `published` is the table on the publisher if `table` is a native copy of it, which has no row filters.
    """

    table: SyncedTable
    target: TargetTable | None
    full: bool
    note: str = ""
    notice: str = ""
    claimed: sql.Composed | None = None
    published: SyncedTable | None = None


@dataclass(slots=True)
class DifferenceCounts:
    """Differences: all are counted, the first `limit` keys of each kind are kept.

    `outside` has, by bucket, the subscriber's rows outside the filter that equal no published row, and
    `first_outside` the first keys.
    """

    limit: int
    counts: dict[DifferenceKind, int] = field(default_factory=lambda: dict.fromkeys(DifferenceKind, 0))
    kept: dict[DifferenceKind, list[Difference]] = field(
        default_factory=lambda: {kind: [] for kind in DifferenceKind}
    )
    exact: bool = True
    outside: Counter[int] = field(default_factory=Counter)
    first_outside: list[str] = field(default_factory=list)

    def add(self, kind: DifferenceKind, count: int, key: str, key_hash: str = "") -> None:
        """Count `count` rows of `key`."""
        if count == 0:
            return
        self.counts[kind] += count
        if len(self.kept[kind]) < self.limit:
            self.kept[kind].append(Difference(kind, key, key_hash))

    def add_outside(self, count: int, key: str, key_hash: str) -> None:
        """Count `count` rows of `key` outside the filter."""
        if count:
            self.outside[int(key_hash[:8], 16) >> (32 - BUCKET_BITS)] += count
            if len(self.first_outside) < self.limit:
                self.first_outside.append(key)

    @property
    def first(self) -> tuple[Difference, ...]:
        """The kept differences, by kind."""
        return tuple(itertools.chain.from_iterable(self.kept.values()))


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Keys that occur more than once on the subscriber: their number, and the first.

    They are searched for where the sides differ: equal rows have the publisher's keys, which are unique.
    """

    count: int
    first: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OutsideFilter:
    """Rows of the subscriber outside the filter: their number, and the first keys.

    `unknown` is the reason if the subscriber cannot evaluate the filter.
    """

    count: int
    first: tuple[str, ...]
    unknown: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one table; `duplicates` is None without a key, `outside` without a filter."""

    buckets: tuple[BucketComparison, ...]
    key: tuple[str, ...]
    columns: tuple[str, ...]
    differences: DifferenceCounts
    duplicates: Duplicates | None
    outside: OutsideFilter | None
    definition: str = ""
    """Identifies columns, key and filters: what has another one was compared in other buckets."""
    chosen: frozenset[int] = frozenset(range(BUCKETS))
    """The compared buckets, also those without rows."""

    @property
    def differing(self) -> frozenset[int]:
        """The buckets that do not hold what they must; all, if the reason is none of a bucket's."""
        unequal = frozenset(bucket.bucket_id for bucket in self.buckets if not bucket.is_equal)
        has_other_fault = (self.duplicates is not None and self.duplicates.count > 0) or (
            self.outside is not None and self.outside.count > 0
        )
        return unequal if unequal or not has_other_fault else self.chosen

    @property
    def publisher_rows(self) -> int:
        """Rows on the publisher that pass the filter."""
        return sum(bucket.publisher.rows for bucket in self.buckets)

    @property
    def subscriber_rows(self) -> int:
        """Rows on the subscriber."""
        return sum(bucket.subscriber.rows for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class NotCompared:
    """The table could not be compared; `reason` says why.

    `is_error`: a server refused to read it. Otherwise the subscriber has no such table, or it is not there.
    """

    reason: str
    is_error: bool = False


def compare_table(
    fence: ComparisonFence,
    validated: ValidatedTable,
    listed_keys: int,
    *,
    with_values: bool = False,
    chosen: Collection[int] = range(BUCKETS),
) -> Comparison | NotCompared:
    """Compare one table; `listed_keys` differences of each kind are kept, on request with the rows' values.

    Of buckets that are not `chosen` nothing is compared.

    An error of this table only is a result, so that the other tables are still compared.

    Raises:
        ServerUnavailable: if a server is lost.
    """
    name = validated.table.table.name
    if validated.target is None:
        return NotCompared(MISSING_TABLE)
    if (reason := fence.why_not_at_fence(name)) is not None:
        return NotCompared(reason)
    if missing := missing_columns(validated.table.columns, validated.target):
        return NotCompared(f"the table on the subscriber lacks the published {missing} [R8.1]")
    try:
        # Savepoints: the transactions and their snapshots survive a failed statement.
        with (
            translated_errors(f'cannot compare table "{name}"'),
            fence.publisher.transaction(),
            fence.subscriber.transaction(),
            act_on(fence.subscriber, [validated.target], only_reads=True) as sessions,
        ):
            session = sessions.session_for(validated.target)
            planned = [PlannedTable.from_catalog(validated.table.table)]
            lock_planned_tables(fence.publisher, planned)
            pair = TablePair.from_tables(
                validated.table,
                validated.target,
                fence.publisher,
                fence.subscriber,
                session,
                only_key=not validated.full,
            )
            pair = dataclasses.replace(pair, claimed=validated.claimed)
            if validated.published is not None and validated.claimed is not None:
                pair = pair.without_rows_of_others(
                    validated.published, validated.claimed, fence.subscriber, session
                )
            compared = _compare(fence, session, pair, chosen, listed_keys, with_values=with_values)
            check_unchanged(fence.publisher, planned)
            return dataclasses.replace(
                compared, definition=_definition(validated, pair), chosen=frozenset(chosen)
            )
    except TABLE_ERRORS as error:
        logger.warning("table %s cannot be compared: %s", name, type(error).__name__)
        return NotCompared(_reason(error), is_error=True)


def join_comparisons(first: Comparison, second: Comparison) -> Comparison:
    """Two comparisons of one table, of different buckets, as one."""
    limit = max(first.differences.limit, second.differences.limit)
    differences = DifferenceCounts(limit, exact=first.differences.exact and second.differences.exact)
    for kind in DifferenceKind:
        differences.counts[kind] = first.differences.counts[kind] + second.differences.counts[kind]
        kept = [*first.differences.kept[kind], *second.differences.kept[kind]]
        differences.kept[kind] = kept[:limit]
    duplicates, outside = first.duplicates, first.outside
    if duplicates is not None and second.duplicates is not None:
        keys = (*duplicates.first, *second.duplicates.first)[:limit]
        duplicates = Duplicates(duplicates.count + second.duplicates.count, keys)
    if outside is not None and second.outside is not None:
        keys = (*outside.first, *second.outside.first)[:limit]
        outside = OutsideFilter(outside.count + second.outside.count, keys, outside.unknown)
    return dataclasses.replace(
        first,
        buckets=(*first.buckets, *second.buckets),
        differences=differences,
        duplicates=duplicates,
        outside=outside,
        chosen=first.chosen | second.chosen,
    )


def _definition(validated: ValidatedTable, pair: TablePair) -> str:
    target = pair.target
    types = [
        [name, pair.synced.table.column(name).type_sql, target.column(name).base_type_sql]
        for name in pair.columns
    ]
    filters = pair.synced.filters
    conditions = None if filters is None else sorted(row_filter.sql for row_filter in filters)
    text = json.dumps([BUCKET_BITS, validated.full, list(pair.key), types, conditions])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _reason(error: Exception) -> str:
    if isinstance(error, psycopg.Error):
        return bounded(error.diag.message_primary or str(error))
    return str(error)


def _compare(
    fence: ComparisonFence,
    session: TargetSession,
    pair: TablePair,
    chosen: Collection[int],
    listed_keys: int,
    *,
    with_values: bool,
) -> Comparison:
    publisher, subscriber = pair.publisher(fence.publisher), pair.subscriber(session)
    if len(chosen) < BUCKETS:
        within = Buckets(BUCKET_BITS, tuple(sorted(chosen)))
        publisher, subscriber = restrict(publisher, within), restrict(subscriber, within)
    with compare_buckets(publisher, subscriber, BUCKET_BITS) as compared:
        buckets = tuple(compared)
    failpoint("validate.after_digests")
    differences = _list_differences(publisher, subscriber, buckets, listed_keys)
    if with_values and pair.key:
        _add_values(publisher, subscriber, differences)
    buckets = tuple(_with_outside(bucket, differences) for bucket in buckets)
    return Comparison(
        buckets=buckets,
        key=pair.key,
        columns=pair.columns,
        differences=differences,
        duplicates=_duplicates(subscriber, buckets, listed_keys) if pair.key else None,
        outside=None if pair.synced.filters is None else _outside(pair, buckets, differences),
    )


def _list_differences(
    publisher: TableSide, subscriber: TableSide, buckets: Sequence[BucketComparison], listed_keys: int
) -> DifferenceCounts:
    counted = DifferenceCounts(listed_keys)
    unequal = [bucket for bucket in buckets if not bucket.is_equal]
    listed = _within_bounds(unequal)
    counted.exact = len(listed) == len(unequal)
    if listed:
        logger.info("listing the rows of %d unequal buckets of %d", len(listed), BUCKETS)
        within = Buckets(BUCKET_BITS, tuple(listed)).condition(sql.Identifier("hashed", "key_hash"))
        publisher_rows, subscriber_rows = list_rows(publisher, within), list_rows(subscriber, within)
        compare_rows(counted, publisher.key, publisher_rows, subscriber_rows)
    return counted


def _add_values(publisher: TableSide, subscriber: TableSide, differences: DifferenceCounts) -> None:
    """Read the rows with the kept keys from both sides."""
    hashes = sorted({difference.key_hash for difference in differences.first})
    if not hashes:
        return
    published, present = read_values(publisher, hashes), read_values(subscriber, hashes)
    for kept in differences.kept.values():
        kept[:] = (
            dataclasses.replace(
                difference,
                publisher=published.get(difference.key_hash, ()),
                subscriber=present.get(difference.key_hash, ()),
            )
            for difference in kept
        )


def compare_rows(
    counted: DifferenceCounts,
    key: tuple[str, ...],
    publisher: Iterable[HashedRow],
    subscriber: Iterable[HashedRow],
) -> None:
    """Count the differences between the rows of both sides, which are in the order of their hashes."""
    for publisher_rows, subscriber_rows in _by_key(publisher, subscriber):
        _compare_key(counted, key, publisher_rows, subscriber_rows)


def _within_bounds(unequal: Sequence[BucketComparison]) -> list[int]:
    read = itertools.accumulate(bucket.rows for bucket in unequal)
    return [
        bucket.bucket_id
        for position, (bucket, rows) in enumerate(zip(unequal, read, strict=True))
        if position == 0 or rows <= MOST_LISTED_ROWS
    ]


def _by_key(
    publisher: Iterable[HashedRow], subscriber: Iterable[HashedRow]
) -> Iterator[tuple[list[HashedRow], list[HashedRow]]]:
    """The rows of both sides, one key at a time, in the order of the keys' hashes."""
    tagged = heapq.merge(
        ((row.key_hash, 0, row) for row in publisher),
        ((row.key_hash, 1, row) for row in subscriber),
        key=lambda entry: (entry[0], entry[1]),
    )
    for _, rows in itertools.groupby(tagged, key=lambda entry: entry[0]):
        sides: tuple[list[HashedRow], list[HashedRow]] = ([], [])
        for _, side, row in rows:
            sides[side].append(row)
        yield sides


def _compare_key(
    counted: DifferenceCounts,
    key: tuple[str, ...],
    publisher: Sequence[HashedRow],
    subscriber: Sequence[HashedRow],
) -> None:
    """Count the differences of one key: surplus rows of the two sides are paired as far as possible."""
    missing = _surplus(publisher, subscriber)
    unexpected = _surplus((row for row in subscriber if not row.outside_filter), publisher)
    outside = _surplus((row for row in subscriber if row.outside_filter), publisher)
    if missing + unexpected + outside == 0:
        return
    first = (publisher or subscriber)[0]
    shown = show_key(key, first.shown), first.key_hash
    counted.add_outside(outside, *shown)
    different = min(missing, unexpected + outside)
    # A row with other values is one difference, whether or not these pass the filter.
    paired_outside = min(different, outside)
    counted.add(DifferenceKind.DIFFERENT, different, *shown)
    counted.add(DifferenceKind.MISSING, missing - different, *shown)
    counted.add(DifferenceKind.OUTSIDE_FILTER, outside - paired_outside, *shown)
    counted.add(DifferenceKind.UNEXPECTED, unexpected - (different - paired_outside), *shown)


def _surplus(rows: Iterable[HashedRow], others: Iterable[HashedRow]) -> int:
    counts = {other.row_hash: other.count for other in others}
    return sum(max(0, row.count - counts.get(row.row_hash, 0)) for row in rows)


def show_key(key: Sequence[str], values: Sequence[str]) -> str:
    """A key as people read it: `id=5, region=nsw`; a row without key as its text."""
    if not key:
        return values[0]
    return ", ".join(f"{name}={value}" for name, value in zip(key, values, strict=True))


def _duplicates(subscriber: TableSide, buckets: Sequence[BucketComparison], listed_keys: int) -> Duplicates:
    if all(bucket.is_equal for bucket in buckets):
        return Duplicates(0, ())  # its rows are the publisher's, where the key is unique
    count, first = duplicate_keys(subscriber, listed_keys)
    return Duplicates(count, tuple(show_key(subscriber.key, shown) for shown in first))


def _with_outside(bucket: BucketComparison, differences: DifferenceCounts) -> BucketComparison:
    """The bucket; a row that equals a published one is inside, whatever the subscriber's types make of it."""
    if not differences.exact and not bucket.is_equal:
        return bucket
    subscriber = dataclasses.replace(bucket.subscriber, outside_filter=differences.outside[bucket.bucket_id])
    return dataclasses.replace(bucket, subscriber=subscriber)


def _outside(
    pair: TablePair, buckets: Sequence[BucketComparison], differences: DifferenceCounts
) -> OutsideFilter:
    count = sum(bucket.subscriber.outside_filter for bucket in buckets)
    return OutsideFilter(count, tuple(differences.first_outside), pair.unknown)
