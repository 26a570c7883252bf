"""Opening the subscriptions of one command."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_replay.config import load_config
from cdc_replay.errors import InvalidConfiguration, ServerUnavailable
from cdc_replay.model.progress import unreported
from cdc_replay.opening import open_subscriptions

PATIENCE_SECONDS = 20
"""How long the first is kept waiting for the second; a connection waits longer."""

CONFIG = """
publishers:
  shop:
    dsn: postgresql://shop@127.0.0.1:1/shop
    change_log: log
subscriptions:
  first: {{publisher: shop, publications: [p], dsn: "{dsn}/first?connect_timeout=90"}}
  second: {{publisher: shop, publications: [p], dsn: "{dsn}/second?connect_timeout=90"}}
"""


class Listener:
    """Accepts two connections, answers neither, and closes them once both are there."""

    def __init__(self, server: socket.socket) -> None:
        self.met = threading.Barrier(2)
        self._threads = [threading.Thread(target=self._hold, args=(server,), daemon=True) for _ in range(2)]

    def _hold(self, server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(threading.BrokenBarrierError):
            self.met.wait(PATIENCE_SECONDS)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(2 * PATIENCE_SECONDS)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_subscribers_that_do_not_answer_are_waited_for_at_the_same_time(
    server: socket.socket, tmp_path: Path
) -> None:
    """One after the other, the first would be waited for until its time is up, and the second not met."""
    listener = Listener(server)
    listener.start()
    file = tmp_path / "cdc_replay.yaml"
    file.write_text(CONFIG.format(dsn=f"postgresql://apply@127.0.0.1:{server.getsockname()[1]}"), "utf-8")
    with contextlib.ExitStack() as stack:
        names = ("first", "unknown", "second")
        sessions, failures = open_subscriptions(load_config(file), names, "sync", stack, unreported)
    listener.join()
    assert not listener.met.broken
    assert sessions == []
    assert {name: type(error) for name, error in failures.items()} == {
        "first": ServerUnavailable,
        "second": ServerUnavailable,
        "unknown": InvalidConfiguration,
    }
