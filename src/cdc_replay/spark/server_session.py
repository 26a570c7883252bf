"""The session of a Spark Connect server that this process uses, if it uses one (`connect.connected_to`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerSession:
    """A session, and the number of tasks that its server runs at once."""

    session: Any
    """A `pyspark.sql.connect.session.SparkSession`: what we use of it, it has in common with a local one."""
    cores: int


_current: ServerSession | None = None
"""Of the process: all threads share it."""


def current_server_session() -> ServerSession | None:
    """The session in use, in any thread."""
    return _current


@contextlib.contextmanager
def in_use(session: ServerSession) -> Iterator[None]:
    """Use the session inside the context."""
    global _current  # noqa: PLW0603 - Spark's session belongs to the process
    _current = session
    try:
        yield
    finally:
        _current = None
