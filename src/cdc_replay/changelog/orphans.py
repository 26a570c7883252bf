"""Files that dead processes have left: distinguished from files in use, and deleted.

| left behind                      | by                          | recognized by                           |
|----------------------------------|-----------------------------|-----------------------------------------|
| a data file that no commit names | a pull                      | its name starts with the end of the log |
| the same                         | a compaction, metadata      | its age                                 |
| a part of a commit or checkpoint | any writer                  | its name, and its age                   |
| a prepared transaction, a part   | a pull                      | its name, after the end of the log      |
| metadata tables without a log    | a creation, a removal       | the table of changes is missing         |

A pull names its files after the end of the log at its start. One process at a time pulls, holding the slot;
so when the next pull begins, an uncommitted file of that name belongs to a dead pull. A compaction may be
running at the same time. Its files have older names and are kept for a day; if it needs longer between a file
and its commit, it finds the file missing and does not commit.

Each pull looks for the files of dead ones. By age they are deleted where those of removed segments are, which
takes longer the more files there are: a log may get a hundred thousand of them in a day.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Final

from cdc_replay.changelog.delta.commits import LOG_FOLDER
from cdc_replay.changelog.delta.table import DurableTable
from cdc_replay.changelog.prepared_transactions import PreparedTransactions
from cdc_replay.changelog.storage import PARTIAL, Location, delete_files
from cdc_replay.model.lsn import Lsn

MIN_ORPHAN_AGE: Final = dt.timedelta(hours=24)
"""The age from which on an uncommitted file is considered to have no writer."""

TABLES: Final = ("changes", "catalogs", "relations")
"""The tables of a log; without the first, the table of changes, there is no log."""


def folders_without_log(log: Location) -> tuple[str, ...]:
    """The non-empty folders of a log whose table of changes does not exist."""
    metadata = [name for name in TABLES[1:] if DurableTable.exists(log / name)]
    used = [name for name in metadata if DurableTable.open(log / name).version > 0]
    return (*used, *(name for name in ("prepared", "prepared_roots") if (log / name).names()))


def remove_dead_pulls(log: Location, changes: DurableTable, end: Lsn) -> int:
    """Delete the files of dead pulls; returns their number. Only for the process that holds the slot.

    `changes` is the current table of changes, `end` the log's end there.

    Raises:
        OSError, ChangeLogNotWritable: if a file cannot be deleted.
        ChangeLogDamaged: if a file among prepared transactions is none.
    """
    dead = {*changes.location.names_with(f"{end.file_name}-")}
    if dead:
        dead -= {segment.name for segment in changes.segments()}
    removed = delete_files(changes.location, dead)
    roots = log / "prepared_roots"
    folders = (log / "prepared", *(roots / name for name in roots.names()))
    return removed + sum(PreparedTransactions(folder).remove_dead(end) for folder in folders)


def remove_old_orphans(table: DurableTable) -> int:
    """Delete the files of a table, and parts of its commits, whose writers are dead by their age.

    Returns their number.

    Raises:
        OSError: if a file cannot be deleted.
    """
    commits = table.location / LOG_FOLDER
    removed = delete_files(table.location, _old(table.location, table.unnamed_files()))
    return removed + delete_files(commits, _old(commits, filter(_is_partial, commits.names())))


def _is_partial(name: str) -> bool:
    return name.startswith(PARTIAL)


def _old(folder: Location, names: Iterable[str]) -> set[str]:
    limit = dt.datetime.now(dt.UTC) - MIN_ORPHAN_AGE
    infos = folder.filesystem.get_file_info([(folder / name).path for name in names])
    return {info.base_name for info in infos if info.mtime is not None and info.mtime < limit}
