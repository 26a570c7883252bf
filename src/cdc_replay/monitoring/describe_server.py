"""Whether a server can be a publisher or a subscriber at all: what a test of a connection asks."""

from __future__ import annotations

from typing import Final

from cdc_replay.errors import PublisherNotReady, SubscriberNotWritable
from cdc_replay.postgres.connection import connect_with_deadline, is_read_only

SECONDS: Final = 10.0

_SERVER: Final = """
    select pg_catalog.current_setting('server_version'), pg_catalog.current_setting('wal_level'),
        session_user::text, pg_catalog.current_database()::text
"""


def describe_server(dsn: str, *, is_publisher: bool) -> str:
    """The server's version, database and role.

    Raises:
        PublisherNotReady: if its WAL is not logical.
        SubscriberNotWritable: if it is read-only.
        CdcReplayError: if it does not answer.
    """
    with connect_with_deadline(dsn, purpose="test", seconds=SECONDS) as connection:
        ((version, wal_level, role, database),) = connection.execute(_SERVER).fetchall()
        if is_publisher and wal_level != "logical":
            raise PublisherNotReady(
                f'wal_level of the server is "{wal_level}"', hint="Set it to logical and restart the server."
            )
        if not is_publisher and is_read_only(connection):
            raise SubscriberNotWritable("the server is read-only", hint="Connect to the primary.")
    return f'PostgreSQL {version}, database "{database}", role "{role}"'
