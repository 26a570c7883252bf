"""How long a session waits: defaults, and how those of the configuration reach every process that connects.

They travel in the DSN, which tasks of executors are given anyway; what a DSN says itself counts more. Without
psycopg at import: DAG files read the configuration.
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
    """Of the sessions that move data; 0: no limit.

    A statement that loads a table or builds an index may take days, and a row that a transaction of the
    subscriber's own has locked is waited for as a native worker does: so neither has a limit by default.

    `tcp_user` is the system's by default, some 15 minutes on Linux for what is not acknowledged. One of ours
    would also end a COPY that the server does not read on while it waits for a lock, and takes the place of
    the count of keep-alive packets, which end an idle line sooner.
    """

    connect: dt.timedelta = dt.timedelta(seconds=10)
    tcp_user: dt.timedelta = dt.timedelta()
    lock: dt.timedelta = dt.timedelta()
    statement: dt.timedelta = dt.timedelta()

    def connection_options(self) -> Mapping[str, int]:
        """As libpq takes them."""
        return {
            "connect_timeout": math.ceil(self.connect.total_seconds()),
            "tcp_user_timeout": _milliseconds(self.tcp_user),
        }

    def settings(self) -> Mapping[str, int]:
        """As the server takes them."""
        return {"lock_timeout": _milliseconds(self.lock), "statement_timeout": _milliseconds(self.statement)}

    def add_to(self, dsn: str) -> str:
        """The DSN with what differs from the defaults, unless it says that itself."""
        given = _parts(dsn)
        if given is None:
            return dsn  # `connect` says what is wrong with it
        added = {
            name: str(value)
            for name, value in self.connection_options().items()
            if name not in given and value != DEFAULT.connection_options()[name]
        }
        options = str(given.get("options") or "")
        chosen = {name: value for name, value in self.settings().items() if value and name not in options}
        if chosen:
            ours = (f"-c {name}={value}" for name, value in chosen.items())
            added["options"] = " ".join([*filter(None, [options]), *ours])
        return _with(dsn, given, added) if added else dsn


def _with(dsn: str, given: Mapping[str, str], added: Mapping[str, str]) -> str:
    """The DSN, in its own form, with these parts as well; of a name given twice libpq takes the last."""
    query = urlencode(added, quote_via=quote)
    pairs = " ".join(f"{name}='{_quoted(value)}'" for name, value in added.items())
    wanted = {**given, **added}
    return next(
        text for text in (f"{dsn}?{query}", f"{dsn}&{query}", f"{dsn} {pairs}") if _parts(text) == wanted
    )


def _quoted(value: str) -> str:
    return value.replace("\\", r"\\").replace("'", r"\'")


def _parts(dsn: str) -> dict[str, str] | None:
    """What libpq reads in it; None if it cannot."""
    import psycopg  # noqa: PLC0415

    try:
        return {name: str(value) for name, value in psycopg.conninfo.conninfo_to_dict(dsn).items()}
    except psycopg.ProgrammingError:
        return None


DEFAULT: Final = SessionTimeouts()


def _milliseconds(duration: dt.timedelta) -> int:
    return math.ceil(duration.total_seconds() * 1000)
