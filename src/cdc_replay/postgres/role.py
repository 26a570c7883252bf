"""The role of a session."""

from __future__ import annotations

from typing import Final

from cdc_replay.postgres.connection import Connection

_SUPERUSER: Final = "select rolname::text from pg_catalog.pg_roles where rolname = current_user and rolsuper"


def superuser(connection: Connection) -> str | None:
    """The session's role, if it is a superuser."""
    row = connection.execute(_SUPERUSER).fetchone()
    return None if row is None else str(row[0])
