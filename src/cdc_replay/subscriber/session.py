"""Sessions that write to the subscriber's tables as a native apply worker does (R8.13)."""

from __future__ import annotations

import math

from psycopg import errors as pg

from cdc_replay.errors import MissingPrivilege
from cdc_replay.postgres.connection import Connection, connect


def connect_as_worker(dsn: str, *, purpose: str) -> Connection:
    """A connection with `session_replication_role = replica`; the caller closes it.

    Raises:
        MissingPrivilege: if the role may not set that.
        ServerUnavailable: if the server does not answer.
    """
    connection = connect(dsn, purpose=purpose)
    try:
        connection.execute("set session_replication_role = replica")
    except BaseException as error:
        connection.close()
        if not isinstance(error, pg.InsufficientPrivilege):
            raise
        raise MissingPrivilege(
            "the subscriber's role may not apply changes as a replication worker does",
            detail=error.diag.message_primary,
            hint="Run as a superuser: grant set on parameter session_replication_role to the role.",
            rule="R8.13",
        ) from error
    return connection


def set_lock_timeout(connection: Connection, seconds: float) -> None:
    """How long the session waits for one lock from now on; 0: for ever."""
    milliseconds = math.ceil(seconds * 1000)
    connection.execute("select set_config('lock_timeout', %s, false)", (f"{milliseconds}ms",))
