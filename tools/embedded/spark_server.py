"""A private Spark Connect server on a free loopback port, stopped by its own process group."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from embedded.java import spark_environment
from embedded.ports import free_port

START_SECONDS: Final = 120


@dataclass
class SparkServer:
    """`with SparkServer(folder) as server: server.connection`; it can be killed and started again."""

    folder: Path
    """Of its log."""
    master: str = "local[2]"
    token: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of Spark, beside those that the server has anyway."""
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For pyspark's client, which sends a token without TLS only to a host of the name `localhost`."""
        return f"sc://localhost:{self.port}/" + (f";token={self.token}" if self.token else "")

    @property
    def connection(self) -> dict[str, object]:
        """As Airflow's connection."""
        password = {"password": self.token} if self.token else {}
        return {"conn_type": "spark_connect", "host": "localhost", "port": self.port, **password}

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        token = {"SPARK_CONNECT_AUTHENTICATE_TOKEN": self.token} if self.token else {}
        with (self.folder / "spark_connect.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cdc_replay.spark.connect_server"),
                    *(f"--port={self.port}", f"--master={self.master}"),
                    *(f"--conf={key}={value}" for key, value in self.settings.items()),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **spark_environment(), **token, **self.environment},
                cwd=self.folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = (self.folder / "spark_connect.log").read_text(encoding="utf-8", errors="replace")
                self.kill()
                raise RuntimeError(f"the Spark Connect server did not start:\n{text[-3000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it as a container engine does: SIGTERM, then SIGKILL."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def kill(self) -> None:
        """End it without a chance to do anything."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _listens(self) -> bool:
        with socket.socket() as client:
            client.settimeout(1)
            return client.connect_ex(("127.0.0.1", self.port)) == 0
