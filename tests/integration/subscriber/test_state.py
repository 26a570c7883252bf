"""The state on the subscriber: what is stored is what is read, and one process works at a time."""

from __future__ import annotations

import threading

import psycopg
import pytest

from cdc_replay.errors import SubscriberNotReady, SubscriptionBusy
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready, TableState
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber import state
from fixtures.postgres import Database

WEIRD = QualifiedName('We"ird', "or; der's")


def opened(database: Database) -> Connection:
    return connect(database.dsn, purpose="state test")


@pytest.mark.parametrize(
    "stored", [Pending(), Copying(Lsn(5)), Ready(Lsn(0xFFFFFFFFFFFFFFFF)), Parked(Lsn(7), "no such table")]
)
def test_every_table_state_is_read_as_it_was_stored(subscriber: Database, stored: TableState) -> None:
    with opened(subscriber) as connection:
        state.install(connection)
        state.remember_subscription(connection, "nsw", "1", ["p"])
        state.set_table_state(connection, "nsw", WEIRD, Parked(Lsn(1), "before"))
        state.set_table_state(connection, "nsw", WEIRD, stored)
        assert state.table_states(connection, "nsw") == {WEIRD: stored}
        assert state.table_states(connection, "other") == {}
        state.forget_table(connection, "nsw", WEIRD)
        assert state.table_states(connection, "nsw") == {}


def test_nothing_is_known_before_installation(subscriber: Database) -> None:
    with opened(subscriber) as connection:
        assert state.table_states(connection, "nsw") == {}
        assert state.subscription_record(connection, "nsw") is None
        assert state.last_result(connection, "nsw", "replay") is None
        state.remove_subscription(connection, "nsw")


def test_all_tables_advance_together(subscriber: Database) -> None:
    names = [QualifiedName("public", f"t{number}") for number in range(3)]
    with opened(subscriber) as connection:
        state.install(connection)
        state.remember_subscription(connection, "nsw", "1", ["p"])
        state.set_table_state(connection, "nsw", names[0], Ready(Lsn(1)))
        state.advance_tables(connection, "nsw", names, Lsn(9))
        assert state.table_states(connection, "nsw") == dict.fromkeys(names, Ready(Lsn(9)))
        state.advance_tables(connection, "nsw", [], Lsn(10))


def test_a_subscription_stays_with_its_publisher(subscriber: Database) -> None:
    with opened(subscriber) as connection:
        state.install(connection)
        state.remember_subscription(connection, "nsw", "7", ["p1"])
        state.remember_subscription(connection, "nsw", "7", ["p2", "p1"])
        record = state.subscription_record(connection, "nsw")
        assert record is not None
        assert record.publications == ("p2", "p1")
        with pytest.raises(SubscriberNotReady, match="belongs to another publisher"):
            state.remember_subscription(connection, "nsw", "8", ["p1"])


def test_parking_keeps_position_and_reason(subscriber: Database) -> None:
    with opened(subscriber) as connection:
        state.install(connection)
        state.remember_subscription(connection, "nsw", "7", ["p1"])
        state.park(connection, "nsw", Lsn.parse("A/B"), "duplicate key")
        record = state.subscription_record(connection, "nsw")
        assert record is not None
        assert (record.parked_at, record.parked_reason) == (Lsn.parse("A/B"), "duplicate key")
        state.unpark(connection, "nsw")
        record = state.subscription_record(connection, "nsw")
        assert record is not None
        assert record.parked_at is None


def test_the_last_result_is_the_newest_and_history_is_bounded(subscriber: Database) -> None:
    with opened(subscriber) as connection:
        state.install(connection)
        state.remember_subscription(connection, "nsw", "7", ["p1"])
        state.record_result(connection, "nsw", "validate", {"ok": True})
        for number in range(state.RESULTS_KEPT + 5):
            state.record_result(connection, "nsw", "replay", {"number": number, "conflicts": {"a": 1}})
        last = state.last_result(connection, "nsw", "replay")
        assert last is not None
        assert last.result == {"number": state.RESULTS_KEPT + 4, "conflicts": {"a": 1}}
        kept = connection.execute("select command, count(*) from cdc_replay.result group by 1 order by 1")
        assert kept.fetchall() == [("replay", state.RESULTS_KEPT), ("validate", 1)]


def test_a_second_process_is_refused_and_told_who_holds_the_lock(subscriber: Database) -> None:
    with opened(subscriber) as first, opened(subscriber) as second:
        with state.lock(first, "nsw"):
            with state.lock(second, "other"):
                pass
            with pytest.raises(SubscriptionBusy, match=r"cdc_replay state test"), state.lock(second, "nsw"):
                pass
        with state.lock(second, "nsw"):
            pass


def test_the_lock_is_released_after_an_error_inside_a_transaction(subscriber: Database) -> None:
    with opened(subscriber) as first, opened(subscriber) as second:
        with pytest.raises(psycopg.errors.DivisionByZero), state.lock(first, "nsw"), first.transaction():
            first.execute("select 1 / 0")
        with state.lock(second, "nsw"):
            pass


def test_concurrent_installation_succeeds(subscriber: Database) -> None:
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def install() -> None:
        try:
            with opened(subscriber) as connection:
                barrier.wait(timeout=30)
                state.install(connection)
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    threads = [threading.Thread(target=install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_schema_goes_with_the_last_subscription(subscriber: Database) -> None:
    with opened(subscriber) as connection:
        state.install(connection)
        for name in ("a", "b"):
            state.remember_subscription(connection, name, "7", ["p1"])
            state.set_table_state(connection, name, WEIRD, Pending())
            state.record_result(connection, name, "replay", {})
        state.remove_subscription(connection, "a")
        assert state.table_states(connection, "a") == {}
        assert state.table_states(connection, "b") == {WEIRD: Pending()}
        state.remove_subscription(connection, "b")
        assert not state.is_installed(connection)
