"""The change log of one publisher: every committed change since the slot was created, in commit order.

    <uri>/changes      Delta table of messages (`model.frames.LOG`); header and end LSN are in its commits
    <uri>/relations    Delta table: relation shapes, by version
    <uri>/catalogs     Delta table: the publisher's catalog and its DDL changes, by position
    <uri>/prepared     content of prepared transactions without outcome; their TRUNCATEs of partitioned
                       tables are in `prepared_roots`

A pull calls `write` (messages, in a file that no commit names yet), `add_relations` and `add_catalogs`, then
`commit`, which makes the messages visible and moves the end LSN in one atomic step. Readers see the log as of
when they opened it; segments are immutable, so no lock is needed. The log holds what is in `(start, end]`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Self

from cdc_replay.arrow.version_index import CatalogVersions
from cdc_replay.changelog.compaction import (
    DEFAULT_LIMITS,
    CompactionLimits,
    CompactionResult,
    compact,
    compact_catalogs,
    compact_relations,
    delete_removed,
    replace_catalogs,
)
from cdc_replay.changelog.delta.actions import AppTransaction
from cdc_replay.changelog.delta.table import KEEP_HOURS, DurableTable
from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.metadata_tables import (
    CATALOG_SCHEMA,
    RELATION_SCHEMA,
    CatalogRow,
    KnownRelations,
    append_rows,
    catalog_rows,
    check_first_catalog,
    parse_catalogs,
    parse_relations,
    read_rows,
    relation_rows,
)
from cdc_replay.changelog.orphans import TABLES, folders_without_log, remove_dead_pulls, remove_old_orphans
from cdc_replay.changelog.prepared_transactions import PreparedTransactions
from cdc_replay.changelog.prune import commit_times, prunable_segments, prune, start_application
from cdc_replay.changelog.queries import (
    CommittedTransaction,
    LoggedDefinitions,
    LoggedMessage,
    LogSummary,
    SentChanges,
    end_before,
    last_lsn_without,
    log_summary,
    logged_commits,
    logged_definitions,
    logged_messages,
    relation_versions,
    truncate_commits,
)
from cdc_replay.changelog.segment import (
    LOG_SCHEMA,
    RESTORE,
    RowGroup,
    Segment,
    SegmentWriter,
    join_batches,
    plan_row_groups,
    read_row_group,
)
from cdc_replay.changelog.storage import (
    Location,
    check_put_if_absent,
    restrict_to_owner,
    storage_read_errors,
    storage_write_errors,
)
from cdc_replay.errors import ChangeLogConflict, ChangeLogDamaged, ChangeLogMissing, ChangeLogPruned
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.relation import Relation

if TYPE_CHECKING:
    import pyarrow as pa


class ChangeLog:
    """A change log as of when it was opened; methods that read a window raise as `segments` does."""

    def __init__(self, location: Location, changes: DurableTable, header: LogHeader) -> None:
        self._location = location
        self._changes = changes
        self.header = header
        self.prepared = PreparedTransactions(location / "prepared")
        self._read_relations: Mapping[int, Relation] | None = None
        self._read_catalogs: tuple[CatalogRow, ...] | None = None

    @classmethod
    def create(cls, uri: str, header: LogHeader) -> Self:
        """Create an empty log that ends at `header.start_lsn`.

        Raises:
            ChangeLogConflict: if there is a log, or the remains of one.
            ChangeLogNotWritable: if it cannot be written; the same call then completes it.
        """
        location = Location.parse(uri)
        if cls.exists(uri):
            raise ChangeLogConflict(
                f'change log "{uri}" already exists',
                hint="Choose another `change_log` in the configuration, or remove that one first.",
            )
        if folders := folders_without_log(location):
            raise ChangeLogConflict(
                f'"{uri}" contains the remains of a removed change log',
                detail=f"The folders {', '.join(folders)} exist, but no changes.",
                hint="Move them away, or choose another `change_log` in the configuration.",
            )
        # The table of changes last: once it exists, the log is complete. Metadata tables of a creation that
        # died are empty, so they are as good as new ones.
        with storage_write_errors(uri):
            check_put_if_absent(location)
            for name, schema in (("relations", RELATION_SCHEMA), ("catalogs", CATALOG_SCHEMA)):
                if not DurableTable.exists(location / name):
                    DurableTable.create(location / name, schema)
            changes = DurableTable.create(
                location / "changes",
                LOG_SCHEMA,
                configuration=header.to_configuration(),
                position=AppTransaction(header.slot, header.start_lsn.value),
            )
            restrict_to_owner(location)
        return cls(location, changes, header)

    @classmethod
    def exists(cls, uri: str) -> bool:
        """There is a log at `uri`, perhaps a damaged one.

        Raises:
            ChangeLogUnavailable: if the storage cannot be read.
        """
        with storage_read_errors(uri):
            return DurableTable.exists(Location.parse(uri) / "changes")

    @classmethod
    def open(cls, uri: str) -> Self:
        """The log as it is now.

        Raises:
            ChangeLogMissing: if there is none.
            ChangeLogDamaged: if it cannot be read, or has another format.
            ChangeLogUnavailable: if the folder or the store cannot be read.
        """
        if not cls.exists(uri):
            raise ChangeLogMissing(
                f'there is no change log at "{uri}"',
                hint="Run `cdc-replay setup` for the publisher, or correct its `change_log` setting.",
            )
        location = Location.parse(uri)
        with storage_read_errors(uri):
            restrict_to_owner(location)
        changes = DurableTable.open(location / "changes")
        header = LogHeader.from_configuration(uri, changes.configuration)
        for application in (header.slot, start_application(header.slot)):
            # Read and cache the positions now: the commits that contain them may be deleted later.
            changes.position(application)
        return cls(location, changes, header)

    @property
    def uri(self) -> str:
        """Where the log is: an absolute path or a URI."""
        return self._location.uri

    @property
    def end_lsn(self) -> Lsn:
        """Everything committed at or before this position is in the log."""
        position = self._changes.position(self.header.slot)
        return self.header.start_lsn if position is None else Lsn(position)

    @property
    def start_lsn(self) -> Lsn:
        """Everything committed after this position, up to the end, is in the log."""
        position = self._changes.position(start_application(self.header.slot))
        return self.header.start_lsn if position is None else Lsn(position)

    @property
    def size_bytes(self) -> int:
        """The size of its segments."""
        window = Window(self.start_lsn, self.end_lsn)
        return sum(segment.size_bytes for segment in self._changes.segments(window))

    def check_holds(self, window: Window) -> None:
        """Check that no part of `window` was pruned.

        Raises:
            ChangeLogPruned: if the window starts before the log.
        """
        if self.header.start_lsn < self.start_lsn and window.after < self.start_lsn:
            raise ChangeLogPruned(
                f'change log "{self.uri}" no longer contains the changes after {window.after}',
                detail=f"It has been pruned: it starts at {self.start_lsn} now.",
                hint="Run `cdc-replay snapshot` for the subscription: it copies the tables that need it.",
            )

    def write(self, batches: Iterable[pa.RecordBatch]) -> tuple[Segment, ...]:
        """Write rows (`ROWS_SCHEMA` or `LOG_SCHEMA`), in order, to a durable file that no commit names yet.

        Small batches are joined to row groups of `segment.ROW_GROUP_ROWS` rows or `ROW_GROUP_BYTES` bytes.
        Without a message there is no file, and the result is empty.

        Raises:
            ChangeLogNotWritable: if the file cannot be written; it is deleted then.
        """
        name = f"{self.end_lsn.file_name}-{uuid.uuid4().hex}.parquet"
        with storage_write_errors(self.uri), SegmentWriter(self._location / "changes", name) as writer:
            for batch in join_batches(batches):
                writer.write(batch)
        return () if writer.segment is None else (writer.segment,)

    def read(self, segments: Sequence[Segment]) -> Iterator[pa.RecordBatch]:
        """The messages of written segments, in order, committed or not.

        Raises:
            ChangeLogDamaged: if one cannot be read.
        """
        for segment in segments:
            for group in self._row_groups(segment, Window(ZERO, Lsn(segment.max_commit_lsn))):
                yield read_row_group(group)

    def discard(self, segments: Sequence[Segment]) -> None:
        """Delete written segments that were not committed.

        Raises:
            ChangeLogNotWritable: if one cannot be deleted.
        """
        with storage_write_errors(self.uri):
            for segment in segments:
                file = self._location / "changes" / segment.name
                file.filesystem.delete_file(file.path)

    def prepared_roots(self, publication: str) -> PreparedTransactions:
        """The stored TRUNCATEs of prepared transactions that only this root publication shows (R2.14)."""
        return PreparedTransactions(self._location / "prepared_roots" / publication)

    def commit(self, segments: Sequence[Segment], end_lsn: Lsn) -> None:
        """Make written segments visible and move the end of the log, atomically and durably.

        Raises:
            ChangeLogConflict: if another writer has committed since this object saw the log.
            ChangeLogNotWritable: if the commit cannot be written.
        """
        with storage_write_errors(self.uri):
            self._changes.commit(segments, AppTransaction(self.header.slot, end_lsn.value))

    def record_header(self, header: LogHeader) -> None:
        """Replace the header, durably: another timeline of the server, or another name of its database.

        Raises:
            ChangeLogConflict: if another writer has committed since this object saw the log.
            ChangeLogNotWritable: if the commit cannot be written.
        """
        with storage_write_errors(self.uri):
            self._changes.configure(header.to_configuration())
        self.header = header

    def add_relations(self, relations: Mapping[int, Relation]) -> None:
        """Add the shapes, by version, that the log does not have yet."""
        if not relations:
            return
        table = self._relations()
        present = parse_relations(read_rows(table, RELATION_SCHEMA))
        new = [relation for version, relation in relations.items() if version not in present]
        with storage_write_errors(self.uri):
            append_rows(table, RELATION_SCHEMA, relation_rows(new))
        self._read_relations = None

    def add_catalogs(self, versions: Sequence[CatalogRow]) -> None:
        """Add catalogs; of two with the same owner and `from_lsn`, the one that was read later counts."""
        if not versions:
            return
        table = self._catalogs()
        with storage_write_errors(self.uri):
            append_rows(table, CATALOG_SCHEMA, catalog_rows(versions))
        self._read_catalogs = None

    def drop_uncommitted_catalogs(self) -> tuple[CatalogRow, ...]:
        """Remove the catalogs of a pull that died before its commit; returns all others, in order.

        The next pull would write them again, unless the server has become one that never had them.

        Raises:
            ChangeLogDamaged: if they cannot be read, or there are changes and no catalogs.
            ChangeLogConflict: if another process does the same.
        """
        versions = self.catalogs()
        committed = tuple(version for version in versions if version.known_from <= self.end_lsn)
        if not committed and self._changes.segments():
            # Otherwise the current catalog would be used for all changes in the log.
            check_first_catalog(self.uri, None, self.header.start_lsn)
        if len(committed) < len(versions):
            with storage_write_errors(self.uri):
                replace_catalogs(self._catalogs(), committed)
            self._read_catalogs = None
        return committed

    def relations(self) -> Mapping[int, Relation]:
        """All shapes by version, read once; looking up an unknown one raises ChangeLogDamaged.

        Raises:
            ChangeLogDamaged: if they cannot be read.
        """
        if self._read_relations is None:
            rows = read_rows(self._relations(), RELATION_SCHEMA)
            self._read_relations = KnownRelations(self.uri, parse_relations(rows))
        return self._read_relations

    def catalogs(self) -> tuple[CatalogRow, ...]:
        """The publisher's catalogs in the order in which they take effect for all transactions; read once.

        Raises:
            ChangeLogDamaged: if they cannot be read.
        """
        if self._read_catalogs is None:
            self._read_catalogs = parse_catalogs(read_rows(self._catalogs(), CATALOG_SCHEMA))
        return self._read_catalogs

    def segments(self, window: Window) -> tuple[RowGroup, ...]:
        """The row groups that hold the transactions of `window`, in order.

        The first and the last may also hold others.

        Raises:
            ChangeLogPruned: if the window starts before the log.
            ChangeLogDamaged: if a segment is missing, truncated or has no readable footer.
        """
        return tuple(self._groups_in(window))

    def split_lsn(self, window: Window, rows: int) -> Lsn:
        """The first LSN at which to split `window` into parts of about `rows` messages; else its end.

        Split points do not depend on the window's start. A segment is never split. Nothing is split off that
        has no changes: a window of its own would wait until the one before is merged.
        """
        inside = (Lsn(end) for end in self._changes.split_points(rows) if end > window.after.value)
        split = next(inside, window.upto)
        return split if self._changes.segments(Window(split, window.upto)) else window.upto

    def commits(self, window: Window) -> Iterator[CommittedTransaction]:
        """The transactions of `window` in commit order; non-transactional messages are skipped (R9.13)."""
        return logged_commits(self.segments(window), window)

    def first_commit(self, window: Window) -> CommittedTransaction | None:
        """The first transaction of `window`; reads no further."""
        return next(logged_commits(self._groups_in(window), window), None)

    def relation_versions(self, window: Window) -> frozenset[int]:
        """The relation versions of the row changes of `window`; reads one small column."""
        return relation_versions(self.segments(window), window)

    def definitions_in(self, window: Window, catalogs: Sequence[tuple[int, int]]) -> LoggedDefinitions:
        """The pairs of relation version and catalog version in the changes of `window` (R9.10).

        `catalogs` are (owner, from LSN) of the versions, as for `arrow.version_index`. Reads small columns,
        and the messages of TRUNCATEs.

        Raises:
            ChangeLogDamaged: as for `segments`, or if the log lacks its first catalog.
        """
        groups = self.segments(window)
        if groups:
            first = Lsn(catalogs[0][1]) if catalogs else None
            check_first_catalog(self.uri, first, self.header.start_lsn)
        return logged_definitions(groups, window, CatalogVersions.from_positions(catalogs))

    def summary(self, window: Window) -> LogSummary:
        """Counts of the messages and transactions in `window`; reads small columns only."""
        return log_summary(self.segments(window), window)

    def logical_messages(self, window: Window, prefix: str) -> Iterator[LoggedMessage]:
        """The transactional logical messages of `window` with this prefix, in order."""
        return logged_messages(self.segments(window), window, prefix)

    def last_lsn_without(self, window: Window, versions: Set[int]) -> Lsn:
        """The LSN up to which `window` has no change of these relation versions."""
        return last_lsn_without(self.segments(window), window, versions)

    def end_before(self, window: Window, sent: SentChanges, catalogs: CatalogVersions) -> Lsn:
        """The LSN up to which `window` has none of these changes."""
        return end_before(self.segments(window), window, sent, catalogs)

    def truncate_commits(self, window: Window) -> list[Lsn]:
        """The transactions of `window` with a TRUNCATE, in order."""
        return truncate_commits(self.segments(window), window)

    def prunable_segments(self, upto: Lsn, *, committed_by: int | None = None) -> tuple[Segment, ...]:
        """The first segments of the log that lie wholly at or before `upto`.

        With `committed_by` (microseconds since 1970 UTC), only those wholly committed by then.

        Raises:
            ChangeLogDamaged: if a segment has to be read for that, and cannot be.
        """
        return prunable_segments(self._changes, upto, committed_by)

    def commit_times(self, segments: Sequence[Segment] | None = None) -> tuple[int, int] | None:
        """Commit times of the first and last transaction of these segments, or the log, in microseconds.

        Raises:
            ChangeLogDamaged: if a segment has to be read for that, and cannot be.
        """
        return commit_times(self._changes, self._changes.segments() if segments is None else segments)

    def prune(self, segments: Sequence[Segment], *, keep_files: Callable[[], bool] = lambda: False) -> int:
        """Remove what `prunable_segments` returned from the log, and move its start after it, durably.

        Returns the number of deleted files; they stay until `delete_removed` if `keep_files`, which is asked
        after the commit.

        Raises:
            ChangeLogConflict: if another process prunes or compacts the log.
            ChangeLogNotWritable: if the commit cannot be written, or a file cannot be deleted.
        """
        if not segments:
            return 0
        with storage_write_errors(self.uri):
            return prune(self._changes, self.header.slot, segments, keep_files=keep_files)

    def compact(self, limits: CompactionLimits = DEFAULT_LIMITS) -> CompactionResult:
        """Merge small neighboring segments if there are enough; rows and end do not change.

        The metadata tables are merged likewise. Files that earlier runs replaced are deleted once no reader
        can use them.

        Raises:
            ChangeLogDamaged: if a segment cannot be read; all of them stay in the log.
            ChangeLogConflict: if another process prunes or compacts the log.
            ChangeLogNotWritable: if a file cannot be written.
        """
        start = AppTransaction(start_application(self.header.slot), self.start_lsn.value)
        with storage_write_errors(self.uri):
            result = compact(self._changes, start, limits)
            result += compact_relations(self._relations()) + compact_catalogs(self._catalogs())
            if result.removed:
                # A log of an earlier version remembers them for a week.
                self._changes.forget_old_removed_files()
                self.delete_removed()
        return result

    def delete_removed(self, *, older_than_hours: int = KEEP_HOURS) -> int:
        """Delete the files that left the log longer ago than that; returns their number.

        Also those of compactions, and of other writers, that died longer than a day ago: see `orphans`.

        Raises:
            ChangeLogNotWritable: if a file cannot be deleted.
        """
        with storage_write_errors(self.uri):
            # As they are now: what was committed since this object opened the log is not an orphan.
            tables = [DurableTable.open(self._location / name) for name in TABLES]
            return sum(
                delete_removed(table, older_than_hours=older_than_hours) + remove_old_orphans(table)
                for table in tables
            )

    def remove_dead_pulls(self) -> int:
        """Delete the files of pulls that died; returns their number.

        Only for the writer that holds the slot, before it writes: see `orphans`.

        Raises:
            ChangeLogNotWritable: if a file cannot be deleted.
            ChangeLogDamaged: if a file among prepared transactions is none.
        """
        with storage_write_errors(self.uri):
            return remove_dead_pulls(self._location, self._changes, self.end_lsn)

    def _relations(self) -> DurableTable:
        return DurableTable.open(self._location / "relations")

    def _catalogs(self) -> DurableTable:
        return DurableTable.open(self._location / "catalogs")

    def _groups_in(self, window: Window) -> Iterator[RowGroup]:
        self.check_holds(window)
        for segment in self._changes.segments(window):
            yield from self._row_groups(segment, window)

    def _row_groups(self, segment: Segment, window: Window) -> tuple[RowGroup, ...]:
        file = self._location / "changes" / segment.name
        size = file.filesystem.get_file_info(file.path).size
        if size != segment.size_bytes:
            # If the log was pruned since it was opened, report that instead.
            ChangeLog.open(self.uri).check_holds(window)
            raise ChangeLogDamaged(
                f'segment "{file.uri}" of the change log is damaged or missing',
                detail=f"It has {size or 0} bytes, expected {segment.size_bytes}.",
                hint=RESTORE,
            )
        return plan_row_groups(file, window)
