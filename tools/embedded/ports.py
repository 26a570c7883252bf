"""Free loopback ports."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port on which nothing listens, below the range that the system gives to clients."""
    for _ in range(200):
        port = random.randrange(20000, 31000)  # noqa: S311 - not for secrets
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free loopback port between 20000 and 31000")
