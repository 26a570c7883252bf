"""Small neighbouring segments become larger ones; the log's rows, their order and its end stay as they are.

A pull every five minutes makes a hundred thousand segments a year. Left alone, each of them would be an entry
that every reader loads and a file that every reader opens. So neighbours are merged once many small ones have
gathered; a merged segment that is large enough is never touched again.

    before   [a 1 KB] [b 2 KB] [c 9 MB] [d 1 KB] [e 3 KB]      small is less than 8 MB
    after    [   a b     ] [c 9 MB] [     d e      ]

A merged segment is compared with its sources, row by row, before one commit puts it in their place.

| killed after               | there is                    | which                                 |
|----------------------------|-----------------------------|---------------------------------------|
| the merged file is written | a file that no commit names | no reader sees                        |
| the commit                 | the sources, as files only  | a later run deletes, see `KEEP_HOURS` |

Captures may commit at the same time: neither refuses the other. Of two compactions, or of a compaction and a
prune, the second is refused: both carry the position at which the log starts.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cdc_replay.changelog.delta.actions import AppTransaction
from cdc_replay.changelog.delta.table import DurableTable
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
    RESTORE,
    Segment,
    SegmentWriter,
    join_batches,
    plan_row_groups,
    read_row_group,
)
from cdc_replay.changelog.storage import Location, delete_files
from cdc_replay.errors import ChangeLogConflict, ChangeLogDamaged
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import ZERO, Lsn, Window

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

KEEP_HOURS: Final = 24
"""How long the file of a segment stays that is not in the log any more: a reader that opened the log before
may have planned with it."""

Row: TypeAlias = dict[str, Any]
"""A row of a side table."""

_SIDE_TABLE_APPLICATION: Final = "cdc_replay/compaction"
_EVERYTHING: Final = Window(ZERO, Lsn(2**63 - 1))


@dataclass(frozen=True, slots=True)
class CompactionLimits:
    """What is worth the work, and how much work one run does; at least one merge, if there is any."""

    small_bytes: int = 8 << 20
    """Segments below this are merged."""
    merged_bytes: int = 64 << 20
    """A merge stops to grow here."""
    merged_segments: int = 2_000
    """And here: so many are taken out by one commit."""
    worthwhile: int = 200
    """With fewer segments to merge, nothing is done."""
    run_bytes: int = 256 << 20
    """A run begins no merge after so much."""
    run_segments: int = 5_000
    """Nor after so many: of small files, opening them is the work."""


DEFAULT_LIMITS: Final = CompactionLimits()

SIDE_TABLE_FILES: Final = 50
"""A side table with so many files is written anew as one."""


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """What one run did: how many segments went, and into how many."""

    removed: int = 0
    added: int = 0
    bytes: int = 0

    def __add__(self, other: CompactionResult) -> CompactionResult:
        return CompactionResult(
            self.removed + other.removed, self.added + other.added, self.bytes + other.bytes
        )


def plan_merges(segments: Iterable[Segment], limits: CompactionLimits) -> tuple[tuple[Segment, ...], ...]:
    """Which segments, given in their order, become one each; none if there is too little to do."""
    merges = [run for run in _runs(segments, limits) if len(run) > 1]
    if sum(map(len, merges)) < limits.worthwhile:
        return ()
    sizes = itertools.accumulate((sum(one.size_bytes for one in run) for run in merges), initial=0)
    counts = itertools.accumulate(map(len, merges), initial=0)
    return tuple(
        run
        for run, size, count in zip(merges, sizes, counts, strict=False)
        if size < limits.run_bytes and count < limits.run_segments
    )


def _runs(segments: Iterable[Segment], limits: CompactionLimits) -> Iterator[tuple[Segment, ...]]:
    """Neighbours that are small, as many as one merge takes."""
    held: list[Segment] = []
    size = 0
    for segment in segments:
        is_small = segment.size_bytes < limits.small_bytes
        has_room = size + segment.size_bytes <= limits.merged_bytes and len(held) < limits.merged_segments
        if held and not (is_small and has_room):
            yield tuple(held)
            held, size = [], 0
        if is_small:
            held.append(segment)
            size += segment.size_bytes
    yield tuple(held)


def compact(table: DurableTable, start: AppTransaction, limits: CompactionLimits) -> CompactionResult:
    """Merge what is worth it; each merge is one durable commit, which carries `start` on.

    Raises:
        ChangeLogDamaged: if a segment cannot be read; it stays in the log, as do all others.
        ChangeLogConflict: if another process compacts or prunes the log; merges before that are done.
    """
    done = CompactionResult()
    for sources in plan_merges(table.segments(), limits):
        try:
            merged = _merged(table.location, sources)
        except ChangeLogDamaged as error:
            if not table.is_stale(sources):
                raise
            raise ChangeLogConflict(
                f'segments of the change log in "{table.location.uri}" are not there any more to be merged',
                detail="Another command has pruned or merged them meanwhile.",
                hint="Let the other command for this publisher end, then run this one again.",
            ) from error
        failpoint("compaction.after_segment")
        try:
            table.replace(sources, [merged], start)
        except (ChangeLogConflict, OSError):
            delete_files(table.location, [merged.name])
            raise
        failpoint("compaction.after_commit")
        done += CompactionResult(len(sources), 1, merged.size_bytes)
        logger.info(
            "merged %d segments of %s into one: %d messages, %d bytes",
            len(sources), table.location.uri, merged.rows, merged.size_bytes,
        )  # fmt: skip
    return done


def compact_relations(table: DurableTable) -> CompactionResult:
    """Write the relations anew as one file if they are in many, each version once.

    A row that is added meanwhile stays: only the files that were read are replaced.

    Raises:
        ChangeLogDamaged: if a file cannot be read; all of them stay.
        ChangeLogConflict: if another process does the same.
    """
    return _compact_side_table(
        table, RELATION_SCHEMA, lambda rows: relation_rows(parse_relations(rows).values())
    )


def compact_catalogs(table: DurableTable) -> CompactionResult:
    """The same for the catalogs, without those that were read again.

    Raises:
        ChangeLogDamaged, ChangeLogConflict: as for `compact_relations`.
    """
    return _compact_side_table(table, CATALOG_SCHEMA, lambda rows: catalog_rows(parse_catalogs(rows)))


def replace_catalogs(table: DurableTable, versions: Sequence[CatalogRow]) -> None:
    """Write the catalogs anew, with these only.

    Raises:
        ChangeLogConflict: if another process replaces or merges them.
    """
    added = [write_rows(table, CATALOG_SCHEMA, catalog_rows(versions))] if versions else []
    table.replace(table.segments(), added, AppTransaction(_SIDE_TABLE_APPLICATION, table.version + 1))


def _compact_side_table(
    table: DurableTable, schema: pa.Schema, current: Callable[[list[Row]], list[Row]]
) -> CompactionResult:
    files = table.segments()
    if len(files) < SIDE_TABLE_FILES:
        return CompactionResult()
    whole = write_rows(table, schema, current(read_rows(table, schema)))
    table.replace(files, [whole], AppTransaction(_SIDE_TABLE_APPLICATION, table.version + 1))
    return CompactionResult(len(files), 1, whole.size_bytes)


def delete_removed(table: DurableTable, *, older_than_hours: int = KEEP_HOURS) -> int:
    """Delete the files of segments that were taken out of the table longer ago; how many there were."""
    known = {segment.name for segment in table.segments()}
    names = [name for name in table.removed_files(older_than_hours=older_than_hours) if name not in known]
    return delete_files(table.location, names)


def _merged(folder: Location, sources: Sequence[Segment]) -> Segment:
    """The segment that holds what the sources hold, durable, read back and compared."""
    # The name tells the log's end before the first of the pulls, as theirs do.
    before = sources[0].name.rpartition("-")[0]
    with SegmentWriter(folder, f"{before}-{uuid.uuid4().hex}.parquet") as writer:
        for batch in join_batches(_rows(folder, sources)):
            writer.write(batch)
    merged = writer.segment
    if merged is None or not _is_equal(folder, merged, sources):
        delete_files(folder, [] if merged is None else [merged.name])
        raise ChangeLogDamaged(
            f'segments of the change log in "{folder.uri}" cannot be merged',
            detail=f"Merged and read back, those from {sources[0].name} to {sources[-1].name} are not what"
            " was committed. They are still in the log.",
            hint=RESTORE,
        )
    return merged


def _is_equal(folder: Location, merged: Segment, sources: Sequence[Segment]) -> bool:
    expected = (
        sum(one.rows for one in sources),
        min(one.min_commit_lsn for one in sources),
        max(one.max_commit_lsn for one in sources),
    )
    if expected != (merged.rows, merged.min_commit_lsn, merged.max_commit_lsn):
        return False
    pairs = itertools.zip_longest(_rows(folder, [merged]), join_batches(_rows(folder, sources)))
    return all(ours is not None and theirs is not None and ours.equals(theirs) for ours, theirs in pairs)


def _rows(folder: Location, segments: Iterable[Segment]) -> Iterator[pa.RecordBatch]:
    for segment in segments:
        for group in plan_row_groups(folder / segment.name, _EVERYTHING):
            yield read_row_group(group)
