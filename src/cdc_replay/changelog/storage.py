"""Where a change log lives, a local folder or an object store, and how a file there comes to stay.

An object store makes a file durable when its upload completes, and its name appears only then. A local folder
does neither: after a power loss a file may be missing, or be there empty or with zeros in it, until its
content *and* the folder that names it have been flushed, each by itself. So every file here is written under
a name that no reader regards (`PARTIAL`), flushed, given its name, and then its folder is flushed:

| power is lost after         | there may be                                                          |
|-----------------------------|-----------------------------------------------------------------------|
| the content is written      | nothing, or a partial file                                            |
| the content is flushed      | the same                                                              |
| the name is given           | a partial file, the whole file, or neither: nobody relies on it yet   |
| the folder is flushed       | the whole file                                                        |

A name never shows a part of its content, so a reader needs no recovery. What a process finds by its name may
still be lost while the process that wrote it is between the last two steps, or was killed there:
`sync_visible_files` flushes the folder before anything is built upon what was found.

What a store needs to be reached comes from the environment: the variables that its own tools read, see
docs/change-log.md. It is handed to the three libraries that read and write (pyarrow, deltalake, obstore) here
and nowhere else, and is in no file and no text of an object.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url
from pyarrow import fs

from cdc_replay import private_files
from cdc_replay.errors import ChangeLogNotWritable, ChangeLogUnavailable, InvalidConfiguration

PARTIAL: Final = "_partial."
"""How the name of a file begins that is being written; readers of Delta tables and of Parquet skip it."""

# The Delta library draws its causes as a tree, in colour.
_DECORATION: Final = re.compile(r"(\x1b\[[0-9;]*m|↳|\s)+")

Environment: TypeAlias = tuple[tuple[str, str], ...]

_VARIABLES: Final = ("AWS_", "AZURE_", "GOOGLE_")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT")

# A folder that this process could not have changed has nothing of it to flush.
_UNCHANGEABLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENOENT})


@dataclass(frozen=True, slots=True)
class Location:
    """A folder or file of a change log; `path` is what `filesystem` understands."""

    uri: str
    filesystem: fs.FileSystem
    path: str

    @classmethod
    def of(cls, uri: str) -> Location:
        """What is at `uri`: a path, or a URI such as `s3://bucket/folder`.

        Raises:
            InvalidConfiguration: if it is a URI of another kind, or carries more than bucket and path.
        """
        scheme, separator, rest = uri.partition("://")
        if not separator or scheme == "file":
            path = Path(unquote(urlsplit(uri).path) if separator else uri).absolute()
            return cls(str(path), fs.LocalFileSystem(), str(path))
        bucket = rest.partition("/")[0]
        if scheme not in _STORES or not bucket or set(bucket) & set("@:?") or "?" in rest:
            raise InvalidConfiguration(
                # Not the URI itself: it may hold a password.
                f'a change log of the form "{scheme}://…" cannot be used',
                detail="It is a folder, s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH and no"
                " more: credentials and the store's address come from the environment.",
                hint="Correct the publisher's `change_log` in the configuration.",
            )
        path_text = rest.rstrip("/")
        return cls(f"{scheme}://{path_text}", _object_store(scheme, _environment()), path_text)

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.uri}/{name}", self.filesystem, f"{self.path}/{name}")

    @property
    def parent(self) -> Location:
        """The folder that names it."""
        return Location(self.uri.rpartition("/")[0], self.filesystem, self.path.rpartition("/")[0])

    @property
    def name(self) -> str:
        """Its name in that folder."""
        return self.path.rpartition("/")[2]

    @property
    def is_local(self) -> bool:
        """Durability is ours to see to."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def exists(self) -> bool:
        """A file or folder is there."""
        return bool(self.filesystem.get_file_info(self.path).type != fs.FileType.NotFound)

    @property
    def storage_options(self) -> dict[str, str]:
        """What deltalake and obstore must be told, besides what they find in the environment."""
        plain = not self.is_local and any(os.environ.get(name, "").startswith("http:") for name in _ENDPOINTS)
        return {"allow_http": "true"} if plain else {}

    def read(self) -> bytes:
        """The content of a file."""
        with self.filesystem.open_input_file(self.path) as source:
            return bytes(source.read())

    def names(self) -> tuple[str, ...]:
        """The names of the files and folders in a folder; none if it is not there."""
        selector = fs.FileSelector(self.path, allow_not_found=True)
        return tuple(info.base_name for info in self.filesystem.get_file_info(selector))


def put_if_absent(file: Location, content: bytes) -> bool:
    """Create a file with that content, durably and at once; False, and no change, if its name is taken.

    Raises:
        OSError: if it cannot be written; then it is not there.
    """
    return _put(file, content) if not file.is_local else _link(Path(file.path), content)


def check_put_if_absent(folder: Location) -> None:
    """Check that the store refuses a second file of one name; some older ones ignore the condition.

    Raises:
        ChangeLogNotWritable: if it does not; two captures could then commit the same version.
        OSError: if it cannot be written to.
    """
    if folder.is_local:
        return
    probe = folder / f"{PARTIAL}{uuid.uuid4().hex}.probe"
    is_refused = put_if_absent(probe, b"first") and not put_if_absent(probe, b"second")
    delete_files(folder, [probe.name])
    if not is_refused:
        raise ChangeLogNotWritable(
            f'the object store of change log "{folder.uri}" overwrites files that it was told not to',
            detail="It ignores the condition If-None-Match of a PUT, so it cannot refuse a second writer.",
            hint="Use a store with conditional writes, or a newer version of this one.",
        )


def replace(file: Location, content: bytes) -> None:
    """Write a file, durably; a reader sees what was there before, or all of `content`.

    Raises:
        OSError: if it cannot be written; then what was there before still is.
    """
    if not file.is_local:
        with file.filesystem.open_output_stream(file.path) as sink:
            sink.write(content)
        return
    # A name of its own: another process may be replacing the same file.
    partial = file.parent / f"{PARTIAL}{uuid.uuid4().hex}.{file.name}"
    try:
        _write(Path(partial.path), content)
        publish_file(partial, file)
    except OSError:
        _discard(Path(partial.path))
        raise


def publish_file(partial: Location, file: Location) -> None:
    """Give a local file, whose content is flushed, its name, durably."""
    Path(partial.path).replace(file.path)
    _flush(file.parent.path)


def delete_files(folder: Location, names: Iterable[str]) -> int:
    """Delete those files of a folder that are there; how many there were.

    They may come back with a power loss before `sync_folder`.
    """
    paths = [(folder / name).path for name in names]
    found = [info.path for info in folder.filesystem.get_file_info(paths) if info.type == fs.FileType.File]
    for path in found:
        folder.filesystem.delete_file(path)
    return len(found)


def delete_folder(folder: Location) -> bool:
    """Remove a folder with all that is in it, so that no part of it ever passes for the whole; False if none.

    A local folder is first renamed, durably, so it goes at once. In an object store its files go in the order
    of their names, those of `_delta_log` last: until its end a removal can be seen, and gone on with.
    """
    if folder.is_local:
        return _delete_local(Path(folder.path))
    selector = fs.FileSelector(folder.path, allow_not_found=True, recursive=True)
    files = [info.path for info in folder.filesystem.get_file_info(selector) if info.is_file]
    for path in sorted(files, key=lambda path: ("/_delta_log/" in path, path)):
        folder.filesystem.delete_file(path)
    if files:
        folder.filesystem.delete_dir(folder.path)
    return bool(files)


def sync_file(location: Location) -> None:
    """Flush a closed file's content; its name is durable after `sync_folder` of its folder."""
    if location.is_local:
        _flush(location.path)


def sync_folder(location: Location) -> None:
    """Flush the names of the files in a folder."""
    if location.is_local:
        _flush(location.path)


def sync_visible_files(folder: Location) -> None:
    """Make sure that the files which a folder shows will still be there after a power loss.

    Raises:
        OSError: if that cannot be had; a folder that is read-only is as it will be.
    """
    try:
        sync_folder(folder)
    except OSError as error:
        if error.errno not in _UNCHANGEABLE:
            raise


def make_folder(location: Location) -> None:
    """Create a folder with those above it, for this user only, and make their names durable."""
    if not location.is_local:
        return
    folder = Path(location.path)
    private_files.make_folder(folder)
    for above in folder.parents:
        sync_visible_files(Location(str(above), location.filesystem, str(above)))


def make_file(location: Location) -> None:
    """Create an empty local file, for this user only; in an object store a file comes with its content."""
    if location.is_local:
        private_files.make_file(Path(location.path))


def close_to_others(location: Location) -> None:
    """Take away what others may do with a local log; those in it are ours where its folder is not."""
    if not location.is_local:
        return
    folder = Path(location.path)
    for path in (folder, *(each for each in folder.iterdir() if each.is_dir() and not each.is_symlink())):
        private_files.close_to_others(path)


@contextlib.contextmanager
def storage_write_errors(uri: str) -> Iterator[None]:
    """Raise what the operating system or the object store says about writing to `uri` as an error of ours.

    Raises:
        ChangeLogNotWritable: naming `uri` and the reason.
    """
    try:
        yield
    except OSError as error:
        raise ChangeLogNotWritable(
            f'change log "{uri}" cannot be written',
            detail=_DECORATION.sub(" ", str(error)).strip(),
            hint="Make room, or make the folder writable, then run the command again. Nothing is lost: what"
            " is not in the log stays in the replication slot.",
        ) from error


@contextlib.contextmanager
def storage_read_errors(uri: str) -> Iterator[None]:
    """Raise what the operating system or the object store says about reading `uri` as an error of ours.

    Raises:
        ChangeLogUnavailable: naming `uri` and the reason.
    """
    try:
        yield
    except OSError as error:
        raise ChangeLogUnavailable(
            f'change log "{uri}" cannot be reached',
            detail=_DECORATION.sub(" ", str(error)).strip(),
            hint="Check the folder's permissions, or the object store's address and credentials in the"
            " environment, then run the command again.",
        ) from error


def _write(path: Path, content: bytes) -> None:
    """Create a file, for this user only, and flush its content."""
    private_files.make_file(path)
    with path.open("wb") as sink:
        sink.write(content)
        sink.flush()
        os.fsync(sink.fileno())


def _link(path: Path, content: bytes) -> bool:
    partial = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}{path.suffix}")
    try:
        _write(partial, content)
        os.link(partial, path)
    except FileExistsError:
        return False
    finally:
        _discard(partial)
    try:
        _flush(str(path.parent))
    except OSError:
        # Not durable, so not done: nobody may find it and rely on it.
        path.unlink(missing_ok=True)
        raise
    return True


def _discard(partial: Path) -> None:
    # What matters is whether the file itself was written; what stays here is removed some time (`remains`).
    with contextlib.suppress(OSError):
        partial.unlink()


def _put(file: Location, content: bytes) -> bool:
    store = from_url(file.parent.uri, client_options={"allow_http": bool(file.storage_options)})
    try:
        obstore.put(store, file.name, content, mode="create")
    except AlreadyExistsError:
        # Perhaps by ourselves: the answer to a first attempt was lost, and the second was refused.
        return file.read() == content
    except BaseError as error:
        raise OSError(str(error).partition("\n\nDebug source")[0]) from error
    return True


def _delete_local(folder: Path) -> bool:
    aside = folder.with_name(f"{PARTIAL}removed.{folder.name}")
    found = folder.exists() or aside.exists()
    if aside.exists():
        shutil.rmtree(aside)
    if folder.exists():
        folder.rename(aside)
        _flush(str(folder.parent))
        shutil.rmtree(aside)
    return found


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _environment() -> Environment:
    return tuple(sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES)))


@functools.lru_cache(maxsize=8)
def _object_store(scheme: str, _environment: Environment) -> fs.FileSystem:
    """A client of a store, kept for the next file as long as the environment is the same."""
    return _STORES[scheme]()


def _s3() -> fs.FileSystem:
    """At the address and in the region that the others read; pyarrow alone asks the network for a region."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return fs.S3FileSystem(region=region, endpoint_override=os.environ.get("AWS_ENDPOINT_URL"))


def _azure() -> fs.FileSystem:
    """Under the variables that deltalake reads; pyarrow by itself reads those of Azure's identities only."""
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if account is None:
        raise InvalidConfiguration(
            "az:// needs the name of the storage account",
            hint="Set the environment variable AZURE_STORAGE_ACCOUNT_NAME.",
        )
    return fs.AzureFileSystem(
        account,
        account_key=os.environ.get("AZURE_STORAGE_ACCOUNT_KEY"),
        sas_token=os.environ.get("AZURE_STORAGE_SAS_TOKEN"),
    )


_STORES: Final[Mapping[str, Callable[[], fs.FileSystem]]] = {"s3": _s3, "gs": fs.GcsFileSystem, "az": _azure}
