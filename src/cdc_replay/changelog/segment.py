"""One immutable file of the change log: Parquet with page checksums, read by row groups.

A segment holds the messages of one pull in the order of their transactions (`commit_lsn`, `seq`). It is
written once, one row group per batch, so that memory does not grow with the pull. Readers ignore the file's
name until all of it is flushed, so a file with its final name is whole (`storage`). A process that dies
before its commit leaves a file that no commit names.

The driver plans row groups from the files' footers; executors read them independently, and verify the
checksum of every page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc_replay.arrow.byte_slices import VIEWS, with_views
from cdc_replay.arrow.frame_schema import arrow_schema
from cdc_replay.changelog.storage import (
    PARTIAL,
    Location,
    make_file,
    publish_file,
    storage_read_errors,
    sync_file,
)
from cdc_replay.errors import ChangeLogDamaged
from cdc_replay.model.frames import LOG
from cdc_replay.model.lsn import ZERO, Lsn, Window

LOG_SCHEMA: Final = arrow_schema(LOG)
"""The columns of `model.frames.LOG` as Arrow types."""

ROWS_SCHEMA: Final = pa.schema(
    [field.with_type(VIEWS) if field.name == "message" else field for field in LOG_SCHEMA]
)
"""Rows to be written, whose messages may still be where a peek has put them; files have `LOG_SCHEMA`."""

_COMMIT_LSN: Final = LOG_SCHEMA.get_field_index("commit_lsn")

_DICTIONARY: Final = ["commit_lsn", "commit_time", "xid", "origin", "kind", "relation_id", "relation_version"]


EVERYTHING: Final = Window(ZERO, Lsn(2**63 - 1))

RESTORE: Final = (
    "Restore the file from a copy of the change log; without one, create a new log with `cdc-replay teardown`"
    " and `cdc-replay setup` for the publisher, then run `cdc-replay snapshot` for each of its subscriptions."
)
"""The remedy for a damaged log."""


ROW_GROUP_ROWS: Final = 50_000
ROW_GROUP_BYTES: Final = 32 << 20
"""The size of a row group, which one task reads at a time and holds in memory."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A part of a segment that one task reads; picklable. `size_bytes` is its approximate size in memory."""

    uri: str
    index: int
    rows: int
    size_bytes: int

    @classmethod
    def from_footer(cls, file: Location, metadata: pq.FileMetaData, index: int) -> Self:
        """The row group of that index, as the footer describes it."""
        row_group = metadata.row_group(index)
        return cls(file.uri, index, row_group.num_rows, row_group.total_byte_size)


@dataclass(frozen=True, slots=True)
class Segment:
    """A written segment, with the commit LSNs of its first and last transaction."""

    name: str
    size_bytes: int
    rows: int
    min_commit_lsn: int
    max_commit_lsn: int


class SegmentWriter:
    """Writes one segment, the file `name` in `folder`, one row group per batch.

    A row group is compressed and written while the caller prepares the next one. On exit the file is closed,
    flushed and given its name, replacing an older one; after an error it is deleted. `segment` is set
    afterwards; None if no row was written, and then there is no file.
    """

    def __init__(self, folder: Location, name: str) -> None:
        self._target = folder / name
        # In an object store the name appears with the end of the upload.
        self._file = folder / f"{PARTIAL}{name}" if folder.is_local else self._target
        self._writer: pq.ParquetWriter | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="segment")
        self._running: Future[None] | None = None
        self._rows = 0
        self._first = 0
        self._last = 0
        self.segment: Segment | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._writer is not None and error is None:
                self.segment = self._finish(self._writer)
        finally:
            self._thread.shutdown()
            if self._writer is not None and self.segment is None:
                self._discard(self._writer)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append one row group of `ROWS_SCHEMA` or `LOG_SCHEMA`; raises errors of the previous one."""
        if batch.num_rows == 0:
            return
        if self._writer is None:
            self._writer = self._open()
            self._first = batch["commit_lsn"][0].as_py()
        self._wait()
        rows = with_views(batch)
        self._running = self._thread.submit(self._writer.write_batch, rows, row_group_size=rows.num_rows)
        self._rows += batch.num_rows
        self._last = batch["commit_lsn"][-1].as_py()

    def _wait(self) -> None:
        if self._running is not None:
            self._running.result()

    def _finish(self, writer: pq.ParquetWriter) -> Segment:
        self._wait()
        writer.close()
        size = self._file.filesystem.get_file_info(self._file.path).size
        if self._file != self._target:
            sync_file(self._file)
            publish_file(self._file, self._target)
        return Segment(self._target.name, size, self._rows, self._first, self._last)

    def _open(self) -> pq.ParquetWriter:
        make_file(self._file)
        return pq.ParquetWriter(
            self._file.path,
            ROWS_SCHEMA,
            filesystem=self._file.filesystem,
            compression="zstd",
            use_dictionary=_DICTIONARY,
            write_statistics=["commit_lsn"],
            write_page_checksum=True,
            store_schema=False,  # Readers are to get bytes, not views.
        )

    def _discard(self, writer: pq.ParquetWriter) -> None:
        # Do not replace the original error by one about closing or deleting an unnamed file.
        try:
            writer.close()
            self._file.filesystem.delete_file(self._file.path)
        except (OSError, pa.ArrowException):
            return


def join_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches, each within the limits unless a source batch exceeds them."""
    group: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        if group and (rows + batch.num_rows > ROW_GROUP_ROWS or size_bytes + batch.nbytes > ROW_GROUP_BYTES):
            yield pa.concat_batches(group)
            group, rows, size_bytes = [], 0, 0
        group.append(batch)
        rows += batch.num_rows
        size_bytes += batch.nbytes
    if group:
        yield pa.concat_batches(group)


def plan_row_groups(file: Location, window: Window) -> tuple[RowGroup, ...]:
    """The row groups of a segment that may hold transactions of `window`, in order.

    Raises:
        ChangeLogDamaged: if the file is missing, truncated or not a segment.
    """
    metadata = read_footer(file)
    return tuple(
        RowGroup.from_footer(file, metadata, index)
        for index in range(metadata.num_row_groups)
        if _overlaps(metadata.row_group(index).column(_COMMIT_LSN).statistics, window)
    )


def read_footer(file: Location) -> pq.FileMetaData:
    """The footer of a segment.

    Raises:
        ChangeLogDamaged: if the file is missing, truncated or not a segment.
    """
    try:
        with file.filesystem.open_input_file(file.path) as source:
            metadata = pq.ParquetFile(source).metadata
        schema = metadata.schema.to_arrow_schema()
    except (OSError, pa.ArrowException) as error:
        raise segment_error(file, None, error) from error
    if not schema.equals(LOG_SCHEMA):
        raise damaged_segment(file.uri, None, ValueError(f"its columns are {', '.join(map(str, schema))}"))
    return metadata


def _overlaps(statistics: pq.Statistics | None, window: Window) -> bool:
    if statistics is None or not statistics.has_min_max:
        return True
    return bool(statistics.max > window.after.value and statistics.min <= window.upto.value)


def read_row_group(group: RowGroup) -> pa.RecordBatch:
    """The messages of one row group as one batch of `LOG_SCHEMA`. Runs on executors.

    Raises:
        ChangeLogDamaged: if the file is missing, truncated, or a page does not match its checksum.
    """
    table = _read(group, None)
    # A row group was written as one batch, so it fits into one again (2 GiB of messages, R1.32).
    batches = table.combine_chunks().to_batches()
    if table.num_rows != group.rows or table.schema != LOG_SCHEMA or len(batches) != 1:
        raise ChangeLogDamaged(
            f'segment "{group.uri}" of the change log differs from what was written',
            detail=f"Row group {group.index} has {table.num_rows} rows of {table.schema.names} in"
            f" {len(batches)} batches, expected {group.rows} of {LOG_SCHEMA.names} in one.",
            hint=RESTORE,
        )
    return batches[0]


def read_columns(group: RowGroup, names: Sequence[str], window: Window) -> pa.Table:
    """Columns of a row group's messages, for the transactions in `window` only.

    Raises:
        ChangeLogDamaged: as for `read_row_group`.
    """
    table = _read(group, ["commit_lsn", *names])
    lsns, columns = table["commit_lsn"], table.select(list(names))
    bounds = pc.min_max(lsns).as_py()
    if bounds["min"] > window.after.value and bounds["max"] <= window.upto.value:
        return columns
    inside = pc.and_(pc.greater(lsns, window.after.value), pc.less_equal(lsns, window.upto.value))
    return columns.filter(inside)


def first_position(group: RowGroup) -> tuple[int, int]:
    """The commit LSN and seq of a row group's first message.

    Raises:
        ChangeLogDamaged: as for `read_row_group`.
    """
    first = _read(group, ["commit_lsn", "seq"]).slice(0, 1).to_pylist()[0]
    return first["commit_lsn"], first["seq"]


def _read(group: RowGroup, names: Sequence[str] | None) -> pa.Table:
    file = Location.parse(group.uri)
    try:
        with file.filesystem.open_input_file(file.path) as source:
            reader = pq.ParquetFile(source, page_checksum_verification=True)
            return reader.read_row_group(group.index, columns=names, use_threads=False)
    except (OSError, pa.ArrowException, IndexError) as error:
        raise segment_error(file, group.index, error) from error


def segment_error(file: Location, row_group: int | None, error: Exception) -> ChangeLogDamaged:
    """The error for a segment that cannot be read although its store can.

    Raises:
        ChangeLogUnavailable: if the store does not answer; the segment may be intact then.
    """
    with storage_read_errors(file.uri):
        file.filesystem.get_file_info(file.path)
    return damaged_segment(file.uri, row_group, error)


def damaged_segment(uri: str, row_group: int | None, error: Exception) -> ChangeLogDamaged:
    """The error for a segment, or a row group of it, that cannot be read."""
    subject = "It" if row_group is None else f"Row group {row_group}"
    return ChangeLogDamaged(
        f'segment "{uri}" of the change log is damaged or missing',
        detail=f"{subject} cannot be read: {error}",
        hint=RESTORE,
    )
