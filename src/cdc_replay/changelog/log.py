"""The change log of one publisher: every committed change since the slot was created, in commit order.

    <uri>/changes      Delta table of messages (`model.frames.LOG`); header and end LSN are in its commits
    <uri>/relations    Delta table: the shapes that relations have had, by version
    <uri>/catalogs     Delta table: the publisher's catalog, and what commands changed of it, by position
    <uri>/prepared     content of prepared transactions whose outcome is not known yet; beside it, in
                       `prepared_roots`, their TRUNCATEs of partitioned tables

A pull is `write` (the messages, in a file that nothing names yet), then `add_relations` and `add_catalogs`,
then `commit`, which makes the messages visible and moves the end LSN in one atomic step. Readers open the
log and see it as of that moment; segments are never changed, so they need no lock. The log holds what is in
`(start, end]`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Self

from cdc_replay.arrow.version_index import CatalogVersions
from cdc_replay.changelog.compaction import (
    DEFAULT_LIMITS,
    KEEP_HOURS,
    Compacted,
    CompactionLimits,
    compact,
    compact_catalogs,
    compact_relations,
    delete_removed,
    replace_catalogs,
)
from cdc_replay.changelog.delta.actions import AppTransaction
from cdc_replay.changelog.delta.table import DurableTable
from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.metadata_tables import (
    CATALOG_SCHEMA,
    RELATION_SCHEMA,
    CatalogRow,
    KnownRelations,
    append_rows,
    catalog_rows,
    catalogs_of,
    check_first_catalog,
    read_rows,
    relation_rows,
    relations_of,
)
from cdc_replay.changelog.orphans import folders_without_log, remove_folders, remove_orphans
from cdc_replay.changelog.prepared_transactions import PreparedTransactions
from cdc_replay.changelog.prune import commit_times, prunable, prune, start_application
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
)
from cdc_replay.changelog.row_groups import regrouped
from cdc_replay.changelog.segment import (
    LOG_SCHEMA,
    RESTORE,
    RowGroup,
    Segment,
    SegmentWriter,
    plan_row_groups,
    read_row_group,
)
from cdc_replay.changelog.storage import (
    Location,
    check_put_if_absent,
    close_to_others,
    storage_read_errors,
    storage_write_errors,
)
from cdc_replay.errors import ChangeLogConflict, ChangeLogDamaged, ChangeLogMissing, ChangeLogPruned
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.model.relation import Relation

if TYPE_CHECKING:
    import pyarrow as pa


class ChangeLog:
    """A change log as of when it was opened; see the module for the life of a pull."""

    def __init__(self, location: Location, changes: DurableTable, header: LogHeader) -> None:
        self._location = location
        self._changes = changes
        self.header = header
        self.prepared = PreparedTransactions(location / "prepared")

    @classmethod
    def create(cls, uri: str, header: LogHeader) -> Self:
        """Create an empty log that ends at `header.start_lsn`.

        Raises:
            ChangeLogConflict: if there is a log already, or what is left of one.
            ChangeLogNotWritable: if it cannot be written; the same call goes on with what is there.
        """
        location = Location.of(uri)
        if cls.exists(uri):
            raise ChangeLogConflict(
                f'there is a change log at "{uri}" already',
                hint="Choose another `change_log` in the configuration, or remove that one first.",
            )
        if left := folders_without_log(location):
            raise ChangeLogConflict(
                f'parts of a change log that was removed are at "{uri}"',
                detail=f"There is {', '.join(left)}, without changes.",
                hint="Move them away, or choose another `change_log` in the configuration.",
            )
        # The side tables first: with the table of changes there, the log exists and is complete. Side tables
        # of a creation that died in between are empty, so they are as good as new ones.
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
            close_to_others(location)
        return cls(location, changes, header)

    @classmethod
    def exists(cls, uri: str) -> bool:
        """There is a log at `uri`, perhaps a damaged one.

        Raises:
            ChangeLogUnavailable: if that cannot be found out.
        """
        with storage_read_errors(uri):
            return DurableTable.exists(Location.of(uri) / "changes")

    @classmethod
    def open(cls, uri: str) -> Self:
        """The log as it is now.

        Raises:
            ChangeLogMissing: if there is none.
            ChangeLogDamaged: if it cannot be read, or has another format.
            ChangeLogUnavailable: if the folder or the store does not let itself be read.
        """
        if not cls.exists(uri):
            raise ChangeLogMissing(
                f'there is no change log at "{uri}"',
                hint="Run `cdc-replay setup` for the publisher, or correct its `change_log` setting.",
            )
        location = Location.of(uri)
        with storage_read_errors(uri):
            close_to_others(location)
        changes = DurableTable.open(location / "changes")
        header = LogHeader.of_configuration(uri, changes.configuration)
        for application in (header.slot, start_application(header.slot)):
            # Now, for as long as this object is read: the commits that say it may be deleted meanwhile.
            changes.position(application)
        return cls(location, changes, header)

    @classmethod
    def remove(cls, uri: str) -> bool:
        """Delete the log, or what is left of one, and nothing else in its folder; False if there was nothing.

        Raises:
            ChangeLogNotWritable: if something cannot be deleted; the same call goes on with it.
        """
        with storage_write_errors(uri):
            return remove_folders(Location.of(uri))

    @property
    def uri(self) -> str:
        """Where the log is: an absolute path or a URI."""
        return self._location.uri

    @property
    def end_lsn(self) -> Lsn:
        """Everything that committed at or before this position is in the log."""
        position = self._changes.position(self.header.slot)
        return self.header.start_lsn if position is None else Lsn(position)

    @property
    def start_lsn(self) -> Lsn:
        """Everything that committed after this position, up to the end, is in the log."""
        position = self._changes.position(start_application(self.header.slot))
        return self.header.start_lsn if position is None else Lsn(position)

    def check_holds(self, window: Window) -> None:
        """Check that nothing of `window` has been pruned.

        Raises:
            ChangeLogPruned: if it reaches below the log's start.
        """
        if self.header.start_lsn < self.start_lsn and window.after < self.start_lsn:
            raise ChangeLogPruned(
                f'change log "{self.uri}" does not hold what came after {window.after} any more',
                detail=f"It has been pruned: it starts at {self.start_lsn} now.",
                hint="Run `cdc-replay snapshot` for the subscription: it copies the tables that need it.",
            )

    def write(self, batches: Iterable[pa.RecordBatch]) -> tuple[Segment, ...]:
        """Write messages of `LOG_SCHEMA`, in order, to a durable file that nothing names yet.

        Small batches are joined, so that a row group has up to `row_groups.ROW_GROUP_ROWS` rows or
        `ROW_GROUP_BYTES` bytes. Returns nothing if there was no message: then there is no file.

        Raises:
            ChangeLogNotWritable: if the file cannot be written; nothing of it stays.
        """
        name = f"{self.end_lsn.file_name}-{uuid.uuid4().hex}.parquet"
        with storage_write_errors(self.uri), SegmentWriter(self._location / "changes", name) as writer:
            for batch in regrouped(batches):
                writer.write(batch)
        return () if writer.segment is None else (writer.segment,)

    def read(self, segments: Sequence[Segment]) -> Iterator[pa.RecordBatch]:
        """The messages of written segments, in order; nothing need name them yet.

        Raises:
            ChangeLogDamaged: if one cannot be read.
        """
        for segment in segments:
            for group in self._row_groups(segment, Window(ZERO, Lsn(segment.max_commit_lsn))):
                yield read_row_group(group)

    def discard(self, segments: Sequence[Segment]) -> None:
        """Delete written segments that no commit is to name.

        Raises:
            ChangeLogNotWritable: if one cannot be deleted.
        """
        with storage_write_errors(self.uri):
            for segment in segments:
                file = self._location / "changes" / segment.name
                file.filesystem.delete_file(file.path)

    def prepared_roots(self, publication: str) -> PreparedTransactions:
        """Where the TRUNCATEs of prepared transactions wait that only this root publication shows (R2.14)."""
        return PreparedTransactions(self._location / "prepared_roots" / publication)

    def commit(self, segments: Sequence[Segment], end_lsn: Lsn) -> None:
        """Make written segments visible and move the end of the log, atomically and durably.

        Raises:
            ChangeLogConflict: if another writer has committed since this object saw the log.
            ChangeLogNotWritable: if the commit cannot be written.
        """
        with storage_write_errors(self.uri):
            self._changes.commit(segments, AppTransaction(self.header.slot, end_lsn.value))

    def record(self, header: LogHeader) -> None:
        """Record, durably, of whom what comes next is, who has all that the log holds.

        Another timeline of the server, or another name of its database.

        Raises:
            ChangeLogConflict: if another writer has committed since this object saw the log.
            ChangeLogNotWritable: if the commit cannot be written.
        """
        with storage_write_errors(self.uri):
            self._changes.configure(header.to_configuration())
        self.header = header

    def add_relations(self, relations: Mapping[int, Relation]) -> None:
        """Add the shapes, by version, that the log does not know yet."""
        if not relations:
            return
        table = self._relations()
        known = relations_of(read_rows(table, RELATION_SCHEMA))
        new = [relation for version, relation in relations.items() if version not in known]
        with storage_write_errors(self.uri):
            append_rows(table, RELATION_SCHEMA, relation_rows(new))

    def add_catalogs(self, versions: Sequence[CatalogRow]) -> None:
        """Add catalogs; for an owner and a `from_lsn` that have one, the one that was read later counts."""
        if not versions:
            return
        table = self._catalogs()
        with storage_write_errors(self.uri):
            append_rows(table, CATALOG_SCHEMA, catalog_rows(versions))

    def drop_uncommitted_catalogs(self) -> tuple[CatalogRow, ...]:
        """Remove what a pull has left that died before its commit; returns all that stays, in order.

        It would be written again, unless the server has become another one meanwhile that never had it.

        Raises:
            ChangeLogDamaged: if they cannot be read, or there are changes and no catalogs.
            ChangeLogConflict: if another process does the same.
        """
        versions = self.catalogs()
        known = tuple(each for each in versions if each.known_from <= self.end_lsn)
        if not known and self._changes.segments():
            # The catalog of now would be taken for that of all changes which are there.
            check_first_catalog(self.uri, None, self.header.start_lsn)
        if len(known) < len(versions):
            with storage_write_errors(self.uri):
                replace_catalogs(self._catalogs(), known)
        return known

    def relations(self) -> Mapping[int, Relation]:
        """All shapes by version; looking up another one raises ChangeLogDamaged.

        Raises:
            ChangeLogDamaged: if they cannot be read.
        """
        return KnownRelations(self.uri, relations_of(read_rows(self._relations(), RELATION_SCHEMA)))

    def catalogs(self) -> tuple[CatalogRow, ...]:
        """The publisher's catalogs in the order in which they came into force for all transactions.

        Raises:
            ChangeLogDamaged: if they cannot be read.
        """
        return catalogs_of(read_rows(self._catalogs(), CATALOG_SCHEMA))

    def segments(self, window: Window) -> tuple[RowGroup, ...]:
        """The parts of the log that hold the transactions of `window`, in order.

        The first and the last may hold others too.

        Raises:
            ChangeLogPruned: if the log does not reach back to the window's start any more.
            ChangeLogDamaged: if a segment is missing, truncated or has no readable footer.
        """
        self.check_holds(window)
        return tuple(
            group for segment in self._changes.segments(window) for group in self._row_groups(segment, window)
        )

    def split_lsn(self, window: Window, rows: int) -> Lsn:
        """Where to cut `window` first so that no part has many more than `rows` messages; else its end.

        Windows that begin at different places have their cuts at the same ones. A segment is never cut.
        """
        inside = (end for end in self._changes.split_points(rows) if end > window.after.value)
        return min(window.upto, Lsn(next(inside, window.upto.value)))

    def commits(self, window: Window) -> Iterator[CommittedTransaction]:
        """The transactions of `window` in commit order; a message outside of any is none (R9.13).

        Raises:
            ChangeLogDamaged: as for `segments`.
        """
        return logged_commits(self.segments(window), window)

    def first_commit(self, window: Window) -> CommittedTransaction | None:
        """The first transaction of `window`; reads no further than to it.

        Raises:
            ChangeLogPruned, ChangeLogDamaged: as for `segments`.
        """
        self.check_holds(window)
        segments = self._changes.segments(window)
        groups = (group for segment in segments for group in self._row_groups(segment, window))
        return next(logged_commits(groups, window), None)

    def relation_versions(self, window: Window) -> frozenset[int]:
        """The relation versions of the row changes of `window`; reads a small column.

        Raises:
            ChangeLogDamaged: as for `segments`.
        """
        return relation_versions(self.segments(window), window)

    def definitions_in(self, window: Window, catalogs: Sequence[tuple[int, int]]) -> LoggedDefinitions:
        """Which relation versions the changes of `window` have under which catalog versions (R9.10).

        `catalogs` are (owner, from LSN) of the versions, as for `arrow.version_index`. Reads small
        columns, and the messages of TRUNCATEs.

        Raises:
            ChangeLogDamaged: as for `segments`, or if the log lacks its first catalog.
        """
        groups = self.segments(window)
        if groups:
            first = Lsn(catalogs[0][1]) if catalogs else None
            check_first_catalog(self.uri, first, self.header.start_lsn)
        return logged_definitions(groups, window, CatalogVersions.from_positions(catalogs))

    def summary(self, window: Window) -> LogSummary:
        """Counts of the messages and transactions in `window`; reads small columns only.

        Raises:
            ChangeLogDamaged: as for `segments`.
        """
        return log_summary(self.segments(window), window)

    def logical_messages(self, window: Window, prefix: str) -> Iterator[LoggedMessage]:
        """The transactional logical messages of `window` with this prefix, in order.

        Raises:
            ChangeLogDamaged: as for `segments`.
        """
        return logged_messages(self.segments(window), window, prefix)

    def last_lsn_without(self, window: Window, versions: Set[int]) -> Lsn:
        """Up to where `window` can be applied without a change of these relation versions.

        Raises:
            ChangeLogDamaged: as for `segments`.
        """
        return last_lsn_without(self.segments(window), window, versions)

    def end_before(self, window: Window, sent: SentChanges, catalogs: CatalogVersions) -> Lsn:
        """Up to where `window` can be applied without one of these changes.

        Raises:
            ChangeLogDamaged: as for `segments`.
        """
        return end_before(self.segments(window), window, sent, catalogs)

    def prunable(self, upto: Lsn, *, committed_by: int | None = None) -> tuple[Segment, ...]:
        """The first segments of the log, as long as they lie wholly at or before `upto`.

        With `committed_by` (microseconds since 1970 UTC) also only while all was committed by then.

        Raises:
            ChangeLogDamaged: if a segment has to be read for that, and cannot be.
        """
        return prunable(self._changes, upto, committed_by)

    def commit_times(self, segments: Sequence[Segment]) -> tuple[int, int] | None:
        """When the first and the last transaction of these segments were committed, in microseconds.

        Raises:
            ChangeLogDamaged: if a segment has to be read for that, and cannot be.
        """
        return commit_times(self._changes, segments)

    def prune(self, segments: Sequence[Segment], *, keep_files: bool = False) -> int:
        """Take segments that `prunable` gave out of the log, and move its start behind them, durably.

        Returns how many files were deleted; with `keep_files` they stay until `delete_removed`.

        Raises:
            ChangeLogConflict: if another process prunes or compacts the log.
            ChangeLogNotWritable: if the commit cannot be written, or a file cannot be deleted.
        """
        if not segments:
            return 0
        with storage_write_errors(self.uri):
            return prune(self._changes, self.header.slot, segments, keep_files=keep_files)

    def compact(self, limits: CompactionLimits = DEFAULT_LIMITS) -> Compacted:
        """Merge small neighbouring segments where there are enough of them; rows and end stay as they are.

        The side tables are merged likewise. Files that earlier runs have replaced are deleted once no reader
        can still use them.

        Raises:
            ChangeLogDamaged: if a segment cannot be read; all of them stay in the log.
            ChangeLogConflict: if another process prunes or compacts the log.
            ChangeLogNotWritable: if a file cannot be written.
        """
        start = AppTransaction(start_application(self.header.slot), self.start_lsn.value)
        with storage_write_errors(self.uri):
            done = compact(self._changes, start, limits)
            done += compact_relations(self._relations()) + compact_catalogs(self._catalogs())
            if done.removed:
                self.delete_removed()
        return done

    def delete_removed(self, *, older_than_hours: int = KEEP_HOURS) -> int:
        """Delete the files that left the log longer ago than that; returns how many there were.

        Raises:
            ChangeLogNotWritable: if one cannot be deleted.
        """
        with storage_write_errors(self.uri):
            tables = (self._changes, self._relations(), self._catalogs())
            return sum(delete_removed(table, older_than_hours=older_than_hours) for table in tables)

    def remove_orphans(self) -> int:
        """Delete the files that captures and compactions have left that died; returns how many there were.

        Only for the writer that holds the slot, before it writes: see `remains`.

        Raises:
            ChangeLogNotWritable: if one cannot be deleted.
        """
        with storage_write_errors(self.uri):
            return remove_orphans(self._location, self._changes, self.end_lsn)

    def _relations(self) -> DurableTable:
        return DurableTable.open(self._location / "relations")

    def _catalogs(self) -> DurableTable:
        return DurableTable.open(self._location / "catalogs")

    def _row_groups(self, segment: Segment, window: Window) -> tuple[RowGroup, ...]:
        file = self._location / "changes" / segment.name
        size = file.filesystem.get_file_info(file.path).size
        if size != segment.size_bytes:
            # Perhaps the log was pruned since this object saw it; then that is what has to be said.
            ChangeLog.open(self.uri).check_holds(window)
            raise ChangeLogDamaged(
                f'segment "{file.uri}" of the change log is damaged or missing',
                detail=f"It has {size or 0} bytes; {segment.size_bytes} were committed.",
                hint=RESTORE,
            )
        return plan_row_groups(file, window)
