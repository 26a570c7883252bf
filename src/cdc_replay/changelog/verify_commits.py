"""Check that the commits of a table of the change log are complete and consistent with the table.

Commits are read one by one, as files, from the first that exists: none may be missing, and each must match
its seal. The segments that they add and remove must result in what a reader of the table sees, who starts
from a checkpoint. For the table of changes each commit is one of these:

| kind       | application          | its segments                                                           |
|------------|----------------------|------------------------------------------------------------------------|
| creation   | the slot's           | none                                                                   |
| pull       | the slot's           | added ones lie within (end before, end after]                          |
| prune      | the start's          | removed ones lie at or before the new start                            |
| compaction | the start's, as is   | added ones have as many rows as the removed ones, within the same range|
| timeline   | none                 | none                                                                   |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import NativeFile

from cdc_replay.changelog.delta.commits import INVALID_JSON, Commit, LogFolder, read_commit
from cdc_replay.changelog.delta.table import DurableTable, missing_table
from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.prune import start_application
from cdc_replay.changelog.segment import RESTORE, Segment
from cdc_replay.changelog.storage import Location
from cdc_replay.errors import ChangeLogDamaged
from cdc_replay.model.lsn import Lsn

_LAST_CHECKPOINT: Final = "_last_checkpoint"

Check = Callable[["CommitState", Commit], str | None]
"""Returns what is wrong with a commit after that state, or None."""


@dataclass(slots=True)
class CommitState:
    """The table after a commit.

    `positions` are those of the slot and of the log's start; a metadata table has none.
    """

    segments: dict[str, Segment] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    configuration: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_table(cls, table: DurableTable) -> CommitState:
        """The table as a reader sees it."""
        configuration = dict(table.configuration)
        slot = configuration.get("cdc_replay.slot", "")
        positions = {name: table.position(name) for name in (slot, start_application(slot))}
        return cls(
            {segment.name: segment for segment in table.segments()},
            {name: position for name, position in positions.items() if position is not None},
            configuration,
        )

    def apply(self, commit: Commit) -> None:
        """Apply a commit."""
        for name in commit.removed:
            del self.segments[name]
        self.segments.update((segment.name, segment) for segment in commit.added)
        self.configuration.update(commit.configuration)
        slot = self.configuration.get("cdc_replay.slot", "")
        self.positions.update(
            (name, position)
            for name, position in commit.positions.items()
            if name in {slot, start_application(slot)}
        )


def verify_table(location: Location, check: Check | None = None) -> DurableTable:
    """The table as of its last commit, after all commits have been checked.

    Raises:
        ChangeLogMissing: if there is no table.
        ChangeLogDamaged: naming the first commit that is missing or wrong.
    """
    folder = LogFolder.read(location)
    if not folder.commits:
        raise missing_table(location)
    try:
        state = _apply_commits(location, folder, check)
    except ChangeLogDamaged:
        if LogFolder.read(location).commits[:1] > folder.commits[:1]:
            # Since the folder was listed, a checkpoint has replaced the first commits.
            return verify_table(location, check)
        raise
    # Last: errors of the reader's library do not name the damaged file.
    table = DurableTable.open(location, version=folder.commits[-1])
    _check_same(folder, state, CommitState.from_table(table))
    return table


def _apply_commits(location: Location, folder: LogFolder, check: Check | None) -> CommitState:
    """Apply all commits, starting from a checkpoint if the first ones do not exist any more."""
    _check_unbroken(folder)
    _check_checkpoint(folder)
    base = _base(folder)
    state = CommitState()
    if base is not None:
        state = CommitState.from_table(DurableTable.open(location, version=base))
    is_sealed = False
    for version in folder.commits:
        commit = read_commit(folder, version)
        if is_sealed and not commit.is_sealed:
            raise _fault(folder, version, "It has no seal, although earlier commits have one.")
        is_sealed = commit.is_sealed
        if base is None or version > base:
            _check_applicable(folder, state, commit)
            if check is not None and (problem := check(state, commit)):
                raise _fault(folder, version, problem)
            state.apply(commit)
    return state


def check_changes(state: CommitState, commit: Commit) -> str | None:
    """Check a commit of the table of changes; see the module.

    Raises:
        ChangeLogDamaged: if the table's properties are not those of a change log.
    """
    header = LogHeader.from_configuration("changes", {**state.configuration, **commit.configuration})
    slot, start = header.slot, start_application(header.slot)
    removed = [state.segments[name] for name in commit.removed]
    if slot in commit.positions:
        return _check_pull(state.positions.get(slot), commit.positions[slot], commit.added, removed)
    if start in commit.positions:
        before = state.positions.get(start, header.start_lsn.value)
        return _check_maintenance(before, commit.positions[start], commit.added, removed)
    if commit.added or commit.removed:
        return "It changes the segments without a position of the log's end or start."
    return None


def _check_pull(
    before: int | None, end: int, added: Sequence[Segment], removed: Sequence[Segment]
) -> str | None:
    if removed:
        return f"It moves the end of the log and removes segments: {_names(removed)}."
    if before is None:
        return f"It creates the log with segments: {_names(added)}." if added else None
    if end < before:
        return f"It moves the end of the log back, from {Lsn(before)} to {Lsn(end)}."
    outside = [
        segment for segment in added if segment.min_commit_lsn <= before or segment.max_commit_lsn > end
    ]
    if outside:
        return f"It adds ({Lsn(before)}, {Lsn(end)}]; outside of that range is {_ranges(outside)}."
    return None


def _check_maintenance(
    before: int, start: int, added: Sequence[Segment], removed: Sequence[Segment]
) -> str | None:
    if start < before:
        return f"It moves the start of the log back, from {Lsn(before)} to {Lsn(start)}."
    if not added:
        lost = [segment for segment in removed if segment.max_commit_lsn > start]
        return f"It prunes up to {Lsn(start)}, but removes {_ranges(lost)}." if lost else None
    old, new = _extent(removed), _extent(added)
    if old != new:
        return f"It replaces {old[0]} messages in {old[1]} to {old[2]} by {new[0]} in {new[1]} to {new[2]}."
    return None


def _extent(segments: Sequence[Segment]) -> tuple[int, Lsn, Lsn]:
    """Number of messages, first and last commit LSN."""
    return (
        sum(segment.rows for segment in segments),
        Lsn(min((segment.min_commit_lsn for segment in segments), default=0)),
        Lsn(max((segment.max_commit_lsn for segment in segments), default=0)),
    )


def _check_unbroken(folder: LogFolder) -> None:
    first, last = folder.commits[0], folder.commits[-1]
    missing = sorted(set(range(first, last + 1)) - set(folder.commits))
    # Commits before a checkpoint may have been deleted, the oldest first.
    if first > 0 and not any(first - 1 <= version <= last for version in folder.checkpoints):
        missing = [first - 1]
    beyond = [version for version in folder.checkpoints if version > last]
    if missing or beyond:
        raise _fault(folder, (missing or beyond)[0], "It is missing.")


def _base(folder: LogFolder) -> int | None:
    """The version of the checkpoint to start from; None for the first commit."""
    first = folder.commits[0]
    return None if first == 0 else min(version for version in folder.checkpoints if version >= first - 1)


def _check_checkpoint(folder: LogFolder) -> None:
    """Check the newest checkpoint, which readers use, and the file that points to it."""
    if not folder.checkpoints:
        return
    pointer = folder.location / _LAST_CHECKPOINT
    last = folder.location / f"{folder.checkpoints[-1]:020}.checkpoint.parquet"
    readers: tuple[tuple[Location, Callable[[NativeFile], object]], ...] = (
        (pointer, lambda source: folder.checkpoints.index(json.loads(source.read())["version"])),
        (last, lambda source: pq.ParquetFile(source).read(use_threads=False)),
    )
    for file, read in readers:
        try:
            with file.filesystem.open_input_file(file.path) as source:
                read(source)
        except (OSError, KeyError, TypeError, pa.ArrowException, *INVALID_JSON) as error:
            raise ChangeLogDamaged(
                f'checkpoint file "{file.uri}" of the change log cannot be read',
                detail=f"{type(error).__name__}: {error}",
                hint=RESTORE,
            ) from error


def _check_applicable(folder: LogFolder, state: CommitState, commit: Commit) -> None:
    unknown = [name for name in commit.removed if name not in state.segments]
    if unknown:
        raise _fault(folder, commit.version, f"It removes missing segments: {', '.join(unknown)}.")
    duplicates = [segment.name for segment in commit.added if segment.name in state.segments]
    if duplicates:
        raise _fault(folder, commit.version, f"It adds existing segments: {', '.join(duplicates)}.")


def _check_same(folder: LogFolder, expected: CommitState, actual: CommitState) -> None:
    if expected == actual:
        return
    names = {
        name
        for name in expected.segments | actual.segments
        if expected.segments.get(name) != actual.segments.get(name)
    }
    differences = [f"segment {name}" for name in sorted(names)]
    differences += [
        f"position of {name}: {actual.positions.get(name)} instead of {position}"
        for name, position in expected.positions.items()
        if actual.positions.get(name) != position
    ]
    if expected.configuration != actual.configuration:
        differences.append("the table's properties")
    raise ChangeLogDamaged(
        f'a checkpoint of change log table "{folder.location.uri}" does not match its commits',
        detail=f"They differ in {'; '.join(differences)}.",
        hint=RESTORE,
    )


def _names(segments: Iterable[Segment]) -> str:
    return ", ".join(segment.name for segment in segments)


def _ranges(segments: Iterable[Segment]) -> str:
    return ", ".join(
        f"{segment.name} with {Lsn(segment.min_commit_lsn)} to {Lsn(segment.max_commit_lsn)}"
        for segment in segments
    )


def _fault(folder: LogFolder, version: int, problem: str) -> ChangeLogDamaged:
    return ChangeLogDamaged(
        f'commit "{folder.commit_file(version).uri}" of the change log is damaged or missing',
        detail=problem,
        hint=RESTORE,
    )
