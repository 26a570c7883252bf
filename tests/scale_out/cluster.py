"""A standalone Spark cluster on loopback, from the pyspark package: a master and workers of one core each.

with SparkCluster(folder, workers=2) as cluster:
    cluster.submit("replay.py", "--config", file, "s")

Spark's event log of each application says which executor ran which task, and a worker's folder which
executors it has started.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.memory import descendants
from cdc_replay.spark.java import JVM_OPTIONS
from embedded.java import spark_environment
from embedded.ports import free_port
from fixtures.native import wait_for

JOBS: Final = Path(__file__).resolve().parents[2] / "jobs"
START_SECONDS: Final = 90
SUBMIT_SECONDS: Final = 300
CONF: Final[Mapping[str, str]] = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": JVM_OPTIONS,
    "spark.executor.extraJavaOptions": JVM_OPTIONS,
    # Both workers are to have tasks: a job starts when both executors are there.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.locality.wait": "0s",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
}


@dataclass
class Submitted:
    """An application that `spark-submit` runs; its driver is a child of the process."""

    process: subprocess.Popen[str]
    said: Path

    def results(self) -> list[dict[str, Any]]:
        """Wait for its end; the results that it prints, one JSON object per line."""
        printed, _ = self.process.communicate(timeout=SUBMIT_SECONDS)
        assert self.process.returncode == 0, self.said.read_text(encoding="utf-8", errors="replace")[-5000:]
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@dataclass
class SparkCluster:
    """A context: on its end everything that it has started is killed, with all descendants."""

    folder: Path
    workers: int
    port: int = field(default_factory=free_port)
    web_port: int = field(default_factory=free_port)
    _parts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _submitted: list[Submitted] = field(default_factory=list)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def master(self) -> str:
        """What `spark-submit --master` takes."""
        return f"spark://127.0.0.1:{self.port}"

    def start(self, job: str, *arguments: str, **executor_environment: str) -> Submitted:
        """Submit a file of `jobs`; `executor_environment` is set in the executors only."""
        conf = {
            **CONF,
            "spark.cores.max": str(self.workers),
            "spark.eventLog.dir": self._events.as_uri(),
            **{f"spark.executorEnv.{name}": value for name, value in executor_environment.items()},
        }
        options = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
        program = str(Path(sys.executable).with_name("spark-submit"))
        said = self.folder / f"submit_{len(self._submitted)}.log"
        with said.open("wb") as log:
            process = subprocess.Popen(
                [program, "--master", self.master, *options, str(JOBS / job), *arguments],
                env=self._environment(), stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self._submitted.append(Submitted(process, said))
        return self._submitted[-1]

    def submit(self, job: str, *arguments: str) -> list[dict[str, Any]]:
        """Submit a file of `jobs`, and wait for its results."""
        return self.start(job, *arguments).results()

    def tasks_of_last_application(self) -> dict[str, int]:
        """Worker → how many tasks its executors have ended in the application that was submitted last."""
        application = max(self._events.iterdir(), key=lambda path: path.stat().st_mtime)
        events = [json.loads(line) for line in application.read_text(encoding="utf-8").splitlines()]
        ended = Counter(
            event["Task Info"]["Executor ID"] for event in events if event["Event"] == "SparkListenerTaskEnd"
        )
        name = next(event["App ID"] for event in events if event["Event"] == "SparkListenerApplicationStart")
        return {
            worker: sum(ended[path.name] for path in (self._work(worker) / name).glob("*"))
            for worker in self._worker_names()
        }

    def executors(self) -> Iterator[int]:
        """The processes of executors that run now: the JVMs below the workers."""
        for worker in self._worker_names():
            # One that has ended is a zombie until its worker asks for it.
            below = (pid for pid in descendants(self._parts[worker].pid)[1:] if _state(pid) not in ("Z", ""))
            yield from itertools.islice(below, 1)

    def stopped(self) -> dict[int, int]:
        """Processes that a failpoint has stopped, each with its executor's process."""
        return {
            pid: executor
            for executor in self.executors()
            for pid in descendants(executor)
            if _state(pid) == "T"
        }

    @property
    def _events(self) -> Path:
        return self.folder / "events"

    def _work(self, worker: str) -> Path:
        return self.folder / worker

    def _worker_names(self) -> list[str]:
        return [f"worker_{number}" for number in range(self.workers)]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **spark_environment(), "SPARK_LOCAL_DIRS": str(self.folder / "local")}

    def _start(self) -> None:
        self._events.mkdir(parents=True)
        self._launch("master", "master.Master", "--port", str(self.port), "--webui-port", str(self.web_port))
        wait_for(lambda: self._alive() is not None, "the master", START_SECONDS)
        for worker in self._worker_names():
            self._work(worker).mkdir()
            self._launch(
                worker, "worker.Worker", "--port", str(free_port()), "--webui-port", str(free_port()),
                "--cores", "1", "--memory", "1g", "--work-dir", str(self._work(worker)), self.master,
            )  # fmt: skip
        wait_for(lambda: self._alive() == self.workers, "the workers to register", START_SECONDS)

    def _launch(self, part: str, name: str, *arguments: str) -> None:
        program = str(Path(sys.executable).with_name("spark-class"))
        with (self.folder / f"{part}.log").open("ab") as log:
            self._parts[part] = subprocess.Popen(
                [program, f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1", *arguments],
                env=self._environment() | {"SPARK_DAEMON_MEMORY": "256m"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
            )  # fmt: skip

    def _alive(self) -> int | None:
        """How many workers the master knows; None while it does not answer, or not in JSON yet."""
        for name, part in self._parts.items():
            log = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            assert part.poll() is None, f"{name} ended: {log[-3000:]}"
        with (
            contextlib.suppress(OSError, json.JSONDecodeError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.web_port}/json/", timeout=10) as answer,
        ):
            return int(json.load(answer)["aliveworkers"])
        return None

    def _stop(self) -> None:
        processes = [each.process.pid for each in self._submitted if each.process.poll() is None]
        for root in (*processes, *(part.pid for part in self._parts.values())):
            for pid in descendants(root):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for each in self._submitted:
            each.process.communicate()
        for part in self._parts.values():
            part.wait()


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    return ""
