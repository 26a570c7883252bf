"""Sessions that write to the subscriber's tables as a native apply worker does (R8.13).

A value's text is unambiguous as long as it is stored in a column of the publisher's type. A `timestamp` that
is stored as `timestamptz` is interpreted in the session's time zone, and triggers and defaults may format
values or use the local time. So sessions that write use the formats of the database, the role or the server,
as native apply workers do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Final

from psycopg import errors as pg
from psycopg import sql

from cdc_replay.errors import MissingPrivilege
from cdc_replay.postgres.connection import PINNED_SETTINGS, Connection, connect, setting_statement

FORMATS: Final = (
    "datestyle",
    "intervalstyle",
    "timezone",
    "extra_float_digits",
    "bytea_output",
    "xmloption",
    "array_nulls",
)
"""Settings that determine the text of values, or what it means; other sessions pin them (R1.11)."""

_OWN_TIME_ZONE: Final = "select reset_val from pg_catalog.pg_settings where name = 'TimeZone'"


def connect_to_write(dsn: str, *, purpose: str) -> Connection:
    """A connection with the database's own formats; the caller closes it.

    Raises:
        MissingPrivilege, ServerUnavailable: as `connect`.
    """
    connection = connect(dsn, purpose=purpose)
    try:
        _reset_formats(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_as_apply_worker(dsn: str, *, purpose: str) -> Connection:
    """`connect_to_write` with `session_replication_role = replica`.

    Raises:
        MissingPrivilege: if the role may not set that.
        ServerUnavailable: if the server does not answer.
    """
    connection = connect_to_write(dsn, purpose=purpose)
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


def database_time_zone(connection: Connection) -> str:
    """The time zone of sessions that write, whatever this session's is now."""
    ((zone,),) = connection.execute(_OWN_TIME_ZONE)
    return str(zone)


@contextlib.contextmanager
def pinned_text_formats(connection: Connection) -> Iterator[None]:
    """Pin the text formats of values to those of reading sessions (R1.11).

    After an error the formats stay pinned: nothing more is written then.
    """
    connection.execute(setting_statement({name: PINNED_SETTINGS[name] for name in FORMATS}))
    yield
    _reset_formats(connection)


def _reset_formats(connection: Connection) -> None:
    resets = (sql.SQL("reset {}").format(sql.Identifier(name)) for name in FORMATS)
    connection.execute(sql.SQL("; ").join(resets))


def set_lock_timeout(connection: Connection, seconds: float) -> None:
    """Set how long the session waits for a lock; 0: no limit."""
    milliseconds = math.ceil(seconds * 1000)
    connection.execute("select set_config('lock_timeout', %s, false)", (f"{milliseconds}ms",))
