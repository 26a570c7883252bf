"""Who holds an advisory lock: any role may take one, so the role is named too."""

from __future__ import annotations

from typing import Final

from cdc_replay.postgres.connection import Connection

_HOLDER: Final = """
    select activity.pid, activity.application_name, activity.usename
    from pg_catalog.pg_locks
    join pg_catalog.pg_stat_activity as activity using (pid)
    where locktype = 'advisory' and granted and objsubid = %(keys)s
        and pg_locks.database = (
            select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())
        and classid::bigint = %(first)s::bigint & 4294967295
        and objid::bigint = %(second)s::bigint & 4294967295
"""


def holder_of_key(connection: Connection, key: int) -> str | None:
    """A sentence that names the session which holds the lock of a key of 64 bits; None if it is free."""
    return _holder(connection, key >> 32, key, 1)


def holder_of_keys(connection: Connection, first: int, second: int) -> str | None:
    """The same for a lock of two keys of 32 bits."""
    return _holder(connection, first, second, 2)


def _holder(connection: Connection, first: int, second: int, keys: int) -> str | None:
    row = connection.execute(_HOLDER, {"first": first, "second": second, "keys": keys}).fetchone()
    if row is None:
        return None
    return f'It is server process {row[0]} ("{row[1] or "unknown"}") of role "{row[2]}".'
