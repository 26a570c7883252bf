"""One Delta table of the change log, whose commits are durable when they return.

A commit is one JSON file in `_delta_log` whose name is the next version number. It is created only if no
such file exists, so of two writers one is refused. The writer library flushes nothing on a local folder (it
renames and links), so the commit file and its folder are flushed here. The order is what makes a crash
harmless:

| durable       | a process that dies now leaves                                                |
|---------------|-------------------------------------------------------------------------------|
| nothing       | perhaps a part of a data file that no commit names                            |
| the data file | a data file that no commit names: readers never see it, the pull is done again|
| the commit    | the new state; the slot is still behind it, which is harmless (R1.30)         |
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from cdc_replay.changelog.segment import RESTORE, Segment
from cdc_replay.changelog.storage import Location, make_folder, sync_file, sync_folder
from cdc_replay.errors import ChangeLogConflict, ChangeLogDamaged, ChangeLogMissing

_LOG_FOLDER: Final = "_delta_log"


@dataclass(frozen=True, slots=True)
class Position:
    """The application transaction of a commit: who moved the table, and to which position."""

    application: str
    value: int


class DurableTable:
    """A Delta table as of the version that was opened, or that this object last committed."""

    def __init__(self, location: Location, table: DeltaTable) -> None:
        self.location = location
        self._table = table

    @classmethod
    def create(
        cls,
        location: Location,
        schema: pa.Schema,
        *,
        configuration: Mapping[str, str] | None = None,
        position: Position | None = None,
    ) -> Self:
        """Create an empty table.

        Raises:
            ChangeLogConflict: if there is one.
        """
        make_folder(location)
        try:
            table = DeltaTable.create(
                location.uri,
                schema=Schema.from_arrow(schema),
                mode="error",
                configuration=dict(configuration or {}),
                commit_properties=_properties(position),
                raise_if_key_not_exists=False,
            )
        except DeltaError as error:
            raise ChangeLogConflict(
                f'change log table "{location.uri}" cannot be created', detail=str(error)
            ) from error
        created = cls(location, table)
        created._make_durable()
        sync_folder(location)
        return created

    @classmethod
    def open(cls, location: Location) -> Self:
        """The table as it is now.

        Raises:
            ChangeLogMissing: if there is none.
            ChangeLogDamaged: if its commits cannot be read.
        """
        try:
            return cls(location, DeltaTable(location.uri))
        except TableNotFoundError as error:
            raise ChangeLogMissing(
                f'there is no change log table at "{location.uri}"',
                hint="Run `cdc-replay setup` for the publisher, or correct its `change_log` setting.",
            ) from error
        except DeltaError as error:
            raise ChangeLogDamaged(
                f'change log table "{location.uri}" cannot be read',
                detail=str(error).partition("\n")[0],
                hint=RESTORE,
            ) from error

    @property
    def version(self) -> int:
        """The number of commits so far, less one."""
        return int(self._table.version())

    @property
    def configuration(self) -> Mapping[str, str]:
        """What `create` was given."""
        return dict(self._table.metadata().configuration)

    def position(self, application: str) -> int | None:
        """The value of the application's last position, None if it has none."""
        value = self._table.transaction_version(application)
        return None if value is None else int(value)

    def segments(self) -> tuple[Segment, ...]:
        """The data files by commit LSN; a file without statistics has 0 there."""
        actions = pa.table(self._table.get_add_actions(flatten=True))
        found = (
            Segment(
                row["path"],
                row["size_bytes"],
                row["num_records"] or 0,
                row.get("min.commit_lsn") or 0,
                row.get("max.commit_lsn") or 0,
            )
            for row in actions.to_pylist()
        )
        return tuple(sorted(found, key=lambda segment: (segment.min_commit_lsn, segment.name)))

    def commit(self, segments: Sequence[Segment], position: Position | None = None) -> None:
        """Make durable files, perhaps none, part of the table, together with the new position.

        Raises:
            ChangeLogConflict: if another writer has committed since this object saw the table.
        """
        try:
            self._table.create_write_transaction(
                [_add_action(segment) for segment in segments],
                mode="append",
                schema=self._table.schema(),
                commit_properties=_properties(position),
            )
        except CommitFailedError as error:
            raise ChangeLogConflict(
                f'change log table "{self.location.uri}" has another writer',
                detail=str(error),
                hint="Let the other capture of this publisher end, then run the command again.",
            ) from error
        self._table.update_incremental()
        self._make_durable()

    def _make_durable(self) -> None:
        log = self.location / _LOG_FOLDER
        sync_file(log / f"{self.version:020}.json")
        sync_folder(log)


def _properties(position: Position | None) -> CommitProperties | None:
    if position is None:
        return None
    return CommitProperties(app_transactions=[Transaction(position.application, position.value)])


def _add_action(segment: Segment) -> AddAction:
    statistics: dict[str, object] = {"numRecords": segment.rows}
    if segment.max_commit_lsn:
        statistics["minValues"] = {"commit_lsn": segment.min_commit_lsn}
        statistics["maxValues"] = {"commit_lsn": segment.max_commit_lsn}
        statistics["nullCount"] = {"commit_lsn": 0}
    modified = time.time_ns() // 1_000_000
    return AddAction(segment.name, segment.size_bytes, {}, modified, True, json.dumps(statistics))
