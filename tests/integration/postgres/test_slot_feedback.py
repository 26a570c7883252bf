"""Confirming positions to the slot: by a walsender if that saves reading much WAL."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import pytest
from psycopg import sql

from cdc_replay.capture.pull import current_position
from cdc_replay.errors import SlotActive, SlotLost, SlotMissing
from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.connection import connect
from cdc_replay.postgres.slot_feedback import MUCH_WAL_BYTES, send_slot_feedback
from fixtures.captured import Captured
from fixtures.postgres import Database

SetUp = Callable[..., Captured]

TABLE = "create table t (id int primary key); create publication p for table t;"
PUBLICATION = "cdc_replay_capture_i"
MEGABYTES = MUCH_WAL_BYTES >> 20


def write_much(publisher: Database) -> None:
    """More WAL than a connection is worth."""
    publisher.run(
        f"select pg_logical_emit_message(true, 'much', repeat('x', 1 << 20))"
        f" from generate_series(0, {MEGABYTES})"
    )


def is_by_the_function(caplog: pytest.LogCaptureFixture) -> bool:
    return any("advancing it by the function" in record.message for record in caplog.records)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "cdc_replay.postgres.slot_feedback")
    return caplog


@pytest.mark.parametrize("two_phase", [False, True])
def test_only_unconfirmed_transactions_are_sent_again(
    publisher: Database, set_up: SetUp, messages: pytest.LogCaptureFixture, two_phase: bool
) -> None:
    """R1.29: also one that was open, and one that was committed meanwhile."""
    publisher.run(TABLE)
    captured = set_up(two_phase=two_phase)
    with publisher.connect() as writer:
        writer.autocommit = False
        writer.execute("insert into t values (1)")
        write_much(publisher)
        publisher.run("insert into t values (2)")
        upto = current_position(publisher.dsn)
        publisher.run("insert into t values (3)")

        assert captured.capture(upto).to_lsn == upto
        assert captured.position == upto
        writer.commit()

    captured.capture()

    assert [values for kind, values in captured.changes() if kind == "I"] == [("2",), ("3",), ("1",)]
    assert captured.slot("two_phase") == str(two_phase).lower()
    assert not is_by_the_function(messages)


def test_a_position_within_much_wal_is_confirmed_exactly(publisher: Database, set_up: SetUp) -> None:
    """R1.29: nothing after it is lost, however much the server could have sent meanwhile."""
    publisher.run(TABLE)
    captured = set_up()
    write_much(publisher)
    upto = current_position(publisher.dsn)
    for number in range(20):
        publisher.run(f"insert into t select generate_series({number * 1000}, {number * 1000 + 999})")

    captured.capture(upto)
    captured.capture(upto)
    assert captured.position == upto
    captured.capture()

    assert sum(kind == "I" for kind, _ in captured.changes()) == 20_000


def test_the_slot_is_advanced_by_the_function_without_a_walsender(
    publisher: Database, subscriber: Database, set_up: SetUp, messages: pytest.LogCaptureFixture
) -> None:
    """A DSN of several hosts may lead to another server the second time."""
    publisher.run(TABLE)
    captured = set_up()
    write_much(publisher)
    upto = current_position(publisher.dsn)
    with publisher.connect() as connection:
        send_slot_feedback(connection, subscriber.dsn, captured.source.slot, upto, publication=PUBLICATION)
    assert captured.position == upto
    assert is_by_the_function(messages)


def test_a_slot_is_never_moved_back(publisher: Database, set_up: SetUp) -> None:
    """R1.29: another process has advanced it."""
    publisher.run(TABLE)
    captured = set_up()
    write_much(publisher)
    upto = current_position(publisher.dsn)
    publisher.run("insert into t values (1)")
    further = current_position(publisher.dsn)
    with publisher.connect() as connection:
        send_slot_feedback(connection, publisher.dsn, captured.source.slot, further, publication=PUBLICATION)
        with pytest.raises(SlotLost, match=captured.source.slot):
            send_slot_feedback(connection, publisher.dsn, captured.source.slot, upto, publication=PUBLICATION)
    assert captured.position == further


def test_errors_name_the_slot(publisher: Database, set_up: SetUp) -> None:
    publisher.run(TABLE)
    captured = set_up()
    write_much(publisher)
    slot, upto = captured.source.slot, current_position(publisher.dsn)
    with publisher.connect() as connection:
        with pytest.raises(SlotMissing, match="none_such"):
            send_slot_feedback(connection, publisher.dsn, "none_such", upto, publication=PUBLICATION)
        with contextlib.closing(connect(publisher.dsn, purpose="test", replication=True)) as walsender:
            start = sql.SQL(
                "START_REPLICATION SLOT {} LOGICAL 0/0 (proto_version '1', publication_names {})"
            ).format(sql.Identifier(slot), sql.Literal(PUBLICATION))
            walsender.pgconn.nonblocking = 0
            walsender.pgconn.exec_(start.as_bytes(walsender))
            with pytest.raises(SlotActive, match=slot):
                send_slot_feedback(connection, publisher.dsn, slot, upto, publication=PUBLICATION)
    assert captured.position < Lsn(upto.value - MUCH_WAL_BYTES)
