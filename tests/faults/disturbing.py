"""A replay that is stopped where a test wants it, and what can happen to its subscriber meanwhile.

program.stop_at("replay.mid_merge", "replay", "s")     # the process stands still there
DISTURBANCES["server restarted"](database)             # the world changes
answer = program.answer()                              # it goes on
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psycopg

from benchmarks.memory import descendants
from cdc_replay.failpoints import VARIABLE
from embedded.java import spark_environment
from fixtures.native import wait_for
from fixtures.postgres import Database

TESTS: Final = Path(__file__).resolve().parents[1]
SECONDS: Final = 400

_SESSIONS: Final = """
    select pid from pg_stat_activity
    where datname = current_database() and application_name like 'cdc_replay %'
        and application_name <> 'cdc_replay test'
    order by backend_start
"""


@dataclass
class Program:
    """`disturbed_batch.py`, its Spark session kept from command to command; a context that kills it."""

    folder: Path
    config: Path
    in_workers: str = "none"
    """A failpoint for the Spark workers, each of which serves one task."""
    _process: subprocess.Popen[str] | None = None
    _log_file: Path = field(init=False)

    def __enter__(self) -> Self:
        self._log_file = self.folder / "disturbed_batch.log"
        conf = {
            "spark.python.worker.reuse": "false",
            "spark.driver.memory": "512m",
            f"spark.executorEnv.{VARIABLE}": self.in_workers,
        }
        submitted = " ".join(f"--conf {name}={value}" for name, value in conf.items())
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("disturbed_batch.py"))],
                env=os.environ
                | spark_environment()
                | {"PYSPARK_SUBMIT_ARGS": f"{submitted} pyspark-shell"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in descendants(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    def stop_at(self, failpoint: str, *command: str) -> None:
        """Start a command, and wait until this process stands still at the failpoint."""
        self.begin(f"{failpoint}=stop", *command)
        wait_for(lambda: self._state(self.process.pid) == "T", f"{command} to reach {failpoint}", SECONDS)

    def stop_worker(self, *command: str) -> int:
        """Start a command, and wait until a Spark worker stands still; its process."""
        self.begin("none", *command)
        wait_for(lambda: bool(self.stopped()), f"a worker of {command} to stop", SECONDS)
        return self.stopped()[0]

    def run(self, *command: str) -> dict[str, Any]:
        """Run a command without a failpoint in this process."""
        self.begin("none", *command)
        return self.answer()

    def stopped(self) -> list[int]:
        """What stands still now: this process or workers."""
        return [pid for pid in descendants(self.process.pid) if self._state(pid) == "T"]

    def answer(self) -> dict[str, Any]:
        """Let everything that stands still go on until the command has ended; what `batch` says of it."""
        answer = self.answer_if_alive()
        assert answer is not None, self._log_file.read_text(encoding="utf-8", errors="replace")[-5000:]
        return answer

    def answer_if_alive(self) -> dict[str, Any] | None:
        """The same; None if the process has died."""
        lines: list[str] = []
        stdout = self.process.stdout
        assert stdout is not None
        reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reader.start()

        def has_answered() -> bool:
            for pid in self.stopped():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            return not reader.is_alive()

        wait_for(has_answered, "an answer", SECONDS)
        answer: dict[str, Any] | None = json.loads(lines[0]) if lines[0] else None
        return answer

    def begin(self, failpoint: str, *command: str) -> None:
        """Start a command with a failpoint in this process."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{failpoint}\t{' '.join(command)} --config {self.config}\n")
        self.process.stdin.flush()

    @staticmethod
    def _state(pid: int) -> str:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        return ""


def our_sessions(database: Database) -> list[int]:
    """The server processes that our commands have there."""
    return [pid for (pid,) in database.rows(_SESSIONS)]


def terminate_backends(database: Database) -> None:
    """What an administrator does, or `idle_session_timeout`."""
    with database.connect() as connection:
        for (pid,) in connection.execute(_SESSIONS.encode()).fetchall():
            connection.execute("select pg_terminate_backend(%s, 10000)", (pid,))


def kill_backend(database: Database) -> None:
    """SIGKILL, as the kernel does when memory ends: the server ends all sessions and recovers."""
    with database.connect() as another:
        # Any session will do, if no command has one at that moment.
        sessions = [another.info.backend_pid, *our_sessions(database)]
        os.kill(sessions[-1], signal.SIGKILL)
    wait_until_it_accepts(database, without=sessions)


def restart_server(database: Database) -> None:
    """An immediate stop, as a crash of the machine, and a start with recovery."""
    database.cluster.stop("immediate")
    database.cluster.start()


def wait_until_it_accepts(database: Database, *, without: list[int]) -> None:
    """Until the server has recovered, and its earlier processes have ended."""

    def accepts() -> bool:
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(database.dsn) as connection:
            present = connection.execute("select pid from pg_stat_activity").fetchall()
            return not {pid for (pid,) in present} & set(without)
        return False

    wait_for(accepts, "the server to recover", SECONDS)


DISTURBANCES: Final[Mapping[str, Callable[[Database], None]]] = {
    "backends terminated": terminate_backends,
    "backend killed": kill_backend,
    "server restarted": restart_server,
}
