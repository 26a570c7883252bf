"""`cdc-replay` as it is measured: a fresh process per command, or a `batch` that has its Spark already."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.memory import MemorySampler, Peaks
from embedded.java import spark_environment
from embedded.postgres import Cluster

ROOT: Final = Path(__file__).resolve().parents[2]
PROGRAM: Final = str(Path(sys.executable).with_name("cdc-replay"))
SUBMIT: Final = str(Path(sys.executable).with_name("spark-submit"))


class CommandFailed(Exception):
    """A command of what is measured failed; the message is what it said."""


@dataclass(frozen=True)
class Run:
    """One measurement: how long it took, the peaks, and what the command returned."""

    seconds: float
    peaks: Peaks
    result: Mapping[str, Any]


@contextlib.contextmanager
def sampled(root: int | None, servers: Mapping[str, Cluster]) -> Iterator[MemorySampler]:
    """Watch the memory of a process with its children, and of the servers."""
    postmasters = {name: postmaster(server) for name, server in servers.items()}
    with MemorySampler(root, postmasters) as sampler:
        yield sampler


def postmaster(cluster: Cluster) -> int:
    """The first process of a server."""
    return int((cluster.data / "postmaster.pid").read_text(encoding="ascii").split()[0])


def fresh(command: list[str], folder: Path, servers: Mapping[str, Cluster]) -> Run:
    """Run a command in a process of its own, from its start to its end.

    Raises:
        CommandFailed: with the end of what it said.
    """
    said = folder / "commands.log"
    with said.open("ab") as errors:
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment(), cwd=folder, text=True
        )
        try:
            assert process.stdout is not None
            with sampled(process.pid, servers) as sampler, ThreadPoolExecutor(1) as threads:
                # The JVM, which tidies up behind the command for half a second, holds the pipe open.
                printed = threads.submit(process.stdout.read)
                process.wait()
                seconds = time.monotonic() - began
                lines = [line for line in printed.result().splitlines() if line.startswith("{")]
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise CommandFailed(f"{' '.join(command[:3])} failed: {said.read_text(errors='replace')[-3000:]}")
    return Run(seconds, sampler.peaks, json.loads(lines[-1]) if lines else {})


def environment() -> dict[str, str]:
    """What Spark needs, and the package as it is beside these files."""
    return os.environ | spark_environment() | {"PYTHONPATH": str(ROOT / "src")}


class Session:
    """A `cdc-replay batch` process; used as a context it is ended, whatever happens."""

    def __init__(self, folder: Path, servers: Mapping[str, Cluster]) -> None:
        self._said = folder / "batch.log"
        self._servers = servers
        with self._said.open("ab") as errors:
            self._process = subprocess.Popen(
                [PROGRAM, "batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env=environment(), cwd=folder, text=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            if kind is not None:
                self._process.terminate()
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    @property
    def pid(self) -> int:
        """The driver's process."""
        return self._process.pid

    def run(self, line: str) -> Run:
        """Run a command line in it.

        Raises:
            CommandFailed: with its error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with sampled(self.pid, self._servers) as sampler:
            began = time.monotonic()
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            seconds = time.monotonic() - began
        if not answer:
            raise CommandFailed(f"batch ended at {line!r}: {self._said.read_text(errors='replace')[-3000:]}")
        found = json.loads(answer)
        if not found["ok"]:
            raise CommandFailed(f"{line!r} failed: {found['error']}")
        return Run(seconds, sampler.peaks, found.get("result", {}))
