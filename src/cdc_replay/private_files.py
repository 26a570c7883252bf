"""Files for the user of the operating system who runs this software, and for nobody else: 0700, and 0600.

The change log holds all rows of the captured tables, and reports hold keys of rows that differ. So nothing
here depends on the umask of whoever starts a command:

| what                                   | how                                                              |
|----------------------------------------|------------------------------------------------------------------|
| the change log                         | folders and files are created so (`make_folder`, `make_file`)    |
| what libraries write: reports, Spark's | the umask of our programs and of our tasks (`private_umask`)     |
| what was there before                  | a folder that is ours, and open to others, is closed (`close`)   |

A folder of another user stays as it is: a volume's root, perhaps. What is made in it is closed all the same.
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
    """From now on this process, and what it starts, creates files for its user only."""
    os.umask(UMASK)


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """The same in the block, for code that runs in the process of another program."""
    before = os.umask(UMASK)
    try:
        yield
    finally:
        os.umask(before)


def make_folder(folder: Path) -> None:
    """Create a folder with those above it that are missing; one that is there is closed."""
    for path in reversed((folder, *folder.parents)):
        if not path.exists():
            path.mkdir(FOLDER_MODE, exist_ok=True)
    close(folder)


def make_file(file: Path) -> None:
    """Create an empty file, or make one empty that is there."""
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE))


def close(folder: Path) -> None:
    """Take away what others may do with a folder, if it belongs to this user."""
    found = folder.stat()
    if found.st_uid == os.geteuid() and found.st_mode & _OTHERS:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
