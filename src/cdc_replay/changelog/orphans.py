"""What a process leaves behind that dies: told apart from what is in use, and removed.

| left behind                      | by                         | known by                                |
|----------------------------------|----------------------------|-----------------------------------------|
| a data file that no commit names | a pull                     | its name starts with the end of the log |
| the same                         | a compaction, a side table | its age                                 |
| a part of a commit or checkpoint | any writer                 | its name, and its age                   |
| a part of a prepared transaction | a pull                     | its name                                |
| side tables without their log    | a creation, a removal      | the table of changes is missing         |

A pull names its files for the end of the log that it found. Pulls are made by one process at a time, which
holds the slot; so when the next one begins, what has that name and is not in the log is of a pull that died.
A compaction may be running meanwhile. What it writes has an older name, and is left alone for a day; if it
needs longer than that between a file and its commit, it finds the file missing and does not commit.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from typing import Final

from cdc_replay.changelog.delta.commits import LOG_FOLDER
from cdc_replay.changelog.delta.table import DurableTable
from cdc_replay.changelog.storage import PARTIAL, Location, delete_files, delete_folder
from cdc_replay.model.lsn import Lsn

LEFT_ALONE: Final = dt.timedelta(hours=24)
"""How old a file must be before its age alone says that nobody writes it."""

TABLES: Final = ("changes", "catalogs", "relations")
FOLDERS: Final = (*TABLES, "prepared", "prepared_roots")
"""What a log consists of; the table of changes first: without it there is no log, whatever else is left."""


def remove_folders(log: Location) -> bool:
    """Remove a log and what is left of one; nothing else that is in its folder. False if there was nothing.

    Raises:
        OSError: if something cannot be removed; then the same call goes on with it.
    """
    removed = [name for name in FOLDERS if delete_folder(log / name)]
    return bool(removed)


def folders_without_log(log: Location) -> tuple[str, ...]:
    """The folders that hold something of a log whose table of changes is gone."""
    side_tables = [name for name in TABLES[1:] if DurableTable.exists(log / name)]
    used = [name for name in side_tables if DurableTable.open(log / name).version > 0]
    return (*used, *(name for name in FOLDERS[len(TABLES) :] if (log / name).names()))


def remove_orphans(log: Location, changes: DurableTable, end: Lsn) -> int:
    """Remove the files that writers have left that died; how many. Only for who holds the slot.

    `changes` is the table of changes as it is now, `end` the log's end there.

    Raises:
        OSError: if a file cannot be removed.
    """
    of_dead_pull = f"{end.file_name}-"
    removed = _remove(changes, lambda name: name.removeprefix(PARTIAL).startswith(of_dead_pull))
    for name in TABLES[1:]:
        removed += _remove(DurableTable.open(log / name), lambda _: False)
    roots = log / "prepared_roots"
    for folder in (log / "prepared", *(roots / name for name in roots.names())):
        removed += delete_files(folder, filter(_is_partial, folder.names()))
    return removed


def _remove(table: DurableTable, is_dead: Callable[[str], bool]) -> int:
    unnamed = table.unnamed_files()
    dead = {name for name in unnamed if is_dead(name)}
    old = _old(table.location, set(unnamed) - dead)
    commits = table.location / LOG_FOLDER
    partial = _old(commits, filter(_is_partial, commits.names()))
    return delete_files(table.location, dead | old) + delete_files(commits, partial)


def _is_partial(name: str) -> bool:
    return name.startswith(PARTIAL)


def _old(folder: Location, names: Iterable[str]) -> set[str]:
    limit = dt.datetime.now(dt.UTC) - LEFT_ALONE
    infos = folder.filesystem.get_file_info([(folder / name).path for name in names])
    return {info.base_name for info in infos if info.mtime is not None and info.mtime < limit}
