"""The commits of a Delta table as text, which `table` writes and `commits` reads.

A commit is one JSON object per line, as in the Delta protocol: `commitInfo`, then the actions `protocol` and
`metaData` (creation, properties), `txn` (positions), `remove` and `add` (files). The tables need only reader
version 1 and writer version 2: no features, no partitions, no deletion vectors.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from cdc_replay.changelog.delta.commits import Commit, with_seal
from cdc_replay.changelog.segment import Segment

Action: TypeAlias = Mapping[str, Mapping[str, Any]]

CREATION: Final = "CREATE TABLE"
"""The operation of a table's first commit."""

_PROTOCOL: Final = {"minReaderVersion": 1, "minWriterVersion": 2}


@dataclass(frozen=True, slots=True)
class AppTransaction:
    """The application transaction of a commit (Delta's `txn`): an application and its new position."""

    application: str
    value: int


@dataclass(frozen=True, slots=True)
class TableProperties:
    """A table's metadata; `schema` is Delta's JSON, `created_time` is milliseconds since 1970."""

    id: str
    schema: str
    created_time: int
    configuration: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeltaCommit:
    """A commit to write; `operation` is its name in the table's history.

    Without `is_data_change` the commit does not change the table's rows.
    """

    operation: str
    added: tuple[Segment, ...] = ()
    removed: tuple[Segment, ...] = ()
    position: AppTransaction | None = None
    properties: TableProperties | None = None
    is_data_change: bool = True

    @property
    def removed_names(self) -> tuple[str, ...]:
        """The names of the files that it removes from the table."""
        return tuple(segment.name for segment in self.removed)

    @property
    def positions(self) -> Mapping[str, int]:
        """Its positions by application."""
        return {} if self.position is None else {self.position.application: self.position.value}

    def clashes_with(self, other: Commit) -> str | None:
        """What both commits change; None if this one is still valid after `other`."""
        if moved := self.positions.keys() & other.positions.keys():
            return f"the position of {', '.join(sorted(moved))}"
        if both_removed := set(self.removed_names) & set(other.removed):
            return f"the files {', '.join(sorted(both_removed))}"
        if self.properties is not None and other.configuration:
            return "the properties"
        return None

    def to_json(self) -> bytes:
        """The content of its file, which is unique."""
        lines = (json.dumps(action, separators=(",", ":")) for action in self._actions())
        return with_seal("\n".join(lines).encode())

    def _actions(self) -> Iterator[Action]:
        now = time.time_ns() // 1_000_000
        yield {"commitInfo": self._info(now)}
        if self.operation == CREATION:
            yield {"protocol": _PROTOCOL}
        if self.properties is not None:
            yield {"metaData": _metadata(self.properties)}
        for application, value in self.positions.items():
            yield {"txn": {"appId": application, "version": value, "lastUpdated": now}}
        for segment in self.removed:
            yield {"remove": _removal(segment, now, is_data_change=self.is_data_change)}
        for segment in self.added:
            yield {"add": _addition(segment, now, is_data_change=self.is_data_change)}

    def _info(self, now: int) -> Mapping[str, Any]:
        return {
            "timestamp": now,
            "operation": self.operation,
            "operationParameters": {},
            "engineInfo": "cdc-replay",
            "txnId": str(uuid.uuid4()),
        }


def _metadata(properties: TableProperties) -> Mapping[str, Any]:
    return {
        "id": properties.id,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": properties.schema,
        "partitionColumns": [],
        "createdTime": properties.created_time,
        "configuration": dict(properties.configuration),
    }


def _removal(segment: Segment, now: int, *, is_data_change: bool) -> Mapping[str, Any]:
    return {
        "path": segment.name,
        "deletionTimestamp": now,
        "dataChange": is_data_change,
        "extendedFileMetadata": True,
        "partitionValues": {},
        "size": segment.size_bytes,
    }


def _addition(segment: Segment, now: int, *, is_data_change: bool) -> Mapping[str, Any]:
    statistics: dict[str, object] = {"numRecords": segment.rows}
    if segment.max_commit_lsn:
        statistics["minValues"] = {"commit_lsn": segment.min_commit_lsn}
        statistics["maxValues"] = {"commit_lsn": segment.max_commit_lsn}
        statistics["nullCount"] = {"commit_lsn": 0}
    return {
        "path": segment.name,
        "partitionValues": {},
        "size": segment.size_bytes,
        "modificationTime": now,
        "dataChange": is_data_change,
        "stats": json.dumps(statistics),
    }
