"""A workers' daemon that loads its modules while Spark starts.

Spark starts the daemon for its first task, which then waits a second until the modules are loaded, on one
core. So the driver starts one as soon as it has a JVM. The process that Spark starts hands over to it, and
stays until it ends:

    driver ── preload_daemon ──▶ loads ─── waits ──▶ take_over ──▶ forks workers
    Spark  ── starts ──────────────────────────────▶ hand_over ──▶ waits

They meet at a socket in a folder that only their user can enter. Whatever fails there costs that second: the
process that Spark has started loads the modules then.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

DAEMON_MODULE: Final = "cdc_replay.spark.worker_daemon"

SOCKET: Final = "CDC_REPLAY_PRELOADED_DAEMON"
"""The environment variable with the socket's path, for the process that Spark starts."""

EXECUTOR_ENVIRONMENT: Final = "spark.executorEnv."

SEARCH_PATH: Final = "PYTHONPATH"

_SET_BY_SPARK: Final = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_READ_ONCE: Final = (
    "GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MIMALLOC_PURGE_DELAY",
    *_SET_BY_SPARK,
)  # fmt: skip
"""Variables that only count when a process starts, or loads a library."""

_STREAMS: Final = (0, 1, 2)
_ACCEPTED: Final = b"+"


def preload_daemon(settings: Mapping[str, str]) -> dict[str, str]:
    """Start a daemon that loads its modules; the settings with which the process that Spark starts finds it.

    It ends with this process or, once it is Spark's, with that. Without one there are no such settings.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="cdc_replay_daemon_"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = folder / "socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            process = _start(listener.fileno(), _environment(settings))
    except OSError as error:
        logger.info("no workers' daemon is loaded ahead: %s", error)
        return {}
    # Until then the object must be kept, and its pipe with it.
    atexit.register(process.poll)
    return {f"{EXECUTOR_ENVIRONMENT}{SOCKET}": str(path)}


def _start(listener: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - this Python, and a module of ours
        [sys.executable, "-m", DAEMON_MODULE, str(listener)],
        # Nothing is written to it: it ends with this process, however that ends.
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[listener],
        env=environment,
        process_group=0,
    )


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """What Spark would start the daemon with, as far as it matters before the daemon is Spark's."""
    of_executors = {
        name.removeprefix(EXECUTOR_ENVIRONMENT): value
        for name, value in settings.items()
        if name.startswith(EXECUTOR_ENVIRONMENT)
    }
    search_paths = filter(None, (of_executors.get(SEARCH_PATH), os.environ.get(SEARCH_PATH)))
    return os.environ | _SET_BY_SPARK | of_executors | {SEARCH_PATH: os.pathsep.join(search_paths)}


def hand_over() -> bool:
    """Give what this process was started with to the preloaded daemon, and wait until that ends.

    False if there is none, or none that can take it.
    """
    path = os.environ.pop(SOCKET, None)
    if path is None:
        return False
    start = {
        "python": _python(),
        "arguments": sys.argv,
        "environment": dict(os.environ),
        "search_path": sys.path,
    }
    with socket.socket(socket.AF_UNIX) as daemon:
        try:
            daemon.connect(path)
            socket.send_fds(daemon, [b"\0"], _STREAMS)
            daemon.sendall(json.dumps(start).encode("ascii"))
            daemon.shutdown(socket.SHUT_WR)
            is_accepted = daemon.recv(1) == _ACCEPTED
        except OSError:
            return False
        if is_accepted:
            with contextlib.suppress(OSError):
                daemon.recv(1)
    return is_accepted


def _python() -> list[str]:
    """The same for each name of one Python, such as `python` and `python3` of an environment."""
    return [sys.prefix, sys.version]


def take_over(listener: socket.socket) -> socket.socket:
    """Wait for the process that hands over, and have its arguments, environment, search path and streams.

    Returns the connection to it: it ends when this is closed.

    Raises:
        SystemExit: if the driver ends first, or if that process was started in another way than this one.
    """
    waiting = select.poll()
    for source in (listener.fileno(), sys.stdin.fileno()):
        waiting.register(source, select.POLLIN)
    ready = dict(waiting.poll())
    shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
    if listener.fileno() not in ready:
        sys.exit()
    process, _ = listener.accept()
    listener.close()
    _, streams, _, _ = socket.recv_fds(process, 1, len(_STREAMS))
    with process.makefile("rb") as sent:
        start = json.loads(sent.read())
    environment = start["environment"]
    differs = any(environment.get(name) != os.environ.get(name) for name in _READ_ONCE)
    if differs or start["python"] != _python():
        sys.exit()
    for received, own in zip(streams, _STREAMS, strict=True):
        os.dup2(received, own)
        os.close(received)
    sys.argv, sys.path[:] = start["arguments"], start["search_path"]
    os.environ.clear()
    os.environ.update(environment)
    process.sendall(_ACCEPTED)
    return process
