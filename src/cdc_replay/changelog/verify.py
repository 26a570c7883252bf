"""Verify a whole change log: everything committed must be there and correct. Reports the first fault.

| what                  | must                                                                           |
|-----------------------|--------------------------------------------------------------------------------|
| commits of each table | be complete, match their seals, and add up to what readers see                 |
| a segment             | have the committed size, number of messages, and range of commit LSNs          |
| a page                | match its checksum                                                             |
| messages              | be in the order of (commit LSN, seq), seq counting from 0 in each transaction  |
| a message             | be well-formed, and of a known relation version                                |
| relations, catalogs   | be readable; a catalog must be in force from the beginning                     |
| prepared transactions | be readable and well-formed                                                    |

Several threads read and decode segments, which are checked in order. Captures may run at the same time: the
log is verified as of the beginning. Segments that a prune deletes meanwhile are skipped.
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
"""Called with the bytes of verified segments, and of all segments."""

THREADS: Final = min(8, os.cpu_count() or 1)


@dataclass(slots=True)
class VerifiedLog:
    """Counts of a log without faults, which holds `(from_lsn, to_lsn]`; bytes are those of messages."""

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
        ChangeLogDamaged: for the first fault, naming the file, and the row group and row if it is in one.
    """
    location = Location.parse(uri)
    changes = verify_table(location / "changes", check_changes)
    for name in ("relations", "catalogs"):
        verify_table(location / name)
    log = ChangeLog.open(uri)
    reader = RowReader.from_relations(log.relations())
    verified = VerifiedLog(log.start_lsn, log.header.start_lsn)
    if (end := changes.position(log.header.slot)) is not None:
        verified.to_lsn = Lsn(end)
    if changes.segments():
        _check_catalogs(log)
    _verify_segments(changes, reader, verified, progress)
    verified.prepared = _verify_prepared(log, location / "prepared", reader)
    for publication in (location / "prepared_roots").names():
        _verify_prepared(log, location / "prepared_roots" / publication, reader)
    return verified


def _check_catalogs(log: ChangeLog) -> None:
    versions = log.catalogs()
    check_first_catalog(log.uri, versions[0].from_lsn if versions else None, log.header.start_lsn)


def _verify_segments(
    changes: DurableTable, reader: RowReader, verified: VerifiedLog, progress: Progress | None
) -> None:
    segments = changes.segments()
    total, completed = sum(segment.size_bytes for segment in segments), 0
    order = RowOrder()
    with ThreadPoolExecutor(THREADS) as pool:
        read = functools.partial(_read_segment, changes.location, reader)
        for segment, future in _read_ahead(pool, read, segments):
            groups = _unless_pruned(changes, segment, future)
            order.check(groups)
            verified.segments += 1 if groups else 0
            verified.messages += sum(len(group.seqs) for group in groups)
            verified.transactions += sum(group.transactions for group in groups)
            verified.bytes += sum(group.bytes for group in groups)
            completed += segment.size_bytes
            if progress is not None:
                progress(completed, total)


def _read_ahead(
    pool: ThreadPoolExecutor,
    read: Callable[[Segment], tuple[RowGroupSummary, ...]],
    segments: Iterable[Segment],
) -> Iterator[tuple[Segment, Future[tuple[RowGroupSummary, ...]]]]:
    """The segments in order; the next few are read in advance."""
    pending: collections.deque[tuple[Segment, Future[tuple[RowGroupSummary, ...]]]] = collections.deque()
    for segment in segments:
        pending.append((segment, pool.submit(read, segment)))
        if len(pending) > 2 * THREADS:
            yield pending.popleft()
    yield from pending


def _unless_pruned(
    changes: DurableTable, segment: Segment, future: Future[tuple[RowGroupSummary, ...]]
) -> tuple[RowGroupSummary, ...]:
    """The content of a segment; empty if it cannot be read because a prune has deleted it."""
    try:
        return future.result()
    except ChangeLogDamaged:
        if not changes.is_stale([segment]):
            raise
        return ()


def _read_segment(folder: Location, reader: RowReader, segment: Segment) -> tuple[RowGroupSummary, ...]:
    """The content of a segment, compared with its commit. Runs in a separate thread."""
    file = folder / segment.name
    size = file.filesystem.get_file_info(file.path).size
    if size != segment.size_bytes:
        raise _fault(file, f"It has {size or 0} bytes, expected {segment.size_bytes}.")
    _check_name(file, segment)
    groups = tuple(_read_row_group(reader, group, limits) for group, limits in _row_groups(file))
    count = sum(len(group.seqs) for group in groups)
    if count != segment.rows or not groups:
        raise _fault(file, f"It has {count} messages, expected {segment.rows}.")
    committed = segment.min_commit_lsn, segment.max_commit_lsn
    content = int(groups[0].commit_lsns[0]), int(groups[-1].commit_lsns[-1])
    if content != committed:
        raise _fault(file, f"It contains {_range(content)}, expected {_range(committed)}.")
    return groups


def _check_name(file: Location, segment: Segment) -> None:
    """Check the end of the log before the pull, which is in the name."""
    text = segment.name.rpartition("-")[0].replace("-", "/")
    try:
        before = Lsn.parse(text)
    except InvalidLsn as error:
        raise _fault(file, f"Its name has no WAL position: {text}.") from error
    if segment.min_commit_lsn <= before.value:
        problem = f"Its name says that the log ended at {before}, but it contains earlier transactions."
        raise _fault(file, problem)


def _read_row_group(reader: RowReader, group: RowGroup, limits: tuple[int, int] | None) -> RowGroupSummary:
    summary = reader.read(group)
    content = int(summary.commit_lsns.min()), int(summary.commit_lsns.max())
    if limits is not None and limits != content:
        problem = f"It contains {_range(content)}, but its statistics say {_range(limits)}."
        raise _fault(Location.parse(group.uri), f"Row group {group.index}: {problem}")
    return summary


def _row_groups(file: Location) -> Iterator[tuple[RowGroup, tuple[int, int] | None]]:
    """The row groups, with the least and greatest commit LSN from the footer."""
    metadata = read_footer(file)
    column = LOG_SCHEMA.get_field_index("commit_lsn")
    for index in range(metadata.num_row_groups):
        statistics = metadata.row_group(index).column(column).statistics
        has_limits = statistics is not None and statistics.has_min_max
        limits = (statistics.min, statistics.max) if has_limits else None
        yield RowGroup.from_footer(file, metadata, index), limits


def _verify_prepared(log: ChangeLog, folder: Location, reader: RowReader) -> int:
    """Read the prepared transactions in a folder; returns their number."""
    waiting = PreparedTransactions(folder)
    # The slot sends the transactions of a pull that died before its commit again.
    committed = [key for key in waiting.list_keys() if key.end_lsn <= log.end_lsn]
    for key in committed:
        RowOrder().check(reader.read(group) for group, _ in _row_groups(folder / key.file_name))
    return len(committed)


def _range(lsns: tuple[int, int]) -> str:
    return f"commits from {Lsn(lsns[0])} to {Lsn(lsns[1])}"


def _fault(file: Location, problem: str) -> ChangeLogDamaged:
    return ChangeLogDamaged(
        f'segment "{file.uri}" of the change log is damaged or missing', detail=problem, hint=RESTORE
    )
