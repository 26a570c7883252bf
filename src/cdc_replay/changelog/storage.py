"""Where a change log lives: a local folder or an object store, behind one file system interface.

An object store makes a file durable when its upload completes. A local folder does not: a file is durable
once it *and* the folder that names it are flushed, which is what `sync_file` and `sync_folder` do, and only
there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pyarrow import fs


@dataclass(frozen=True, slots=True)
class Location:
    """A folder of a change log; `path` is what `filesystem` understands."""

    uri: str
    filesystem: fs.FileSystem
    path: str

    @classmethod
    def of(cls, uri: str) -> Location:
        """The folder at `uri`: a path, or a URI such as `s3://bucket/folder`."""
        if "://" not in uri:
            path = Path(uri).absolute()
            return cls(str(path), fs.LocalFileSystem(), str(path))
        filesystem, path_text = fs.FileSystem.from_uri(uri)
        return cls(uri.rstrip("/"), filesystem, path_text.rstrip("/"))

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.uri}/{name}", self.filesystem, f"{self.path}/{name}")

    @property
    def is_local(self) -> bool:
        """Durability is ours to see to."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def exists(self) -> bool:
        """A file or folder is there."""
        return bool(self.filesystem.get_file_info(self.path).type != fs.FileType.NotFound)


def sync_file(location: Location) -> None:
    """Flush a closed file's content; its name is durable after `sync_folder` of its folder."""
    if location.is_local:
        _flush(location.path)


def sync_folder(location: Location) -> None:
    """Flush the names of the files in a folder."""
    if location.is_local:
        _flush(location.path)


def make_folder(location: Location) -> None:
    """Create a folder with those above it, and make their names durable."""
    if not location.is_local:
        return
    folder = Path(location.path)
    created = [folder, *folder.parents]
    missing = [one for one in created if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in missing:
        _flush(str(one.parent))


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
