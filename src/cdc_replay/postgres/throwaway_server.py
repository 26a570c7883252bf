"""A PostgreSQL server for the time of one context, of which nothing is left afterwards.

Only its creator can reach it: it listens on a Unix socket in a folder of mode 0700 and on no port, and its
only role has a random password. It keeps nothing on purpose (`fsync` is off).

| ends by                       | what removes it                                                            |
|-------------------------------|----------------------------------------------------------------------------|
| the context, also on an error | this process closes a pipe, waits for the server, removes the folder       |
| Ctrl-C                        | the same: the server has a session of its own, the signal passes it by     |
| SIGTERM                       | the same, or as after SIGKILL: there are four seconds                      |
| SIGKILL                       | the server's parent, a shell that waits for the end of that pipe           |
| loss of the machine           | the next `throwaway_server` of this user: the folder's lock is free        |

PostgreSQL refuses to run as root. For root, its programs run in a user namespace with another uid; where
namespaces are forbidden, as the user `nobody`, who owns a folder within ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from psycopg.conninfo import make_conninfo

from cdc_replay.errors import ServerUnavailable, ThrowawayServerFailed
from cdc_replay.postgres.connection import connect
from cdc_replay.postgres.server_programs import ServerPrograms, find_programs

logger = logging.getLogger(__name__)

PREFIX: Final = "cdc_replay_pg_"
"""Of the folders in the folder for temporary files (`TMPDIR`)."""

ROLE: Final = "postgres"

SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": "",
    "port": "5432",
    "unix_socket_permissions": "0700",
    "password_encryption": "scram-sha-256",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    # Memory: about 60 MB, whatever the tables.
    "shared_buffers": "32MB",
    "work_mem": "4MB",
    "maintenance_work_mem": "32MB",
    "max_connections": "20",
    "max_wal_size": "256MB",
    "min_wal_size": "64MB",
    "jit": "off",
    # A statement that fails may hold a connection string: no statement is ever logged.
    "log_min_error_statement": "panic",
    "log_statement": "none",
    "log_error_verbosity": "terse",  # a DETAIL has values of rows
    "logging_collector": "off",
    "lc_messages": "C",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
"""Callers may override or add settings."""

START_SECONDS: Final = 60.0

_PROGRAM_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.05
_LOG_CHARACTERS: Final = 2000
_SOCKET_PATH_BYTES: Final = 100
"""Of the 107 that Linux allows, and 103 elsewhere."""

_KEPT_ENVIRONMENT: Final = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "HOME", "TMPDIR", "SSL_CERT_FILE")
"""Variables that servers get; the others may be secrets, or settings of libpq."""

_UNSHARE: Final = ("unshare", "--user", "--map-user=1000", "--map-group=1000")

# The shell's standard input is a pipe that only we hold open. When it ends, because we close it or because we
# were killed, the server is stopped at once (SIGQUIT, again until it has seen it), and the folder removed.
# When the server ends by itself, the shell does too, and leaves the server's log to be read.
_SUPERVISOR: Final = r"""
trap '' INT TERM HUP
exec 3<&0
"$@" </dev/null >>"$0/server/log" 2>&1 3<&- &
server=$!
(
    cat <&3 >/dev/null
    : >"$0/server/stopped"
    while kill -QUIT "$server"; do sleep 0.2; done
) 2>/dev/null &
watcher=$!
exec 3<&- </dev/null
wait "$server"
kill -KILL "$watcher" 2>/dev/null
if [ -e "$0/server/stopped" ]; then rm -rf "$0/server" "$0"; fi
"""


@dataclass(frozen=True, slots=True)
class ThrowawayServer:
    """A running server: the DSN of its superuser, and its version (`18.1`)."""

    dsn: str = field(repr=False)
    """For libpq; it has the password."""
    version: str
    folder: Path
    """Has mode 0700; everything of the server is in it."""


@contextlib.contextmanager
def throwaway_server(
    major: int, *, bin_folder: Path | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[ThrowawayServer]:
    """A server of PostgreSQL `major` with the empty database `postgres`, for as long as the context is open.

    Its programs are those in `bin_folder`, or installed ones (`find_programs`). `settings` are names and
    values of its configuration.

    Raises:
        ServerProgramsMissing: if no server of this version is installed.
        ThrowawayServerFailed: if it cannot be created or started; what it said is the detail.
    """
    remove_leftovers()
    programs = find_programs(major, bin_folder)
    with _own_folder() as folder, contextlib.ExitStack() as stack:
        began, password = time.monotonic(), secrets.token_hex(24)
        _create(programs, folder, password)
        supervisor = stack.enter_context(_running(programs, folder, {**SETTINGS, **(settings or {})}))
        dsn = make_conninfo(
            host=str(folder / "server"),
            port=5432,
            user=ROLE,
            password=password,
            dbname="postgres",
            sslmode="disable",  # a Unix socket has none
            gssencmode="disable",
        )
        _wait_until_ready(dsn, supervisor, folder)
        logger.info("throw-away PostgreSQL %s started in %.1f s", programs.version, time.monotonic() - began)
        yield ThrowawayServer(dsn, programs.version, folder)


def remove_leftovers() -> tuple[Path, ...]:
    """Remove the folders of this user's servers whose creator was killed; those that were removed.

    A server that still runs there ends within a minute once its files are gone (it looks for its
    postmaster.pid).
    """
    removed = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / "owner").open("rb") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its creator lives
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
                logger.info("removed %s, which a killed process had left", folder)
    return tuple(removed)


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A new private folder, locked by this process, that is removed with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        if len(os.fsencode(folder / "server" / ".s.PGSQL.5432")) > _SOCKET_PATH_BYTES:
            raise ThrowawayServerFailed(
                f'cannot start a throw-away server: the path "{folder}" is too long for a Unix socket',
                hint="Set TMPDIR to a folder with a shorter path.",
            )
        # Locked before it has its name: a file without a lock is a leftover.
        with (folder / "owner.new").open("wb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            Path(owner.name).rename(folder / "owner")
            (folder / "server").mkdir(mode=0o700)
            if (user := _drop_to()) is not None:
                folder.chmod(0o711)
                _give_away(folder / "server", user)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _create(programs: ServerPrograms, folder: Path, password: str) -> None:
    """Run initdb in `folder/server/data`; the password reaches it in a file."""
    home = folder / "server"
    secret, user = home / "password", _drop_to()
    try:
        _write_secret(secret, password, user)
    except OSError as error:
        raise _failed("create", programs, str(error)) from error
    command = [
        *(*_namespace(), str(programs.folder / "initdb"), "-D", str(home / "data"), "-U", ROLE),
        *("-A", "scram-sha-256", f"--pwfile={secret}", "-E", "UTF8", "--locale=C", "--no-sync"),
    ]
    try:
        done = subprocess.run(  # noqa: S603 - a program of the machine's administrator, or of the one who runs us
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PROGRAM_SECONDS,
            check=False,
            user=user,
            extra_groups=None if user is None else [],
            env=_environment(),
            cwd=home,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed("create", programs, str(error)) from error
    secret.unlink()
    if done.returncode:
        raise _failed("create", programs, done.stdout.decode(errors="replace"))


@contextlib.contextmanager
def _running(
    programs: ServerPrograms, folder: Path, settings: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The shell that runs the server and stops it at the end of its input; the server may not answer yet."""
    home, user = folder / "server", _drop_to()
    options = [
        part
        for name, value in {**settings, "unix_socket_directories": str(home)}.items()
        for part in ("-c", f"{name}={value}")
    ]
    postgres = [*_namespace(), str(programs.folder / "postgres"), "-D", str(home / "data"), *options]
    supervisor = subprocess.Popen(  # noqa: S603 - as above; the script is a constant
        ["/bin/sh", "-c", _SUPERVISOR, str(folder), *postgres],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        user=user,
        extra_groups=None if user is None else [],
        umask=0o077,
        env=_environment(),
        cwd=home,
    )
    try:
        yield supervisor
    finally:
        if supervisor.stdin is not None:
            supervisor.stdin.close()
        try:
            supervisor.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("the throw-away server in %s has not ended yet", folder)


def _wait_until_ready(dsn: str, supervisor: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connect(dsn, purpose="throw-away server", answer_seconds=START_SECONDS).close()
        except ServerUnavailable as error:
            if supervisor.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                continue
            log = folder / "server" / "log"
            output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else str(error)
            raise _failed("start", None, output) from error
        else:
            return


def _failed(action: str, programs: ServerPrograms | None, output: str) -> ThrowawayServerFailed:
    where = "" if programs is None else f" with the programs in {programs.folder}"
    return ThrowawayServerFailed(
        f"cannot {action} a throw-away server{where}",
        detail=f"It said: {output.strip()[-_LOG_CHARACTERS:] or 'nothing'}",
        hint="Check that there is room for it in the folder for temporary files (TMPDIR), and that an"
        " ordinary user can run the programs.",
    )


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    return kept | {"LC_ALL": "C"}


@functools.cache
def _namespace() -> tuple[str, ...]:
    """The command that hides root; nothing if it is not needed, or not allowed."""
    if os.geteuid() != 0:
        return ()
    try:
        probe = subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False)  # noqa: S603 - constants
    except OSError:
        return ()
    return _UNSHARE if probe.returncode == 0 else ()


def _drop_to() -> str | None:
    """The user that runs the server in place of root, where namespaces are forbidden."""
    return "nobody" if os.geteuid() == 0 and not _namespace() else None


def _write_secret(file: Path, text: str, user: str | None) -> None:
    """Create a file for a user, in a folder in which that user may have put a link to a file of ours."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as secret:
        secret.write(text)
        if user is not None:
            _give_away(secret.fileno(), user)


def _give_away(path: Path | int, user: str) -> None:
    entry = pwd.getpwnam(user)
    os.chown(path, entry.pw_uid, entry.pw_gid)
