"""The role of a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cdc_replay.postgres.connection import Connection

_SUPERUSER: Final = "select rolname::text from pg_catalog.pg_roles where rolname = current_user and rolsuper"


def superuser(connection: Connection) -> str | None:
    """The session's role, if it is a superuser."""
    row = connection.execute(_SUPERUSER).fetchone()
    return None if row is None else str(row[0])


def superuser_warnings(connection: Connection, endpoint: str) -> Iterator[str]:
    """A warning if the session's role at `endpoint`, such as `publisher shop`, is a superuser."""
    if (role := superuser(connection)) is not None:
        yield (
            f'{endpoint}: role "{role}" is a superuser, which it need not be: use a role that may only log'
            " in, and let an administrator run what `cdc-replay setup --dry-run` prints for it"
        )
