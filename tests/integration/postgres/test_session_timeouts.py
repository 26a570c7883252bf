"""Session timeouts are those of the configuration, whatever the role or the database sets."""

from __future__ import annotations

import datetime as dt

import pytest

from cdc_replay.postgres.connection import Connection, connect, connect_with_deadline
from cdc_replay.postgres.timeouts import SessionTimeouts
from fixtures.postgres import Database

CHOSEN = SessionTimeouts(
    connect=dt.timedelta(seconds=4),
    tcp_user=dt.timedelta(seconds=30),
    lock=dt.timedelta(seconds=5),
    statement=dt.timedelta(minutes=6),
)


@pytest.fixture
def database(publisher: Database) -> Database:
    """A database with its own timeouts."""
    for name in ("lock_timeout", "statement_timeout"):
        publisher.run(f"alter database {publisher.name} set {name} = '20s'")
    return publisher


def limits(connection: Connection) -> tuple[str, ...]:
    return tuple(
        str(row[0])
        for name in ("lock_timeout", "statement_timeout")
        for row in connection.execute(f"show {name}")
    )


def parameters(connection: Connection) -> tuple[str, ...]:
    given = connection.info.get_parameters()
    return given["connect_timeout"], given.get("tcp_user_timeout", "0")


def test_sessions_that_move_data_have_no_limit_by_default(database: Database) -> None:
    with connect(database.dsn, purpose="test") as connection:
        assert limits(connection) == ("0", "0")
        assert parameters(connection) == ("10", "0")


def test_the_configuration_sets_limits(database: Database) -> None:
    with connect(CHOSEN.add_to(database.dsn), purpose="test") as connection:
        assert limits(connection) == ("5s", "6min")
        assert parameters(connection) == ("4", "30000")


def test_a_walsender_has_no_limits(database: Database) -> None:
    """A new slot waits for all open transactions."""
    with connect(CHOSEN.add_to(database.dsn), purpose="test", replication=True) as connection:
        assert limits(connection) == ("0", "0")


def test_a_connection_with_deadline_has_short_timeouts(database: Database) -> None:
    with connect_with_deadline(CHOSEN.add_to(database.dsn), purpose="test", seconds=2.5) as connection:
        assert limits(connection) == ("2500ms", "2500ms")
        assert parameters(connection) == ("3", "2500")
