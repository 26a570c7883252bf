"""Workers are forked from a daemon that was started before Spark needed it; without it, from Spark's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from cdc_replay.spark.preloaded_daemon import DAEMON_MODULE, EXECUTOR_ENVIRONMENT, SOCKET, preload_daemon
from cdc_replay.spark.session import DEFAULTS
from embedded.java import spark_environment
from fixtures.native import wait_for

SETTINGS: Final = {key: value for key, value in DEFAULTS.items() if key.startswith(EXECUTOR_ENVIRONMENT)}
PRELOADING: Final = """
import json, os, subprocess, sys
from cdc_replay.spark import preloaded_daemon
popen = subprocess.Popen
started = []
subprocess.Popen = lambda *words, **options: started.append(popen(*words, **options)) or started[-1]
settings = preloaded_daemon.preload_daemon(json.loads(sys.argv[1]))
print(json.dumps({"settings": settings, "pid": started[0].pid}), flush=True)
sys.stdin.read()
"""
COUNTING: Final = """
import sys, threading
from cdc_replay.spark import preloaded_daemon, session as sessions

start = preloaded_daemon._start
started = []
def start_and_kill(*words):
    started.append(start(*words))
    if sys.argv[1] == "killed":
        started[-1].kill()
    return started[-1]
preloaded_daemon._start = start_and_kill

def look(batches):
    import json, os, sys
    from pathlib import Path
    import pyarrow as pa
    for batch in batches:
        daemon = Path(f"/proc/{os.getppid()}/cmdline").read_text().split(chr(0))
        seen = {
            "argument": daemon[3],
            "rows": batch.num_rows,
            "socket": os.environ.get("CDC_REPLAY_PRELOADED_DAEMON"),
            "secret": "PYTHON_WORKER_FACTORY_SECRET" in os.environ,
            "hash": os.environ["PYTHONHASHSEED"],
            # But for the folder of files that the session was given.
            "path": [entry for entry in sys.path if "userFiles" not in entry],
            "mine": os.environ.get("MINE"),
        }
        yield pa.RecordBatch.from_pydict({"seen": [json.dumps(seen)]})

session = sessions.spark_session("test", conf={
    "spark.master": "local[1]", "spark.executorEnv.MINE": "1", "spark.executorEnv.PYTHONPATH": "/nowhere",
})
for _ in range(2):
    frame = session.range(0, 10, numPartitions=1).mapInArrow(look, "seen string")
    print(frame.collect()[0].seen)
other = threading.Thread(target=sessions.spark_session, args=("test",))
other.start()
other.join()
assert len(started) == 1, started
"""


def run_job(how: str) -> tuple[dict[str, Any], ...]:
    """What two tasks, one after the other, have seen of the daemon that they were forked from."""
    named = Path(sys.executable)
    same_python = named.with_name("python3" if named.name == "python" else "python")
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, how],
        env=os.environ | spark_environment() | {"PYSPARK_PYTHON": str(same_python)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.spark
def test_workers_are_forked_from_the_preloaded_daemon_as_from_that_of_spark() -> None:
    preloaded, own = run_job("left alone"), run_job("killed")
    assert preloaded[0].pop("argument").isdecimal()
    assert preloaded[1].pop("argument").isdecimal()
    assert {each.pop("argument") for each in own} == {"pyspark.worker"}
    assert preloaded == own
    assert preloaded[0]["rows"] == 10
    assert (preloaded[0]["secret"], preloaded[0]["mine"], preloaded[0]["socket"]) == (True, "1", None)
    assert "/nowhere" in preloaded[0]["path"]


@dataclass(frozen=True)
class Driver:
    """A process that has started a daemon, and has no Spark."""

    process: subprocess.Popen[str]
    daemon: int
    settings: Mapping[str, str]

    @property
    def socket(self) -> Path:
        return Path(self.settings[f"{EXECUTOR_ENVIRONMENT}{SOCKET}"])

    def daemon_runs(self) -> bool:
        state = Path(f"/proc/{self.daemon}/stat")
        try:
            return state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False


@pytest.fixture
def driver() -> Iterator[Driver]:
    with subprocess.Popen(
        [sys.executable, "-c", PRELOADING, json.dumps(SETTINGS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        yield Driver(process, found["pid"], found["settings"])
        process.kill()


@pytest.mark.parametrize("how", ["it ends", "it is killed"])
def test_daemon_that_spark_never_needed_ends_with_its_driver(driver: Driver, how: str) -> None:
    assert driver.socket.exists()
    assert driver.socket.parent.stat().st_mode & 0o777 == 0o700
    if how == "it is killed":
        driver.process.send_signal(signal.SIGKILL)
    else:
        assert driver.process.stdin is not None
        driver.process.stdin.close()
    driver.process.wait(60)
    wait_for(lambda: not driver.daemon_runs(), "the daemon to end")
    assert not driver.socket.parent.exists()


@pytest.mark.parametrize("changed", ["MIMALLOC_PURGE_DELAY", "PYTHONHASHSEED"])
def test_daemon_is_not_taken_by_a_process_of_another_environment(driver: Driver, changed: str) -> None:
    """What counts when a process starts cannot be changed later, so Spark's own process is the daemon."""
    of_spark = {key.removeprefix(EXECUTOR_ENVIRONMENT): value for key, value in SETTINGS.items()}
    environment = os.environ | of_spark | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", changed: "7"}
    with subprocess.Popen(
        [sys.executable, "-m", DAEMON_MODULE, "pyspark.worker"],
        env=environment | {SOCKET: str(driver.socket)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as spark:  # fmt: skip
        assert spark.stdout is not None
        port = int.from_bytes(spark.stdout.read(4), "big")
        assert port > 0
        assert listens(spark.pid, port)
        assert not driver.daemon_runs()


@pytest.mark.parametrize("folder", ["x" * 120, "missing/folder"])
def test_without_a_place_to_meet_no_daemon_is_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Such as where the path of a socket would be too long."""
    if "/" not in folder:
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    assert preload_daemon(SETTINGS) == {}


def listens(pid: int, port: int) -> bool:
    """Whether the process has a socket that listens at the port."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    fields = [line.split() for line in lines]
    sockets = {
        f"socket:[{each[9]}]" for each in fields if each[1].endswith(f":{port:04X}") and each[3] == "0A"
    }
    links = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return bool(sockets & links)
