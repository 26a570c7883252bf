"""The location of a change log, a local folder or an object store, and durable writes to it.

An object store makes a file durable when its upload completes, and its name appears only then. In a local
folder, after a power loss, a file may be missing, empty or contain zeros until its content *and* its folder
have been flushed separately. So every file is written under a name that readers ignore (`PARTIAL`), flushed,
renamed, and then its folder is flushed:

| power is lost after         | there may be                                                          |
|-----------------------------|-----------------------------------------------------------------------|
| the content is written      | nothing, or a partial file                                            |
| the content is flushed      | the same                                                              |
| the file is renamed         | a partial file, the whole file, or neither: nobody relies on it yet   |
| the folder is flushed       | the whole file                                                        |

A final name never shows partial content, so readers need no recovery. A visible file can still be lost if its
writer is between the last two steps, or was killed there: `sync_visible_files` flushes the folder before
anything is based on its files.

Credentials and addresses of a store come from the environment variables that its own tools read, see
docs/change-log.md. Only this module passes them to the three libraries that read and write (pyarrow,
deltalake, obstore); no file and no repr contains them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import ObjectStore, from_url
from pyarrow import fs

from cdc_replay import private_files
from cdc_replay.errors import ChangeLogNotWritable, ChangeLogUnavailable, InvalidConfiguration

PARTIAL: Final = "_partial."
"""The prefix of a file that is being written; readers of Delta tables and of Parquet skip such files."""

# The Delta library formats causes as a tree, in color.
_DECORATION: Final = re.compile(r"(\x1b\[[0-9;]*m|↳|\s)+")

# The Delta library reads %41 as A and a backslash as a slash, in folders too, and refuses control characters.
# A store's client also cuts a path at #, and drops empty folders.
_READ_OTHERWISE: Final = re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f\x7f\ud800-\udfff]")
_READ_OTHERWISE_IN_STORES: Final = re.compile(rf"{_READ_OTHERWISE.pattern}|#|//")

Environment: TypeAlias = tuple[tuple[str, str], ...]

_LISTED_AT_ONCE: Final = 1_000
"""Names of an answer to a request that lists them."""

_VARIABLES: Final = ("AWS_", "AZURE_", "GOOGLE_")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT")

# Errors of folders that this process cannot have changed, so that there is nothing to flush.
_UNCHANGEABLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENOENT})


@dataclass(frozen=True, slots=True)
class Location:
    """A folder or file of a change log; `path` is its path in `filesystem`."""

    uri: str
    filesystem: fs.FileSystem
    path: str

    @classmethod
    def parse(cls, uri: str) -> Location:
        """The location of a path, or of a URI such as `s3://bucket/folder`.

        Raises:
            InvalidConfiguration: if the URI's scheme is unknown, or it has more than bucket and path, or the
                libraries that read the log would look for it elsewhere.
        """
        scheme, separator, path_text = uri.partition("://")
        if not separator or scheme == "file":
            path = str(Path(unquote(urlsplit(uri).path) if separator else uri).absolute())
            _check_path(path, _READ_OTHERWISE)
            return cls(path, fs.LocalFileSystem(), path)
        bucket = path_text.partition("/")[0]
        if scheme not in _STORES or not bucket or set(bucket) & set("@:?") or "?" in path_text:
            raise InvalidConfiguration(
                # Not the URI itself: it may contain a password.
                f'a change log of the form "{scheme}://…" cannot be used',
                detail="It must be a folder, s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH,"
                " without options: credentials and the store's address come from the environment.",
                hint="Correct the publisher's `change_log` in the configuration.",
            )
        path_text = path_text.rstrip("/")
        _check_path(path_text, _READ_OTHERWISE_IN_STORES)
        return cls(f"{scheme}://{path_text}", _object_store(scheme, _environment()), path_text)

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.uri}/{name}", self.filesystem, f"{self.path}/{name}")

    @property
    def parent(self) -> Location:
        """The folder that contains it."""
        return Location(self.uri.rpartition("/")[0], self.filesystem, self.path.rpartition("/")[0])

    @property
    def name(self) -> str:
        """Its name in that folder."""
        return self.path.rpartition("/")[2]

    @property
    def is_local(self) -> bool:
        """We have to ensure durability ourselves."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def exists(self) -> bool:
        """There is a file or folder."""
        return bool(self.filesystem.get_file_info(self.path).type != fs.FileType.NotFound)

    @property
    def storage_options(self) -> dict[str, str]:
        """Options for deltalake and obstore that they do not read from the environment."""
        plain = not self.is_local and any(os.environ.get(name, "").startswith("http:") for name in _ENDPOINTS)
        return {"allow_http": "true"} if plain else {}

    def read(self) -> bytes:
        """The content of a file."""
        with self.filesystem.open_input_file(self.path) as source:
            return bytes(source.read())

    def names(self) -> tuple[str, ...]:
        """The names of the files and folders in a folder; none if it does not exist."""
        if self.is_local:
            with contextlib.suppress(FileNotFoundError):
                return tuple(path.name for path in Path(self.path).iterdir())
            return ()
        selector = fs.FileSelector(self.path, allow_not_found=True)
        return tuple(info.base_name for info in self.filesystem.get_file_info(selector))

    def names_with(self, prefix: str) -> tuple[str, ...]:
        """The names in a folder that begin with `prefix`, whole or after `PARTIAL`.

        One request to an object store that lists names in order, as most do, however many files there are;
        another one may withhold some.

        Raises:
            OSError: if the store does not answer.
        """
        if self.is_local:
            return tuple(name for name in self.names() if name.removeprefix(PARTIAL).startswith(prefix))
        listed: list[str] = []
        try:
            for chunk in obstore.list(_obstore(self), offset=prefix, chunk_size=_LISTED_AT_ONCE):
                # The store also lists what is in folders.
                paths = (entry["path"] for entry in chunk)
                listed += (path for path in paths if path.startswith(prefix) and is_file_name(path))
                if not chunk[-1]["path"].startswith(prefix):
                    break
        except BaseError as error:
            raise _os_error(error) from error
        return tuple(listed)


def _check_path(path: str, read_otherwise: re.Pattern[str]) -> None:
    if (match := read_otherwise.search(path)) is not None:
        raise InvalidConfiguration(
            f"a path with {match[0]!r} cannot be that of a change log",
            detail="The libraries that read the log would look for it elsewhere.",
            hint="Correct the publisher's `change_log` in the configuration.",
        )


def put_if_absent(file: Location, content: bytes) -> bool:
    """Create a file with that content, durably and atomically; False, without a change, if the name exists.

    Raises:
        OSError: if it cannot be written. It does not exist then, unless the answer of a store was lost.
    """
    return _put(file, content) if not file.is_local else _link(Path(file.path), content)


def check_put_if_absent(folder: Location) -> None:
    """Check that the store refuses to overwrite a file; some older stores ignore the condition.

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
            f'the object store of change log "{folder.uri}" does not support conditional writes',
            detail="It ignores the condition If-None-Match of a PUT, so it cannot refuse a second writer.",
            hint="Use a store with conditional writes, or a newer version of this one.",
        )


def replace(file: Location, content: bytes) -> None:
    """Write a file, durably; readers see the old or the new content, never a part.

    Raises:
        OSError: if it cannot be written; the old content stays then.
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
    """Rename a local file, whose content is flushed, to its final name, durably."""
    Path(partial.path).replace(file.path)
    _flush(file.parent.path)


def is_file_name(name: str) -> bool:
    """Whether it is the name of a file of a folder, and no path that leads elsewhere."""
    return name not in {"", ".", ".."} and not {"/", "\\", "\0"} & set(name)


def check_file_name(name: str) -> str:
    """Return the name of a file of a folder.

    Raises:
        ValueError: if it leads elsewhere.
    """
    if not is_file_name(name):
        raise ValueError(f"{name!r} is no name of a file of the log")
    return name


def delete_files(folder: Location, names: Iterable[str]) -> int:
    """Delete files of a folder; returns how many of them existed.

    After a power loss before `sync_folder` they may reappear.

    Raises:
        ValueError: if a name leads out of the folder; nothing is deleted then.
    """
    paths = [(folder / check_file_name(name)).path for name in names]
    existing = [info.path for info in folder.filesystem.get_file_info(paths) if info.type == fs.FileType.File]
    for path in existing:
        folder.filesystem.delete_file(path)
    return len(existing)


def sync_file(location: Location) -> None:
    """Flush a closed file's content; its name is durable after `sync_folder` of its folder."""
    if location.is_local:
        _flush(location.path)


def sync_folder(location: Location) -> None:
    """Flush the names of the files in a folder."""
    if location.is_local:
        _flush(location.path)


def sync_visible_files(folder: Location) -> None:
    """Make the visible files of a folder durable.

    Raises:
        OSError: if the folder cannot be flushed; errors of a read-only folder are ignored.
    """
    try:
        sync_folder(folder)
    except OSError as error:
        if error.errno not in _UNCHANGEABLE:
            raise


def make_folder(location: Location) -> None:
    """Create a folder and its parents, accessible to this user only, and make their names durable."""
    if not location.is_local:
        return
    folder = Path(location.path)
    private_files.make_folder(folder)
    for parent in folder.parents:
        sync_visible_files(Location(str(parent), location.filesystem, str(parent)))


def make_file(location: Location) -> None:
    """Create an empty local file, accessible to this user only; a no-op in an object store."""
    if location.is_local:
        private_files.make_file(Path(location.path))


def restrict_to_owner(location: Location) -> None:
    """Restrict a local log to this user; its subfolders are ours even if its folder is not."""
    if not location.is_local:
        return
    folder = Path(location.path)
    subfolders = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    for path in (folder, *subfolders):
        private_files.close_to_others(path)


@contextlib.contextmanager
def storage_write_errors(uri: str) -> Iterator[None]:
    """Raise OSErrors about writing to `uri` as an error of ours.

    Raises:
        ChangeLogNotWritable: naming `uri` and the reason.
    """
    try:
        yield
    except OSError as error:
        raise ChangeLogNotWritable(
            f'change log "{uri}" cannot be written',
            detail=_DECORATION.sub(" ", str(error)).strip(),
            hint="Free space, or make the folder writable, then run the command again. Nothing is lost: the"
            " replication slot keeps all changes that are not in the log.",
        ) from error


@contextlib.contextmanager
def storage_read_errors(uri: str) -> Iterator[None]:
    """Raise OSErrors about reading `uri` as an error of ours.

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
    """Create a file, accessible to this user only, and flush its content."""
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
        # Not durable: delete it, so that nobody relies on it.
        path.unlink(missing_ok=True)
        raise
    return True


def _discard(partial: Path) -> None:
    # `orphans` deletes leftover files later.
    with contextlib.suppress(OSError):
        partial.unlink()


def _put(file: Location, content: bytes) -> bool:
    try:
        obstore.put(_obstore(file.parent), file.name, content, mode="create")
    except AlreadyExistsError:
        # Perhaps it is ours: the response to a first attempt was lost, and the retry was refused.
        return file.read() == content
    except BaseError as error:
        raise _os_error(error) from error
    return True


def _obstore(folder: Location) -> ObjectStore:
    """A client that knows conditions and offsets, which those of pyarrow do not."""
    return from_url(folder.uri, client_options={"allow_http": bool(folder.storage_options)})


def _os_error(error: BaseError) -> OSError:
    return OSError(str(error).partition("\n\nDebug source")[0])


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _environment() -> Environment:
    variables = os.environ.items()
    return tuple(sorted((name, value) for name, value in variables if name.startswith(_VARIABLES)))


@functools.lru_cache(maxsize=8)
def _object_store(scheme: str, _environment: Environment) -> fs.FileSystem:
    """A client of a store, cached as long as the environment is the same."""
    return _STORES[scheme]()


def _s3() -> fs.FileSystem:
    """With the address and region of the other libraries; pyarrow would query the network for a region."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return fs.S3FileSystem(region=region, endpoint_override=os.environ.get("AWS_ENDPOINT_URL"))


def _azure() -> fs.FileSystem:
    """With the variables that deltalake reads; pyarrow reads only those of Azure's identities."""
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
