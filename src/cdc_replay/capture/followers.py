"""Sessions that capture a publisher's changes as they are committed, and how others see that there is one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.postgres.connection import Connection, connect

_HAS_FOLLOWER: Final = """
    select exists (
        select from pg_catalog.pg_stat_activity
        where application_name = %s and usename = current_user and datname = current_database()
            and state_change > pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => %s)
    )
"""
_LONGEST_NAME: Final = 63

SILENT_SECONDS: Final = 10.0
"""Who follows asks for the publisher's position at least five times a second. Who has not asked for so long
applies a large window, or its host is lost: others should capture."""


def connect_follower(source: CaptureSource) -> AbstractContextManager[Connection]:
    """A session on the publisher which shows that its commits are being followed."""
    return connect(source.dsn, purpose=_purpose(source))


def has_follower(connection: Connection, source: CaptureSource) -> bool:
    """Whether there is such a session of the same role, and it is in use."""
    name = f"cdc_replay {_purpose(source)}"[:_LONGEST_NAME]
    [(is_followed,)] = connection.execute(_HAS_FOLLOWER, (name, SILENT_SECONDS)).fetchall()
    return bool(is_followed)


def _purpose(source: CaptureSource) -> str:
    """What `connect` puts into the name of the session."""
    return f"follow {source.slot}"
