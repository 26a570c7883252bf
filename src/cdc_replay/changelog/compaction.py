"""Merge small neighboring segments; the log's rows, their order and its end do not change.

A pull every five minutes creates a hundred thousand segments per year, each an entry that every reader loads
and a file that every reader opens. So neighbors are merged once there are many small ones; a merged segment
that is large enough is never rewritten.

    before   [a 1 KB] [b 2 KB] [c 9 MB] [d 1 KB] [e 3 KB]      small is less than 8 MB
    after    [   a b     ] [c 9 MB] [     d e      ]

A merged segment is compared with its sources, row by row, before one commit replaces them.

| killed after               | left over                                                             |
|----------------------------|-----------------------------------------------------------------------|
| the merged file is written | a file that no commit names; readers ignore it                        |
| the commit                 | the source files, which a later run deletes (`KEEP_HOURS`)            |

Captures can commit at the same time. Of two compactions, or a compaction and a prune, the second commit
fails: both carry the position at which the log starts.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cdc_replay.changelog.delta.actions import AppTransaction
from cdc_replay.changelog.delta.table import KEEP_HOURS, DurableTable
from cdc_replay.changelog.metadata_tables import (
    CATALOG_SCHEMA,
    RELATION_SCHEMA,
    CatalogRow,
    catalog_rows,
    parse_catalogs,
    parse_relations,
    read_rows,
    relation_rows,
    write_rows,
)
from cdc_replay.changelog.segment import (
    EVERYTHING,
    RESTORE,
    Segment,
    SegmentWriter,
    join_batches,
    plan_row_groups,
    read_row_group,
)
from cdc_replay.changelog.storage import Location, delete_files
from cdc_replay.errors import CdcReplayError, ChangeLogConflict, ChangeLogDamaged
from cdc_replay.failpoints import failpoint

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

Row: TypeAlias = dict[str, Any]
"""A row of a metadata table."""

_METADATA_APPLICATION: Final = "cdc_replay/compaction"


@dataclass(frozen=True, slots=True)
class CompactionLimits:
    """When a merge is worthwhile, and how much one run does: at least one merge, if there is any."""

    small_bytes: int = 8 << 20
    """Segments below this are merged."""
    merged_bytes: int = 64 << 20
    """The largest merged segment."""
    merged_segments: int = 2_000
    """The most segments per merge, which are removed by one commit."""
    worthwhile: int = 200
    """With fewer segments to merge, nothing is done."""
    run_bytes: int = 256 << 20
    """A run starts no merge after this many bytes."""
    run_segments: int = 5_000
    """Nor after this many segments: opening small files is most of the work."""


DEFAULT_LIMITS: Final = CompactionLimits()

METADATA_FILES: Final = 50
"""A metadata table with this many files is rewritten as one."""


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """How many segments one run removed, and how many it added."""

    removed: int = 0
    added: int = 0
    bytes: int = 0

    def __add__(self, other: CompactionResult) -> CompactionResult:
        return CompactionResult(
            self.removed + other.removed, self.added + other.added, self.bytes + other.bytes
        )


def plan_merges(segments: Iterable[Segment], limits: CompactionLimits) -> tuple[tuple[Segment, ...], ...]:
    """Groups of consecutive segments to merge into one each; none if there is too little to do."""
    merges = [run for run in _runs(segments, limits) if len(run) > 1]
    if sum(map(len, merges)) < limits.worthwhile:
        return ()
    sizes = itertools.accumulate((sum(segment.size_bytes for segment in run) for run in merges), initial=0)
    counts = itertools.accumulate(map(len, merges), initial=0)
    return tuple(
        run
        for run, size, count in zip(merges, sizes, counts, strict=False)
        if size < limits.run_bytes and count < limits.run_segments
    )


def _runs(segments: Iterable[Segment], limits: CompactionLimits) -> Iterator[tuple[Segment, ...]]:
    """Groups of consecutive small segments, each as long as one merge allows."""
    run: list[Segment] = []
    size = 0
    for segment in segments:
        is_small = segment.size_bytes < limits.small_bytes
        has_room = size + segment.size_bytes <= limits.merged_bytes and len(run) < limits.merged_segments
        if run and not (is_small and has_room):
            yield tuple(run)
            run, size = [], 0
        if is_small:
            run.append(segment)
            size += segment.size_bytes
    yield tuple(run)


def compact(table: DurableTable, start: AppTransaction, limits: CompactionLimits) -> CompactionResult:
    """Merge what is worthwhile; each merge is one durable commit, which repeats `start`.

    Raises:
        ChangeLogDamaged: if a segment cannot be read; all segments stay in the log.
        ChangeLogConflict: if another process compacts or prunes the log; earlier merges stay.
    """
    result = CompactionResult()
    for sources in plan_merges(table.segments(), limits):
        try:
            merged = _merge(table.location, sources)
        except ChangeLogDamaged as error:
            if not table.is_stale(sources):
                raise
            raise ChangeLogConflict(
                f'segments of the change log in "{table.location.uri}" do not exist any more',
                detail="Another command has pruned or merged them meanwhile.",
                hint="Wait for the other command for this publisher to end, then run this one again.",
            ) from error
        failpoint("compaction.after_segment")
        try:
            table.replace(sources, [merged], start)
        except ChangeLogConflict:
            delete_files(table.location, [merged.name])
            raise
        except OSError:
            _discard_unless_committed(table, merged)
            raise
        failpoint("compaction.after_commit")
        result += CompactionResult(len(sources), 1, merged.size_bytes)
        logger.info(
            "merged %d segments of %s into one: %d messages, %d bytes",
            len(sources), table.location.uri, merged.rows, merged.size_bytes,
        )  # fmt: skip
    return result


def compact_relations(table: DurableTable) -> CompactionResult:
    """Rewrite the relations as one file if they are in many, each version once.

    Rows that are added at the same time stay: only files that were read are replaced.

    Raises:
        ChangeLogDamaged: if a file cannot be read; all of them stay.
        ChangeLogConflict: if another process does the same.
    """
    return _compact_metadata(
        table, RELATION_SCHEMA, lambda rows: relation_rows(parse_relations(rows).values())
    )


def compact_catalogs(table: DurableTable) -> CompactionResult:
    """Rewrite the catalogs likewise, without those that were read again.

    Raises:
        ChangeLogDamaged, ChangeLogConflict: as for `compact_relations`.
    """
    return _compact_metadata(table, CATALOG_SCHEMA, lambda rows: catalog_rows(parse_catalogs(rows)))


def replace_catalogs(table: DurableTable, versions: Sequence[CatalogRow]) -> None:
    """Replace all catalogs by these.

    Raises:
        ChangeLogConflict: if another process replaces or merges them.
    """
    added = [write_rows(table, CATALOG_SCHEMA, catalog_rows(versions))] if versions else []
    table.replace(table.segments(), added, AppTransaction(_METADATA_APPLICATION, table.version + 1))


def _compact_metadata(
    table: DurableTable, schema: pa.Schema, current: Callable[[list[Row]], list[Row]]
) -> CompactionResult:
    files = table.segments()
    if len(files) < METADATA_FILES:
        return CompactionResult()
    whole = write_rows(table, schema, current(read_rows(table, schema)))
    table.replace(files, [whole], AppTransaction(_METADATA_APPLICATION, table.version + 1))
    return CompactionResult(len(files), 1, whole.size_bytes)


def delete_removed(table: DurableTable, *, older_than_hours: int = KEEP_HOURS) -> int:
    """Delete the files of segments that left the table longer ago than that; returns their number."""
    present = {segment.name for segment in table.segments()}
    names = [name for name in table.removed_files(older_than_hours=older_than_hours) if name not in present]
    return delete_files(table.location, names)


def _discard_unless_committed(table: DurableTable, merged: Segment) -> None:
    """Delete a merged file after an error that does not tell whether its commit was written.

    A store may have written it, or still do: there the file stays until its age shows that nobody needs it.
    """
    with contextlib.suppress(CdcReplayError, OSError):
        if table.location.is_local and table.is_stale([merged]):
            delete_files(table.location, [merged.name])


def _merge(folder: Location, sources: Sequence[Segment]) -> Segment:
    """The segment with the rows of the sources: durable, read back and compared."""
    # As in a pull's file name, the prefix is the log's end before the first of the pulls.
    log_end = sources[0].name.rpartition("-")[0]
    with SegmentWriter(folder, f"{log_end}-{uuid.uuid4().hex}.parquet") as writer:
        for batch in join_batches(_rows(folder, sources)):
            writer.write(batch)
    merged = writer.segment
    if merged is None or not _is_equal(folder, merged, sources):
        delete_files(folder, [] if merged is None else [merged.name])
        raise ChangeLogDamaged(
            f'segments of the change log in "{folder.uri}" cannot be merged',
            detail=f"After merging {sources[0].name} to {sources[-1].name}, the rows that were read back"
            " differ from the committed ones. The segments are still in the log.",
            hint=RESTORE,
        )
    return merged


def _is_equal(folder: Location, merged: Segment, sources: Sequence[Segment]) -> bool:
    expected = (
        sum(segment.rows for segment in sources),
        min(segment.min_commit_lsn for segment in sources),
        max(segment.max_commit_lsn for segment in sources),
    )
    if expected != (merged.rows, merged.min_commit_lsn, merged.max_commit_lsn):
        return False
    pairs = itertools.zip_longest(_rows(folder, [merged]), join_batches(_rows(folder, sources)))
    return all(batch is not None and source is not None and batch.equals(source) for batch, source in pairs)


def _rows(folder: Location, segments: Iterable[Segment]) -> Iterator[pa.RecordBatch]:
    for segment in segments:
        for group in plan_row_groups(folder / segment.name, EVERYTHING):
            yield read_row_group(group)
