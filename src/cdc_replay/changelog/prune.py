"""Retention: remove the log's first segments that nobody needs any more.

Whole segments are removed, in order; the log then starts after the last one. The commit that removes them
records the new start, as an application transaction next to the end, so that readers notice if they need
more.

| killed after | left over                                                                      |
|--------------|--------------------------------------------------------------------------------|
| the commit   | the files of the segments, which the next prune or compaction deletes          |

Relation versions and catalogs stay. They are small, and a message needs those of the time when the change was
made, which for a long or prepared transaction lies before the start (R9.10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow.compute as pc

from cdc_replay.changelog.delta.actions import AppTransaction
from cdc_replay.changelog.delta.table import DurableTable
from cdc_replay.changelog.segment import EVERYTHING, Segment, plan_row_groups, read_columns
from cdc_replay.changelog.storage import delete_files
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn


def start_application(slot: str) -> str:
    """The application whose position is the log's start, once the log was pruned."""
    return f"{slot}/start"


def prunable_segments(table: DurableTable, upto: Lsn, committed_by: int | None) -> tuple[Segment, ...]:
    """The first segments of the log that lie wholly at or before `upto`.

    With `committed_by`, in microseconds since 1970-01-01 UTC, only those whose transactions were all
    committed by then.

    Raises:
        ChangeLogDamaged: if a segment has to be read for that, and cannot be.
    """
    return tuple(_prefix(table, upto, committed_by))


def _prefix(table: DurableTable, upto: Lsn, committed_by: int | None) -> Iterator[Segment]:
    for segment in table.segments():
        if segment.max_commit_lsn > upto.value:
            return
        if committed_by is not None and _last_commit_time(table, segment) > committed_by:
            return
        yield segment


def commit_times(table: DurableTable, segments: Sequence[Segment]) -> tuple[int, int] | None:
    """Approximate commit times of the first and the last transaction of `segments`, in microseconds.

    Raises:
        ChangeLogDamaged: if the first or the last segment cannot be read.
    """
    outer = (segments[0], segments[-1]) if segments else ()
    times = [time for segment in outer for time in _commit_times(table, segment)]
    return (min(times), max(times)) if times else None


def _last_commit_time(table: DurableTable, segment: Segment) -> int:
    return max(_commit_times(table, segment), default=0)


def _commit_times(table: DurableTable, segment: Segment) -> Iterator[int]:
    """The bounds of each row group; non-transactional messages have no commit time (R9.13)."""
    for group in plan_row_groups(table.location / segment.name, EVERYTHING):
        bounds = pc.min_max(read_columns(group, ("commit_time",), EVERYTHING)["commit_time"])
        yield from (bound for bound in bounds.as_py().values() if bound is not None)


def prune(
    table: DurableTable, slot: str, segments: Sequence[Segment], *, keep_files: Callable[[], bool]
) -> int:
    """Remove the first segments from the log and move its start after them, in one durable commit.

    `keep_files` is asked after the commit: who opens the log from then on does not read them. Returns the
    number of deleted files.

    Raises:
        ChangeLogConflict: if another process prunes or compacts the log.
    """
    start = max(segment.max_commit_lsn for segment in segments)
    table.replace(segments, (), AppTransaction(start_application(slot), start))
    failpoint("prune.after_commit")
    return 0 if keep_files() else delete_files(table.location, [segment.name for segment in segments])
