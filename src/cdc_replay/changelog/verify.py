"""Reads a whole change log and tells the first fault: is everything there that was committed, and right?

| what                  | must                                                                           |
|-----------------------|--------------------------------------------------------------------------------|
| commits of each table | be there without a hole, match their seals, add up to what readers get         |
| a segment             | have the committed size, number of messages, and range of commit LSNs          |
| a page                | match its checksum                                                             |
| messages              | be in the order of (commit LSN, seq), seq counting from 0 in each transaction  |
| a message             | be well-formed, and of a relation version that is known                        |
| relations, catalogs   | be readable; a catalog must be in force from the beginning                     |
| prepared transactions | be readable and well-formed                                                    |

Segments are read and decoded by several threads, and looked at in order. A capture may go on meanwhile: the
log is verified as it is at the beginning. Segments that a prune deletes on the way are left out.
"""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias

from cdc_replay.changelog.delta.table import DurableTable
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.metadata_tables import check_first_catalog
from cdc_replay.changelog.prepared_transactions import PreparedTransactions
from cdc_replay.changelog.segment import (
    LOG_SCHEMA,
    RESTORE,
    RowGroup,
    Segment,
    read_footer,
)
from cdc_replay.changelog.storage import Location
from cdc_replay.changelog.verify_commits import check_changes, verify_table
from cdc_replay.changelog.verify_rows import RowGroupSummary, RowOrder, RowReader
from cdc_replay.errors import ChangeLogDamaged, InvalidLsn
from cdc_replay.model.lsn import Lsn

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes of the segments that are verified, and of all."""

THREADS: Final = min(8, os.cpu_count() or 1)


@dataclass(slots=True)
class VerifiedLog:
    """What a log without fault holds: what committed in `(from_lsn, to_lsn]`; bytes are those of messages."""

    from_lsn: Lsn
    to_lsn: Lsn
    segments: int = 0
    messages: int = 0
    transactions: int = 0
    bytes: int = 0
    prepared: int = 0


def verify_log(uri: str, *, progress: Progress | None = None) -> VerifiedLog:
    """Read the whole log.

    Raises:
        ChangeLogMissing: if there is none.
        ChangeLogDamaged: for the first fault, naming the file, and row group and row where it is in one.
    """
    location = Location.parse(uri)
    changes = verify_table(location / "changes", check_changes)
    for name in ("relations", "catalogs"):
        verify_table(location / name)
    log = ChangeLog.open(uri)
    reader = RowReader.from_relations(log.relations())
    found = VerifiedLog(log.start_lsn, log.header.start_lsn)
    if (end := changes.position(log.header.slot)) is not None:
        found.to_lsn = Lsn(end)
    if changes.segments():
        _check_catalogs(log)
    _verify_segments(changes, reader, found, progress)
    found.prepared = _verify_prepared(log, location / "prepared", reader)
    for publication in (location / "prepared_roots").names():
        _verify_prepared(log, location / "prepared_roots" / publication, reader)
    return found


def _check_catalogs(log: ChangeLog) -> None:
    versions = log.catalogs()
    check_first_catalog(log.uri, versions[0].from_lsn if versions else None, log.header.start_lsn)


def _verify_segments(
    changes: DurableTable, reader: RowReader, found: VerifiedLog, progress: Progress | None
) -> None:
    segments = changes.segments()
    total, done = sum(segment.size_bytes for segment in segments), 0
    order = RowOrder()
    with ThreadPoolExecutor(THREADS) as pool:
        read = functools.partial(_read_segment, changes.location, reader)
        for segment, future in _ahead(pool, read, segments):
            rows = _unless_gone(changes, segment, future)
            order.take(rows)
            found.segments += 1 if rows else 0
            found.messages += sum(len(group.seqs) for group in rows)
            found.transactions += sum(group.transactions for group in rows)
            found.bytes += sum(group.bytes for group in rows)
            done += segment.size_bytes
            if progress is not None:
                progress(done, total)


def _ahead(
    pool: ThreadPoolExecutor,
    read: Callable[[Segment], tuple[RowGroupSummary, ...]],
    segments: Iterable[Segment],
) -> Iterator[tuple[Segment, Future[tuple[RowGroupSummary, ...]]]]:
    """The segments in order, while the next few are being read."""
    pending: collections.deque[tuple[Segment, Future[tuple[RowGroupSummary, ...]]]] = collections.deque()
    for segment in segments:
        pending.append((segment, pool.submit(read, segment)))
        if len(pending) > 2 * THREADS:
            yield pending.popleft()
    yield from pending


def _unless_gone(
    changes: DurableTable, segment: Segment, future: Future[tuple[RowGroupSummary, ...]]
) -> tuple[RowGroupSummary, ...]:
    """What was read of a segment; nothing if it cannot be read because a prune has deleted it by now."""
    try:
        return future.result()
    except ChangeLogDamaged:
        if not changes.is_stale([segment]):
            raise
        return ()


def _read_segment(folder: Location, reader: RowReader, segment: Segment) -> tuple[RowGroupSummary, ...]:
    """The content of a segment, which is what was committed. Runs in a thread of its own."""
    file = folder / segment.name
    size = file.filesystem.get_file_info(file.path).size
    if size != segment.size_bytes:
        raise _fault(file, f"It has {size or 0} bytes; {segment.size_bytes} were committed.")
    _check_name(file, segment)
    rows = tuple(_read_row_group(reader, group, limits) for group, limits in _row_groups(file))
    count = sum(len(each.seqs) for each in rows)
    if count != segment.rows or not rows:
        raise _fault(file, f"It has {count} messages; {segment.rows} were committed.")
    committed = segment.min_commit_lsn, segment.max_commit_lsn
    content = int(rows[0].commit_lsns[0]), int(rows[-1].commit_lsns[-1])
    if content != committed:
        raise _fault(file, f"It holds {_range(content)}; {_range(committed)} was committed.")
    return rows


def _check_name(file: Location, segment: Segment) -> None:
    """The name tells where the log ended before the pull."""
    text = segment.name.rpartition("-")[0].replace("-", "/")
    try:
        before = Lsn.parse(text)
    except InvalidLsn as error:
        raise _fault(file, f"Its name has no WAL position: {text}.") from error
    if segment.min_commit_lsn <= before.value:
        problem = f"It was written when the log ended at {before}, and holds what was in the log then."
        raise _fault(file, problem)


def _read_row_group(reader: RowReader, group: RowGroup, limits: tuple[int, int] | None) -> RowGroupSummary:
    found = reader.read(group)
    content = int(found.commit_lsns.min()), int(found.commit_lsns.max())
    if limits is not None and limits != content:
        problem = f"It holds {_range(content)}; its statistics say {_range(limits)}."
        raise _fault(Location.parse(group.uri), f"Row group {group.index}: {problem}")
    return found


def _row_groups(file: Location) -> Iterator[tuple[RowGroup, tuple[int, int] | None]]:
    """The row groups with the least and greatest commit LSN that the footer says of them."""
    metadata = read_footer(file)
    column = LOG_SCHEMA.get_field_index("commit_lsn")
    for index in range(metadata.num_row_groups):
        statistics = metadata.row_group(index).column(column).statistics
        has_limits = statistics is not None and statistics.has_min_max
        limits = (statistics.min, statistics.max) if has_limits else None
        yield RowGroup.from_footer(file, metadata, index), limits


def _verify_prepared(log: ChangeLog, folder: Location, reader: RowReader) -> int:
    """Read the prepared transactions that wait in a folder; how many there are."""
    waiting = PreparedTransactions(folder)
    try:
        keys = waiting.waiting()
    except (ValueError, InvalidLsn) as error:
        raise ChangeLogDamaged(
            f'there is a file in "{folder.uri}" that is no prepared transaction',
            detail=str(error),
            hint="Take it away, if it is none of this software's.",
        ) from error
    # What a pull has kept that died before its commit is sent again.
    committed = [key for key in keys if key.end_lsn <= log.end_lsn]
    for key in committed:
        RowOrder().take(reader.read(group) for group, _ in _row_groups(folder / key.file_name))
    return len(committed)


def _range(lsns: tuple[int, int]) -> str:
    return f"what committed from {Lsn(lsns[0])} to {Lsn(lsns[1])}"


def _fault(file: Location, problem: str) -> ChangeLogDamaged:
    return ChangeLogDamaged(
        f'segment "{file.uri}" of the change log is damaged or missing', detail=problem, hint=RESTORE
    )
