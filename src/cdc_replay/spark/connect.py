"""Opens a session of a running Spark Connect server, in place of a JVM of our own.

The server keeps its executors, classes and Python workers between sessions, so a job begins at once. What it
must provide is the package, at this version, in the Python of its workers; the change log under the same URI;
and the network to publisher and subscribers. It executes code of whoever may connect, and is sent the
connection strings of the servers: docs/security.md says how to protect it.

| who ends           | what becomes of the other side                                                       |
|--------------------|--------------------------------------------------------------------------------------|
| the server         | the next call raises `SparkServerUnavailable`, after about 15 s                      |
| this process, told | its jobs are interrupted, and the session is released                                |
| this process, not  | the server interrupts its jobs when nobody has asked for their results for a while   |
|                    | (`connect_server.SETTINGS`); what they have staged counts for nobody                 |

Importing this takes half a second, which a session with a JVM does not need: `server_session` has the session
for everybody else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from pyspark.sql.connect import functions as F
from pyspark.sql.connect.client.retries import DefaultPolicy
from pyspark.sql.connect.session import SparkSession as RemoteSession

from cdc_replay.spark import server_session
from cdc_replay.spark.errors import translated_spark_errors
from cdc_replay.spark.server_session import ServerSession
from cdc_replay.termination import cancel_on_termination

DEFAULT_PORT: Final = 15002

RETRIES: Final = DefaultPolicy(max_retries=8, initial_backoff=50, backoff_multiplier=3.0, max_backoff=3000)
"""0.05, 0.15, 0.45 and 1.35 s, then 3 s each time. The client's own policy asks for ten minutes, although a
server that was started again has forgotten the session."""

RELEASE_SECONDS: Final = 2

SIGN_OF_LIFE_SECONDS: Final = 60.0
"""A server ends a session of which it hears nothing for a while, as when a command waits for a database."""

_CONNECT_MODE: Final = "SPARK_CONNECT_MODE_ENABLED"
"""While it is set, functions of `pyspark.sql` build expressions for a server."""


@contextlib.contextmanager
def connected_to(url: str, name: str, settings: Mapping[str, str]) -> Iterator[None]:
    """Inside the context, this process's Spark is a session of the server at `url`.

    Args:
        url: `sc://host:port/;token=…`, with what pyspark's client accepts. A secret if it has a token.
        name: of the application, as the server shows it.
        settings: of the session. Those of a server are left out (`is_of_session`).

    Raises:
        SparkServerUnavailable: if the server does not answer.
        SparkServerRefused: if it does not accept the token.
    """
    before = os.environ.get(_CONNECT_MODE)
    os.environ[_CONNECT_MODE] = "1"
    session: Any = None
    try:
        with translated_spark_errors(f"connecting to {server_name(url)}"):
            session = RemoteSession(url)
            session.client.set_retry_policies([RETRIES])
            session.conf.set("spark.app.name", name)
            for key, value in settings.items():
                if is_of_session(key):
                    session.conf.set(key, value)
            cores = _count_cores(session)
        cancel_on_termination(lambda: _interrupt(session))
        with server_session.in_use(ServerSession(session, cores)), _kept(session):
            yield
    finally:
        if session is not None:
            _release(session)
        if before is None:
            del os.environ[_CONNECT_MODE]


def server_name(url: str) -> str:
    """Host and port of a URL, which may be shown."""
    parts = urlsplit(url)
    return f"{parts.hostname or ''}:{parts.port or DEFAULT_PORT}"


def is_of_session(setting: str) -> bool:
    """Whether a session can have the setting; others are the server's."""
    return setting.startswith("spark.sql.")


def _count_cores(session: RemoteSession) -> int:
    """The server's default parallelism: as it says, or as the partitions of a range show."""
    configured = session.conf.get("spark.default.parallelism", "") or ""
    if configured.isdigit():
        return int(configured)
    [(last,)] = session.range(0, 1 << 16).agg(F.max(F.spark_partition_id())).collect()
    return int(last) + 1


@contextlib.contextmanager
def _kept(session: RemoteSession) -> Iterator[None]:
    """Inside the context, the server hears of the session every now and then."""
    is_over = threading.Event()

    def give_signs() -> None:
        while not is_over.wait(SIGN_OF_LIFE_SECONDS):
            with contextlib.suppress(Exception):
                session.conf.get("spark.app.name")

    threading.Thread(target=give_signs, name="signs of life", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _interrupt(session: RemoteSession) -> None:
    with contextlib.suppress(Exception):
        session.interruptAll()


def _release(session: RemoteSession) -> None:
    """End the session on the server, and with it its jobs; do not wait for a server that does not answer."""
    thread = threading.Thread(target=_stop, args=(session,), name="release", daemon=True)
    thread.start()
    thread.join(RELEASE_SECONDS)


def _stop(session: RemoteSession) -> None:
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session.stop()
