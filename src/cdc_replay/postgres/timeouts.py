"""Session timeouts: defaults, and how the configured ones reach every process that connects.

They are added to the DSN, which executor tasks get anyway; values that are in the DSN take precedence.
psycopg is not imported at module level, because DAG files read the configuration.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlencode


@dataclass(frozen=True, slots=True)
class SessionTimeouts:
    """Timeouts of sessions that move data; 0: no limit.

    A statement that loads a table or builds an index may take days, and replay waits for a row that a local
    transaction has locked, as a native worker does; so lock and statement have no limit by default.

    The default of `tcp_user` is the system's, about 15 minutes on Linux for unacknowledged data. A value of
    ours would also end a COPY that the server does not read while it waits for a lock, and would override the
    keepalive count, which ends an idle connection sooner.
    """

    connect: dt.timedelta = dt.timedelta(seconds=10)
    tcp_user: dt.timedelta = dt.timedelta()
    lock: dt.timedelta = dt.timedelta()
    statement: dt.timedelta = dt.timedelta()

    def connection_options(self) -> Mapping[str, int]:
        """The connection parameters for libpq."""
        return {
            "connect_timeout": math.ceil(self.connect.total_seconds()),
            "tcp_user_timeout": _milliseconds(self.tcp_user),
        }

    def settings(self) -> Mapping[str, int]:
        """The server settings."""
        return {"lock_timeout": _milliseconds(self.lock), "statement_timeout": _milliseconds(self.statement)}

    def add_to(self, dsn: str) -> str:
        """The DSN with the timeouts that differ from the defaults, unless it sets them itself."""
        parts = _parts(dsn)
        if parts is None:
            return dsn  # `connect` reports the error
        added = {
            name: str(value)
            for name, value in self.connection_options().items()
            if name not in parts and value != DEFAULT.connection_options()[name]
        }
        options = str(parts.get("options") or "")
        settings = [
            f"-c {name}={value}" for name, value in self.settings().items() if value and name not in options
        ]
        if settings:
            added["options"] = " ".join([*filter(None, [options]), *settings])
        return _add_parts(dsn, parts, added) if added else dsn


def _add_parts(dsn: str, parts: Mapping[str, str], added: Mapping[str, str]) -> str:
    """The DSN, in its own form, with these parts added; of a repeated name libpq uses the last value."""
    query = urlencode(added, quote_via=quote)
    pairs = " ".join(f"{name}='{_quoted(value)}'" for name, value in added.items())
    expected = {**parts, **added}
    candidates = (f"{dsn}?{query}", f"{dsn}&{query}", f"{dsn} {pairs}")
    return next(text for text in candidates if _parts(text) == expected)


def _quoted(value: str) -> str:
    return value.replace("\\", r"\\").replace("'", r"\'")


def _parts(dsn: str) -> dict[str, str] | None:
    """The parts that libpq parses; None if it cannot."""
    import psycopg  # noqa: PLC0415

    try:
        return {name: str(value) for name, value in psycopg.conninfo.conninfo_to_dict(dsn).items()}
    except psycopg.ProgrammingError:
        return None


DEFAULT: Final = SessionTimeouts()


def _milliseconds(duration: dt.timedelta) -> int:
    return math.ceil(duration.total_seconds() * 1000)
