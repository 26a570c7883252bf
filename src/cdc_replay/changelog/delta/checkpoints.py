"""Checkpoints: the state of a table in one file, so that a reader need not go through all of its commits.

Readers find the newest by `_last_checkpoint`, or by listing the folder. So a checkpoint must be whole as soon
as its name is there; and a commit may only go when the checkpoint that stands for it will stay. The library
writes checkpoints without flushing them. On a local folder it therefore does so in a scratch folder, and what
it wrote is put into place from here; in an object store, where a file is whole or not there, it writes them
in place.

| power is lost after                | a reader starts from                                         |
|------------------------------------|--------------------------------------------------------------|
| the checkpoint is durable          | the one before, or this one if it lists the folder           |
| `_last_checkpoint` is durable      | this one                                                     |
| old commits and checkpoints go     | this one; those that come back are older, so nobody cares    |
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Final

from deltalake import DeltaTable

from cdc_replay.changelog.delta.commits import LogFolder
from cdc_replay.changelog.storage import Location, delete_files, replace, sync_folder

logger = logging.getLogger(__name__)

CHECKPOINT_EVERY: Final = 100
"""How many commits a reader goes through at most, unless a checkpoint could not be written."""

KEPT_COMMITS: Final = 1_000
"""So many commits stay at least as files of their own: a reader may have started from an older checkpoint."""

LAST_CHECKPOINT: Final = "_last_checkpoint"


def last_checkpoint(folder: Location) -> int:
    """The version that a `_delta_log` points to as its newest checkpoint; 0 if it points to none."""
    try:
        return int(json.loads((folder / LAST_CHECKPOINT).read())["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def write_checkpoint(location: Location, table: DeltaTable) -> int:
    """Make a checkpoint of the table's version, durably, and delete the commits that are long behind it.

    Returns the version.

    Raises:
        OSError, DeltaError: if that fails; the table is as good as before.
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
    base = max((one for one in folder.checkpoints if one <= version), default=-1)
    sources = [folder.commit_file(one) for one in range(base + 1, version + 1)]
    if base >= 0:
        sources.append(folder.location / _checkpoint_name(base))
    with tempfile.TemporaryDirectory(prefix="cdc_replay_checkpoint_") as scratch:
        copies = Path(scratch, folder.location.name)
        copies.mkdir()
        for source in sources:
            (copies / source.name).write_bytes(source.read())
        DeltaTable(scratch).create_checkpoint()
        # The pointer after what it points to.
        for name in (_checkpoint_name(version), LAST_CHECKPOINT):
            replace(folder.location / name, (copies / name).read_bytes())


def _delete_old(folder: LogFolder, version: int) -> None:
    base = max((one for one in folder.checkpoints if one <= version - KEPT_COMMITS), default=0)
    old_commits = [folder.commit_file(one).name for one in folder.commits if one < base]
    old_checkpoints = [_checkpoint_name(one) for one in folder.checkpoints if one < base]
    if delete_files(folder.location, [*old_commits, *old_checkpoints]):
        sync_folder(folder.location)


def _checkpoint_name(version: int) -> str:
    return f"{version:020}.checkpoint.parquet"
