"""Roles that may only log in take the advisory locks of captures and subscriptions, and stop nobody.

Any role can take any advisory lock, and `pg_locks` shows everybody the keys of those that are held.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import psycopg
import pytest

from cdc_replay.capture.slot_lock import only_reader
from cdc_replay.errors import SlotActive, SubscriptionInUse
from cdc_replay.postgres.advisory_locks import advisory_key
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber import session, state_schema, subscription_lock
from fixtures.native import wait_for
from fixtures.postgres import Database
from fixtures.twin import Twin
from security.stranger import Stranger

pytestmark = pytest.mark.spark

TABLE: Final = "create table t (id int primary key)"

SEEN: Final = """
    select classid::bigint, objid::bigint, objsubid from pg_locks
    where locktype = 'advisory' and granted
        and database = (select oid from pg_database where datname = current_database())
"""


WAITING: Final = """
    select from pg_locks where locktype = 'advisory' and not granted
        and database = (select oid from pg_database where datname = current_database())
"""


@pytest.fixture
def mallory(subscriber: Database) -> Iterator[Stranger]:
    made = Stranger(subscriber, f"mallory_of_{subscriber.name}")
    made.enter()
    yield made
    made.leave()


def call(function: str, key: tuple[int, int, int]) -> str:
    """The call for a lock that `pg_locks` shows."""
    first, second, kind = key
    if kind == 1:
        return f"{function}({signed(first << 32 | second, 64)})"
    return f"{function}({signed(first, 32)}, {signed(second, 32)})"


def signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >> (bits - 1) else number


def held(connection: Connection) -> tuple[int, int, int]:
    """The key of the only lock of the database."""
    [key] = connection.execute(SEEN).fetchall()
    return key


@contextlib.contextmanager
def held_by(stranger: Stranger, key: tuple[int, int, int], how: str) -> Iterator[None]:
    """The stranger has the key until the end."""
    with connect(stranger.dsn, purpose="innocent") as connection:
        if how == "prepared":
            connection.execute("begin")
            connection.execute(f"select {call('pg_advisory_xact_lock', key)}".encode())
            connection.execute(f"prepare transaction '{stranger.name}'".encode())
        else:
            shared = "_shared" if how == "shared" else ""
            connection.execute(f"select {call(f'pg_advisory_lock{shared}', key)}".encode())
        yield
        if how == "prepared":
            connection.execute(f"rollback prepared '{stranger.name}'".encode())


WAYS: Final = ("exclusive", "shared", "prepared")


@pytest.mark.parametrize("how", WAYS)
def test_a_stranger_with_the_key_of_a_subscription_stops_nobody(
    subscriber: Database, mallory: Stranger, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with subscriber.connect() as ours, subscriber.connect() as others:
        state_schema.install(ours)
        with subscription_lock.lock(ours, "s"):
            key = held(ours)
        with held_by(mallory, key, how), caplog.at_level(logging.WARNING):
            with subscription_lock.lock(ours, "s"):
                assert_busy(others)
            assert ("prepared" if how == "prepared" else f'of role "{mallory.name}"') in caplog.text
            caplog.clear()
            with subscription_lock.lock(others, "s"):
                assert_busy(ours)
            assert caplog.text == ""


def assert_busy(connection: Connection) -> None:
    with pytest.raises(SubscriptionInUse, match="server process"), subscription_lock.lock(connection, "s"):
        pass


@contextlib.contextmanager
def in_line(stranger: Stranger, key: tuple[int, int, int]) -> Iterator[Callable[[], bool]]:
    """The stranger waits for the key, and then keeps it; yields whether it still waits."""

    def is_waiting() -> bool:
        waiting = "select from pg_locks where locktype = 'advisory' and not granted and pid = {}"
        return bool(stranger.database.rows(waiting.format(theirs.info.backend_pid)))

    def take() -> None:
        with contextlib.suppress(psycopg.OperationalError):
            theirs.execute(f"select {call('pg_advisory_lock', key)}".encode())

    with ThreadPoolExecutor(1) as executor, connect(stranger.dsn, purpose="innocent") as theirs:
        executor.submit(take)
        wait_for(is_waiting, "the stranger")
        try:
            yield is_waiting
        finally:
            stranger.database.run(f"select pg_terminate_backend({theirs.info.backend_pid}, 10000)")


def test_a_stranger_who_waits_for_the_key_gets_nothing(subscriber: Database, mallory: Stranger) -> None:
    """Also not between the release and the next lock of one process."""
    with subscriber.connect() as ours, subscriber.connect() as others:
        state_schema.install(ours)
        with contextlib.ExitStack() as stack:
            with subscription_lock.lock(ours, "s"):
                is_waiting = stack.enter_context(in_line(mallory, held(ours)))
                with subscription_lock.release(ours, "s"):
                    wait_for(lambda: not is_waiting(), "the stranger's lock")
                assert_busy(others)
            with subscription_lock.lock(others, "s", patience_seconds=5):
                assert_busy(ours)


def test_one_of_ours_that_waits_passes_a_stranger_in_the_line(
    subscriber: Database, mallory: Stranger
) -> None:
    with subscriber.connect() as ours, subscriber.connect() as others, contextlib.ExitStack() as stack:
        state_schema.install(ours)
        with ThreadPoolExecutor(1) as executor:
            with subscription_lock.lock(ours, "s"):
                stack.enter_context(in_line(mallory, held(ours)))
                waiting = subscription_lock.lock(others, "s", patience_seconds=20)
                got = executor.submit(stack.enter_context, waiting)
                wait_for(lambda: len(subscriber.rows(WAITING)) == 2, "both")
            got.result(timeout=300)
        assert_busy(ours)


def test_a_member_of_our_role_without_its_rights_is_no_stranger(
    subscriber: Database, mallory: Stranger
) -> None:
    """It may have got them by SET ROLE."""
    with subscriber.connect() as ours:
        state_schema.install(ours)
        subscriber.run(
            f"alter role {mallory.name} noinherit; grant update on cdc_replay.lock_key to postgres;"
            f"grant postgres to {mallory.name}"
        )
        with subscription_lock.lock(ours, "s"):
            key = held(ours)
        with held_by(mallory, key, "exclusive"):
            assert_busy(ours)


def test_a_stranger_with_the_key_of_a_slot_stops_nobody(
    twin: Twin, stranger: Stranger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "PATIENCE_SECONDS", 2)
    twin.publisher.run(f"{TABLE}; create publication p for table t")
    twin.subscribe("s", "p", tables=TABLE, native=False)
    with twin.publisher.connect() as ours, only_reader(ours, twin.slot):
        key = held(ours)
    twin.publisher.run("insert into t values (1)")

    with held_by(stranger, key, "exclusive"):
        twin.sync_ours()
        assert f'of role "{stranger.name}"' in caplog.text
        with (
            twin.publisher.connect() as ours,
            twin.publisher.connect() as others,
            only_reader(ours, twin.slot),
            pytest.raises(SlotActive, match="server process"),
            only_reader(others, twin.slot),
        ):
            pass

    assert twin.pairs["s"].ours.rows("select id from t") == [(1,)]


def test_a_stranger_can_neither_see_nor_lock_nor_change_the_keys(twin: Twin, stranger: Stranger) -> None:
    twin.publisher.run(f"{TABLE}; create publication p for table t")
    twin.subscribe("s", "p", tables=TABLE, native=False)
    for statement in (
        "select * from cdc_replay_capture.lock_key",
        "begin; lock table cdc_replay_capture.lock_key in access share mode",
        "update cdc_replay_capture.lock_key set key = 1",
    ):
        with pytest.raises(Exception, match="permission denied"):
            stranger.run(statement)


FORMER: Final[dict[str, Callable[[str], str]]] = {
    "install": lambda _: f"pg_advisory_lock({advisory_key('install', '')})",
    "subscription": lambda _: f"pg_advisory_lock({advisory_key('subscription', 's')})",
    "slot": lambda slot: f"pg_advisory_lock(1667527269, hashtext('{slot}'))",
}


@pytest.mark.parametrize("call_of", FORMER.values(), ids=FORMER)
def test_keys_that_anybody_can_compute_lock_nothing(
    twin: Twin, stranger: Stranger, call_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first snapshot, at the publisher and at the subscriber."""
    monkeypatch.setattr(session, "PATIENCE_SECONDS", 2)
    twin.publisher.run(f"{TABLE}; create publication p for table t; insert into t values (1)")
    twin.subscribe("s", "p", tables=TABLE, native=False)
    ours = twin.pairs["s"].ours
    at_subscriber = Stranger(ours, f"mallory_of_{ours.name}")
    at_subscriber.enter()
    try:
        with (
            connect(stranger.dsn, purpose="innocent") as there,
            connect(at_subscriber.dsn, purpose="innocent") as here,
        ):
            for theirs in (there, here):
                theirs.execute(f"select {call_of(twin.slot)}".encode())
            twin.sync_ours()
    finally:
        at_subscriber.leave()
    assert ours.rows("select id from t") == [(1,)]
