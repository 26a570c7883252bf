"""The commit files of a table's `_delta_log`: their content, and the seal that proves it.

Data files have page checksums. A commit file has none, so each contains a digest of its content; otherwise a
damaged position could make the log look longer or shorter than it is. Other tools and readers ignore it.

    00000000000000000007.json                 one JSON object per line: commitInfo, then the actions
    00000000000000000100.checkpoint.parquet   the state after commit 100, replaces all commits up to it
    _last_checkpoint                          where readers look for the newest checkpoint
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyarrow import fs

from cdc_replay.changelog.segment import RESTORE, Segment
from cdc_replay.changelog.storage import Location, check_file_name, storage_read_errors
from cdc_replay.errors import ChangeLogDamaged

LOG_FOLDER: Final = "_delta_log"
_REQUIRED: Final[Mapping[str, frozenset[str]]] = {
    "add": frozenset({"path", "partitionValues", "size", "modificationTime", "dataChange"}),
    "remove": frozenset({"path", "dataChange"}),
    "txn": frozenset({"appId", "version"}),
    "metaData": frozenset({"id", "format", "schemaString", "partitionColumns", "configuration"}),
    "protocol": frozenset({"minReaderVersion", "minWriterVersion"}),
}
"""The members that a Delta reader requires of an action."""

INVALID_JSON: Final = (ValueError, OverflowError, RecursionError)
"""What Python raises for a text that is no JSON, an integer that is infinite, and too deep a nesting."""

# A member of commitInfo, to which every tool can add its own.
_SEAL_FORM: Final = b',"cdc_replay.seal":"%s"'
_SEAL: Final = re.compile(rb',"cdc_replay\.seal":"([0-9a-f]{64})"')
_COMMIT: Final = re.compile(r"(\d{20})\.json")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\.parquet")


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that was read; `positions` are those of application transactions, by application."""

    version: int
    added: tuple[Segment, ...] = ()
    removed: tuple[str, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)
    configuration: Mapping[str, str] = field(default_factory=dict)
    is_sealed: bool = False


@dataclass(frozen=True, slots=True)
class LogFolder:
    """The versions of a table's commits and checkpoints in `_delta_log`, in order."""

    location: Location
    commits: tuple[int, ...]
    checkpoints: tuple[int, ...]

    @classmethod
    def read(cls, table: Location) -> LogFolder:
        """List the folder."""
        folder = table / LOG_FOLDER
        selector = fs.FileSelector(folder.path, allow_not_found=True)
        names = [info.base_name for info in folder.filesystem.get_file_info(selector)]
        return cls(folder, _versions(_COMMIT, names), _versions(_CHECKPOINT, names))

    def commit_file(self, version: int) -> Location:
        """The file of a commit."""
        return self.location / f"{version:020}.json"


def with_seal(content: bytes) -> bytes:
    """The content of a commit, with its seal in the first line, the commitInfo."""
    info, newline, actions = content.partition(b"\n")
    return info[:-2] + _SEAL_FORM % _digest(content) + info[-2:] + newline + actions


def without_seal(content: bytes) -> tuple[bytes, bytes | None]:
    """The content without its seal, and the seal, if there is one."""
    if (match := _SEAL.search(content)) is None:
        return content, None
    return content[: match.start()] + content[match.end() :], match[1]


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def read_commit(folder: LogFolder, version: int) -> Commit:
    """Read a commit, and compare it with its seal if it has one.

    Raises:
        ChangeLogDamaged: if it is missing, invalid, or does not match its seal.
        ChangeLogUnavailable: if the store does not answer.
    """
    file = folder.commit_file(version)
    try:
        content, seal = without_seal(file.read())
        if seal is None or seal == _digest(content):
            actions = [json.loads(line) for line in content.decode().removesuffix("\n").split("\n")]
            return _commit(version, actions, is_sealed=seal is not None)
    except (OSError, KeyError, TypeError, AttributeError, *INVALID_JSON) as error:
        with storage_read_errors(file.uri):
            # If the store does not answer, the file may be intact.
            file.filesystem.get_file_info(file.path)
        raise ChangeLogDamaged(
            f'commit "{file.uri}" of the change log cannot be read',
            detail=f"{type(error).__name__}: {error}",
            hint=RESTORE,
        ) from error
    raise ChangeLogDamaged(
        f'commit "{file.uri}" of the change log differs from what was written',
        detail="Its content does not match its seal.",
        hint=RESTORE,
    )


def _commit(version: int, actions: Sequence[Mapping[str, Any]], *, is_sealed: bool) -> Commit:
    contents: dict[str, list[Mapping[str, Any]]] = {}
    for action in actions:
        ((kind, content),) = action.items()
        if missing := _REQUIRED.get(kind, frozenset()) - content.keys():
            raise ValueError(f"{kind} without {', '.join(sorted(missing))}")
        contents.setdefault(kind, []).append(content)
    if unknown := contents.keys() - {"commitInfo", "add", "remove", "txn", "metaData", "protocol"}:
        raise ValueError(f"unknown action {', '.join(sorted(unknown))}")
    configuration = contents.get("metaData", [{}])[0].get("configuration", {})
    return Commit(
        version,
        tuple(_segment(content) for content in contents.get("add", ())),
        tuple(check_file_name(content["path"]) for content in contents.get("remove", ())),
        {content["appId"]: int(content["version"]) for content in contents.get("txn", ())},
        {name: str(value) for name, value in configuration.items()},
        is_sealed,
    )


def _segment(added: Mapping[str, Any]) -> Segment:
    statistics = json.loads(added["stats"])
    return Segment(
        check_file_name(added["path"]),
        int(added["size"]),
        int(statistics["numRecords"]),
        int(statistics.get("minValues", {}).get("commit_lsn", 0)),
        int(statistics.get("maxValues", {}).get("commit_lsn", 0)),
    )


def _versions(pattern: re.Pattern[str], names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name))))
