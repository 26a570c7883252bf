"""One Delta table of the change log, whose commits are durable when they return.

A commit is one JSON file in `_delta_log` whose name is the next version number. It is written and flushed
under another name, and renamed only if there is no file of that version, so that one of two concurrent
writers fails and readers never see a part of a commit (`storage`). The order makes a crash harmless:

| durable       | a crash or power loss now leaves                                              |
|---------------|-------------------------------------------------------------------------------|
| nothing       | perhaps a part of a data file, under a name that readers ignore               |
| the data file | a data file that no commit names: readers never see it, the pull is repeated  |
| the commit    | the new state; the slot is advanced later, which is harmless (R1.30)          |

A visible commit can still be lost if its writer was killed before it flushed the folder. So the folder is
flushed when the table is opened, and before a commit that builds on another.

If another writer was first, its commits are read. If they do not conflict, the commit is retried as the next
version; see `DeltaCommit.clashes_with`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Self

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError

from cdc_replay.changelog.delta.actions import CREATION, AppTransaction, DeltaCommit, TableProperties
from cdc_replay.changelog.delta.checkpoints import (
    CHECKPOINT_EVERY,
    LAST_CHECKPOINT,
    last_checkpoint,
    write_checkpoint,
)
from cdc_replay.changelog.delta.commits import LOG_FOLDER, LogFolder, read_commit
from cdc_replay.changelog.segment import RESTORE, Segment
from cdc_replay.changelog.storage import (
    Location,
    is_file_name,
    make_folder,
    put_if_absent,
    storage_read_errors,
    sync_folder,
    sync_visible_files,
)
from cdc_replay.errors import CdcReplayError, ChangeLogConflict, ChangeLogDamaged, ChangeLogMissing
from cdc_replay.model.lsn import Window

__all__ = ["DurableTable"]

logger = logging.getLogger(__name__)

KEEP_HOURS: Final = 24
"""How long the file of a removed segment stays: a reader that opened the log before may still need it."""

_PROPERTIES: Final = {"delta.deletedFileRetentionDuration": f"interval {KEEP_HOURS} hours"}
"""How long a table remembers removed files. Every reader loads them, and by default those of a week."""


class DurableTable:
    """A Delta table as of the version that was opened, or that this object last committed."""

    def __init__(self, location: Location, table: DeltaTable) -> None:
        self.location = location
        self._table = table
        self._commits = LogFolder(location / LOG_FOLDER, (), ())
        self._checkpoint: int | None = None
        self._positions: dict[str, int | None] = {}

    @classmethod
    def create(
        cls,
        location: Location,
        schema: pa.Schema,
        *,
        configuration: Mapping[str, str] | None = None,
        position: AppTransaction | None = None,
    ) -> Self:
        """Create an empty table; the remains of an interrupted creation are ignored.

        Raises:
            ChangeLogConflict: if there is one.
        """
        make_folder(location / LOG_FOLDER)
        properties = TableProperties(
            str(uuid.uuid4()),
            Schema.from_arrow(schema).to_json(),
            time.time_ns() // 1_000_000,
            {**_PROPERTIES, **(configuration or {})},
        )
        commit = DeltaCommit(CREATION, position=position, properties=properties)
        folder = LogFolder.read(location)
        exists = bool(folder.commits or folder.checkpoints)
        if exists or not put_if_absent(folder.commit_file(0), commit.to_json()):
            raise ChangeLogConflict(f'change log table "{location.uri}" already exists')
        return cls.open(location)

    @classmethod
    def open(cls, location: Location, *, version: int | None = None) -> Self:
        """The table as it is now, or as of a version.

        Raises:
            ChangeLogMissing: if there is none.
            ChangeLogDamaged: if its commits cannot be read.
            ChangeLogUnavailable: if the folder or the store cannot be read.
        """
        try:
            with storage_read_errors(location.uri):
                table = DeltaTable(location.uri, version=version, storage_options=location.storage_options)
                sync_visible_files(location / LOG_FOLDER)
        except DeltaError as error:
            raise _unreadable(location, error) from error
        return cls(location, table)

    @classmethod
    def exists(cls, location: Location) -> bool:
        """There is a table, perhaps a damaged one."""
        first = LogFolder(location / LOG_FOLDER, (), ()).commit_file(0)
        return first.exists or (location / LOG_FOLDER / LAST_CHECKPOINT).exists

    @property
    def version(self) -> int:
        """The version of the table's last commit."""
        return int(self._table.version())

    @property
    def configuration(self) -> Mapping[str, str]:
        """The table's properties."""
        return dict(self._table.metadata().configuration)

    def position(self, application: str) -> int | None:
        """The application's last position, None if it has none."""
        if application not in self._positions:
            self._positions[application] = self._read_position(application)
        return self._positions[application]

    def segments(self, window: Window | None = None) -> tuple[Segment, ...]:
        """The data files by commit LSN, which is 0 for a file without statistics.

        With `window`, only those that may hold transactions of it.
        """
        segments = self._segments()
        if window is None:
            return tuple(segments)
        after, upto = window.after.value, window.upto.value
        return tuple(
            segment
            for segment in segments
            if segment.max_commit_lsn > after and segment.min_commit_lsn <= upto
        )

    def is_stale(self, segments: Iterable[Segment]) -> bool:
        """Whether some of these files have been removed from the table since this object opened it."""
        present = {segment.name for segment in DurableTable.open(self.location).segments()}
        return not present.issuperset(segment.name for segment in segments)

    def split_points(self, rows: int) -> list[int]:
        """The last commit LSNs of data files, one for every `rows` rows."""
        ends, total = [], 0
        for segment in self._segments():
            before, total = total, total + segment.rows
            if total // rows > before // rows:
                ends.append(segment.max_commit_lsn)
        return ends

    def _segments(self) -> list[Segment]:
        """All data files, by commit LSN."""
        # pyarrow.table, and a comparison with a Python value, would load pandas.
        actions = pa.RecordBatchReader.from_stream(self._table.get_add_actions(flatten=True)).read_all()
        columns = (
            actions["path"].to_pylist(),
            actions["size_bytes"].to_pylist(),
            *(_integers(actions, name) for name in ("num_records", "min.commit_lsn", "max.commit_lsn")),
        )
        segments = list(map(Segment, *columns))
        self._check_names(segment.name for segment in segments)
        return sorted(segments, key=lambda segment: (segment.min_commit_lsn, segment.name))

    def _check_names(self, names: Iterable[str]) -> None:
        """Check that the table names only files of its folder: whoever can write the log may name others."""
        for name in names:
            if not is_file_name(name):
                raise ChangeLogDamaged(
                    f'change log table "{self.location.uri}" names a file outside of its folder',
                    detail=f"It is {name!r}.",
                    hint=RESTORE,
                )

    def commit(self, segments: Sequence[Segment], position: AppTransaction | None = None) -> None:
        """Add durable files, perhaps none, to the table, together with the new position.

        Raises:
            ChangeLogConflict: if another writer has moved that application since the table was opened.
            OSError: if the storage does not answer; there may be a commit then.
        """
        self._transact(DeltaCommit("WRITE", tuple(segments), position=position))

    def replace(self, removed: Sequence[Segment], added: Sequence[Segment], position: AppTransaction) -> None:
        """Replace files of the table by durable ones, perhaps none, in one commit.

        It does not change the table's data for its followers: it and a `commit` never conflict. Two
        replacements under one application do, even at the same position. The removed files stay, for readers
        of earlier versions; see `removed_files`.

        Raises:
            ChangeLogConflict: if such a replacement was committed since this object opened the table.
            OSError: if the storage does not answer; there may be a commit then.
        """
        self._transact(DeltaCommit("OPTIMIZE", tuple(added), tuple(removed), position, is_data_change=False))

    def configure(self, configuration: Mapping[str, str]) -> None:
        """Set properties of the table; others stay.

        Raises:
            ChangeLogConflict: if another writer has set properties since this object opened the table.
            OSError: if the storage does not answer; there may be a commit then.
        """
        metadata = self._table.metadata()
        properties = TableProperties(
            str(metadata.id),
            self._table.schema().to_json(),
            int(metadata.created_time),
            {**self.configuration, **configuration},
        )
        self._transact(DeltaCommit("SET TBLPROPERTIES", properties=properties))

    def forget_old_removed_files(self) -> None:
        """Let checkpoints omit files that were removed more than `KEEP_HOURS` ago; `create` does, too.

        Raises:
            ChangeLogConflict: if another writer has set properties since this object opened the table.
            OSError: if the storage does not answer; there may be a commit then.
        """
        if not _PROPERTIES.items() <= self.configuration.items():
            self.configure(_PROPERTIES)

    def removed_files(self, *, older_than_hours: int) -> tuple[str, ...]:
        """The files that were removed from the table longer ago than that, deleted or not.

        The table remembers them for `KEEP_HOURS`, and longer until its next checkpoint.
        """
        names = self._table.vacuum(
            retention_hours=older_than_hours, dry_run=True, enforce_retention_duration=False
        )
        # What lies in other folders is not the log's.
        return tuple(sorted({name for name in names if is_file_name(name)}))

    def unnamed_files(self) -> tuple[str, ...]:
        """The files in the table's folder that no commit names: being written, or left by a dead writer."""
        with storage_read_errors(self.location.uri):
            files = {name for name in self.location.names() if name.endswith(".parquet")}
        named = {segment.name for segment in self.segments()}
        return tuple(sorted(files - named - set(self.removed_files(older_than_hours=0))))

    def _read_position(self, application: str) -> int | None:
        # The library reads it from the files only now.
        try:
            with storage_read_errors(self.location.uri):
                value = self._table.transaction_version(application)
        except DeltaError as error:
            raise _unreadable(self.location, error) from error
        return None if value is None else int(value)

    def _transact(self, commit: DeltaCommit) -> None:
        self._check_files(commit.added)
        content = commit.to_json()
        version = self.version + 1
        while not self._publish(version, content):
            if (clash := commit.clashes_with(read_commit(self._commits, version))) is not None:
                raise ChangeLogConflict(
                    f'change log table "{self.location.uri}" has another writer',
                    detail=f"Commit {version} has changed {clash} meanwhile.",
                    hint="Wait for the other command for this publisher to end, then run this one again.",
                )
            version += 1
        self._table.update_incremental()
        self._positions.clear()
        self._keep_short()

    def _publish(self, version: int, content: bytes) -> bool:
        # The previous commit must be durable before this one.
        sync_folder(self._commits.location)
        if not self._commits.commit_file(version - 1).exists:
            raise ChangeLogConflict(
                f'change log table "{self.location.uri}" is not the one that was opened',
                detail=f"Its commit {version - 1} does not exist: the log was removed, or recreated.",
            )
        return put_if_absent(self._commits.commit_file(version), content)

    def _check_files(self, added: Sequence[Segment]) -> None:
        paths = [(self.location / segment.name).path for segment in added]
        sizes = [info.size for info in self.location.filesystem.get_file_info(paths)]
        missing = [file.name for file, size in zip(added, sizes, strict=True) if size != file.size_bytes]
        if missing:
            raise ChangeLogConflict(
                f'files of change log table "{self.location.uri}" are missing before their commit',
                detail=f"Missing: {', '.join(missing)}.",
            )

    def _keep_short(self) -> None:
        """Write a checkpoint if one is due; a failure does not affect the commit."""
        if self._checkpoint is None:
            self._checkpoint = last_checkpoint(self._commits.location)
        if self.version - self._checkpoint < CHECKPOINT_EVERY:
            return
        try:
            self._checkpoint = write_checkpoint(self.location, self._table)
        except (OSError, DeltaError) as error:
            logger.warning("cannot write a checkpoint of change log table %s: %s", self.location.uri, error)


def missing_table(location: Location) -> ChangeLogMissing:
    """The error for a table that does not exist."""
    return ChangeLogMissing(
        f'there is no change log table at "{location.uri}"',
        hint="Run `cdc-replay setup` for the publisher, or correct its `change_log` setting.",
    )


def _unreadable(location: Location, error: DeltaError) -> CdcReplayError:
    """The error for a table whose commits cannot be read."""
    if isinstance(error, TableNotFoundError) or not location.exists:
        return missing_table(location)
    return ChangeLogDamaged(
        f'change log table "{location.uri}" cannot be read',
        detail=str(error).partition("\n")[0],
        hint=RESTORE,
    )


def _integers(actions: pa.Table, name: str) -> list[int]:
    """The values of a column, 0 where there is none."""
    if name not in actions.column_names:
        return [0] * actions.num_rows
    return [value or 0 for value in actions[name].to_pylist()]
