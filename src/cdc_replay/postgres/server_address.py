"""Where a DSN leads, without its account and secrets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

LOCAL_HOST: Final = "localhost"
"""Stands for the directory of a Unix socket, which means a server of this machine."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A database of a server; of several hosts, the first one."""

    host: str
    port: str
    database: str


def server_address(dsn: str) -> ServerAddress:
    """The address of a libpq DSN or URI; libpq's environment and defaults say what it does not."""
    given = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value}
    defaults = {
        option.keyword.decode(): option.val.decode()
        for option in pq.Conninfo.get_defaults()
        if option.val is not None
    }
    parts = defaults | given
    host = _first(given.get("host") or given.get("hostaddr") or parts.get("host", ""))
    is_socket = not host or host.startswith(("/", "@"))
    return ServerAddress(
        host=LOCAL_HOST if is_socket else host,
        port=_first(parts.get("port", "")) or "5432",
        database=parts.get("dbname") or parts.get("user", ""),
    )


def _first(listed: str) -> str:
    return listed.split(",", maxsplit=1)[0].strip()
