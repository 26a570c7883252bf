"""Files that only the user who runs this software can read: modes 0700 and 0600.

The change log holds all rows of the captured tables, and reports hold keys of rows that differ. Their modes
therefore do not depend on the umask of the caller:

| files                                | protected by                                                 |
|--------------------------------------|--------------------------------------------------------------|
| the change log                       | the modes given at creation (`make_folder`, `make_file`)     |
| files of libraries: reports, Spark's | the umask of our programs and of our tasks (`private_umask`) |
| existing folders of this user        | removing the rights of others (`close_to_others`)            |

A folder of another user, such as a volume's root, keeps its mode. Files created in it are private all the
same.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
UMASK: Final = 0o077

_OTHERS: Final = 0o077


def set_private_umask() -> None:
    """Have this process and its children create files for their user only."""
    os.umask(UMASK)


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """The same inside the context, for code that runs in the process of another program."""
    before = os.umask(UMASK)
    try:
        yield
    finally:
        os.umask(before)


def make_folder(folder: Path) -> None:
    """Create a private folder with its missing parents; an existing one becomes private."""
    for path in reversed((folder, *folder.parents)):
        if not path.exists():
            path.mkdir(FOLDER_MODE, exist_ok=True)
    close_to_others(folder)


def make_file(file: Path) -> None:
    """Create an empty file, or truncate an existing one."""
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE))


def close_to_others(folder: Path) -> None:
    """Remove the rights of other users on a folder, if it belongs to this user."""
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & _OTHERS:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)
