"""Checkpoints: the state of a table in one file, so that readers need not replay all of its commits.

Readers find the newest by `_last_checkpoint`, or by listing the folder. So a checkpoint must be whole as soon
as its name exists, and a commit may be deleted only once the checkpoint that replaces it is durable. The
library does not flush checkpoints. On a local folder it therefore writes to a scratch folder, from which they
are copied durably; in an object store, where writes are atomic, it writes them in place.

| power is lost after                | a reader starts from                                         |
|------------------------------------|--------------------------------------------------------------|
| the checkpoint is durable          | the previous one, or this one if it lists the folder         |
| `_last_checkpoint` is durable      | this one                                                     |
| old commits and checkpoints go     | this one; reappearing files are older, so they are ignored   |
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Final

from deltalake import DeltaTable

from cdc_replay.changelog.delta.commits import INVALID_JSON, LogFolder
from cdc_replay.changelog.storage import Location, delete_files, replace, sync_folder

CHECKPOINT_EVERY: Final = 20
"""How many commits a reader replays at most, unless a checkpoint could not be written.

To open a log takes 0.3 ms per commit to replay, and a window opens it several times.
"""

KEPT_COMMITS: Final = 1_000
"""How many commit files are kept at least: a reader may have started from an older checkpoint."""

LAST_CHECKPOINT: Final = "_last_checkpoint"


def last_checkpoint(folder: Location) -> int:
    """The version of the newest checkpoint to which a `_delta_log` points; 0 if there is none."""
    try:
        return int(json.loads((folder / LAST_CHECKPOINT).read())["version"])
    except (FileNotFoundError, KeyError, TypeError, *INVALID_JSON):
        return 0


def write_checkpoint(location: Location, table: DeltaTable) -> int:
    """Write a checkpoint of the table's version, durably, and delete much older commits.

    Returns the version.

    Raises:
        OSError, DeltaError: if that fails; the table is unchanged.
    """
    version = int(table.version())
    folder = LogFolder.read(location)
    if location.is_local:
        _write_in_order(folder, version)
    else:
        table.create_checkpoint()
    _delete_old(folder, version)
    return version


def _write_in_order(folder: LogFolder, version: int) -> None:
    base = max((checkpoint for checkpoint in folder.checkpoints if checkpoint <= version), default=-1)
    sources = [folder.commit_file(commit) for commit in range(base + 1, version + 1)]
    if base >= 0:
        sources.append(folder.location / _checkpoint_name(base))
    with tempfile.TemporaryDirectory(prefix="cdc_replay_checkpoint_") as scratch:
        copies = Path(scratch, folder.location.name)
        copies.mkdir()
        for source in sources:
            (copies / source.name).write_bytes(source.read())
        DeltaTable(scratch).create_checkpoint()
        # The checkpoint first, then the pointer to it.
        for name in (_checkpoint_name(version), LAST_CHECKPOINT):
            replace(folder.location / name, (copies / name).read_bytes())


def _delete_old(folder: LogFolder, version: int) -> None:
    limit = version - KEPT_COMMITS
    base = max((checkpoint for checkpoint in folder.checkpoints if checkpoint <= limit), default=0)
    old_commits = [folder.commit_file(commit).name for commit in folder.commits if commit < base]
    old_checkpoints = [_checkpoint_name(checkpoint) for checkpoint in folder.checkpoints if checkpoint < base]
    if delete_files(folder.location, [*old_commits, *old_checkpoints]):
        sync_folder(folder.location)


def _checkpoint_name(version: int) -> str:
    return f"{version:020}.checkpoint.parquet"
