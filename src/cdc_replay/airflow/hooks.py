"""Hooks of the connection types of publishers and subscribers; Airflow's Test button asks the server.

Connections of type postgres work as well. These types have a form with libpq's options for TLS, which are
stored in the connection's extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from airflow.sdk import BaseHook

from cdc_replay.airflow.connections import dsn

if TYPE_CHECKING:
    from cdc_replay.postgres.connection import Connection


class ServerHook(BaseHook):
    """A PostgreSQL server, by the id of its Airflow connection."""

    conn_name_attr = "conn_id"
    default_conn_name: ClassVar[str]
    conn_type: ClassVar[str]
    hook_name: ClassVar[str]

    def __init__(self, conn_id: str | None = None) -> None:
        super().__init__()
        self.conn_id = conn_id or self.default_conn_name

    def get_conn(self) -> Connection:
        """A session with the settings of this package; the caller closes it."""
        from cdc_replay.postgres.connection import connect

        return connect(dsn(self.conn_id), purpose=f"hook {self.conn_id}")

    def test_connection(self) -> tuple[bool, str]:
        """Whether the server can take its part, and what it is or why not."""
        from cdc_replay.errors import CdcReplayError
        from cdc_replay.monitoring.describe_server import describe_server

        try:
            return True, describe_server(dsn(self.conn_id), is_publisher=self.conn_type == PUBLISHER)
        except CdcReplayError as error:
            return False, str(error)


PUBLISHER = "cdc_replay_publisher"


class PublisherHook(ServerHook):
    """A publisher."""

    default_conn_name = "cdc_replay_publisher"
    conn_type = PUBLISHER
    hook_name = "CDC replay: publisher"


class SubscriberHook(ServerHook):
    """A subscriber."""

    default_conn_name = "cdc_replay_subscriber"
    conn_type = "cdc_replay_subscriber"
    hook_name = "CDC replay: subscriber"
