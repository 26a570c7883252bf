"""The state on the subscriber: stored values are read back, and one process works at a time."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import sql

from cdc_replay.errors import SubscriberNotReady, SubscriptionInUse
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready, TableState
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber import (
    recorded_results,
    state_schema,
    subscription_lock,
    subscription_records,
    subscription_tables,
)
from fixtures.native import wait_for
from fixtures.postgres import ANY_DATABASE, Database

WEIRD = QualifiedName('We"ird', "or; der's")


def opened(database: Database, *tables: QualifiedName) -> Connection:
    """A connection to the database, after creating the tables."""
    connection = connect(database.dsn, purpose="state test")
    for table in tables:
        connection.execute(sql.SQL("create schema if not exists {}").format(sql.Identifier(table.schema)))
        connection.execute(sql.SQL("create table {} ()").format(sql.Identifier(table.schema, table.name)))
    return connection


def oid(connection: Connection, table: str) -> int:
    [(oid,)] = connection.execute("select %s::regclass::oid::bigint", (table,)).fetchall()
    return int(oid)


@pytest.mark.parametrize(
    "stored",
    [Pending(), Copying(Lsn(5)), Ready(Lsn(0xFFFFFFFFFFFFFFFF)), Parked(Lsn(7), "no such table", Lsn(9))],
)
def test_table_states_are_read_as_they_were_stored(subscriber: Database, stored: TableState) -> None:
    with opened(subscriber, WEIRD) as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(connection, "nsw", "1", ["p"], ANY_DATABASE)
        subscription_tables.set_table_state(connection, "nsw", WEIRD, Parked(Lsn(1), "before", Lsn(2)))
        subscription_tables.set_table_state(connection, "nsw", WEIRD, stored)
        assert subscription_tables.table_states(connection, "nsw") == {WEIRD: stored}
        assert subscription_tables.table_states(connection, "other") == {}
        [table] = subscription_tables.known_tables(connection, "nsw")
        subscription_tables.remove_table(connection, "nsw", table.relation)
        assert subscription_tables.table_states(connection, "nsw") == {}


def test_reads_before_installation_return_nothing(subscriber: Database) -> None:
    with opened(subscriber) as connection:
        assert subscription_tables.table_states(connection, "nsw") == {}
        assert subscription_records.subscription_record(connection, "nsw") is None
        assert recorded_results.last_result(connection, "nsw", "replay") is None
        subscription_records.remove_subscription(connection, "nsw")


def test_all_tables_advance_together(subscriber: Database) -> None:
    names = [QualifiedName("public", f"t{number}") for number in range(3)]
    with opened(subscriber, *names) as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(connection, "nsw", "1", ["p"], ANY_DATABASE)
        for name in names:
            subscription_tables.set_table_state(connection, "nsw", name, Ready(Lsn(1)))
        relations = [table.relation for table in subscription_tables.known_tables(connection, "nsw")]
        subscription_tables.advance_tables(connection, "nsw", relations, Lsn(9))
        assert subscription_tables.table_states(connection, "nsw") == dict.fromkeys(names, Ready(Lsn(9)))
        subscription_tables.advance_tables(connection, "nsw", [], Lsn(10))


def test_a_renamed_table_keeps_its_state(subscriber: Database) -> None:
    first, second = QualifiedName("public", "one"), QualifiedName("public", "other")
    with opened(subscriber, first, second) as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(connection, "nsw", "1", ["p"], ANY_DATABASE)
        subscription_tables.set_table_state(connection, "nsw", first, Ready(Lsn(1)))
        subscription_tables.set_table_state(connection, "nsw", second, Ready(Lsn(2)))
        subscriber.run("alter table one rename to aside; alter table other rename to one")
        subscriber.run("alter table aside rename to other")
        assert subscription_tables.table_states(connection, "nsw") == {
            second: Ready(Lsn(1)),
            first: Ready(Lsn(2)),
        }
        recorded_names = {
            table.name: table.recorded_name for table in subscription_tables.known_tables(connection, "nsw")
        }
        assert recorded_names == {second: first, first: second}
        subscription_tables.record_names(connection, "nsw", [oid(connection, "public.one")])
        recorded_names = {
            table.name: table.recorded_name for table in subscription_tables.known_tables(connection, "nsw")
        }
        assert recorded_names == {second: first, first: first}
        subscriber.run("create schema s; alter table other set schema s; alter schema s rename to s2")
        moved = QualifiedName("s2", "other")
        assert subscription_tables.table_states(connection, "nsw") == {
            first: Ready(Lsn(2)),
            moved: Ready(Lsn(1)),
        }


def test_a_dropped_table_and_one_of_its_name_have_no_state(subscriber: Database) -> None:
    with opened(subscriber, WEIRD) as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(connection, "nsw", "1", ["p"], ANY_DATABASE)
        subscription_tables.set_table_state(connection, "nsw", WEIRD, Ready(Lsn(1)))
        table = sql.Identifier(WEIRD.schema, WEIRD.name)
        connection.execute(sql.SQL("drop table {}").format(table))
        subscription_tables.set_table_state(connection, "nsw", WEIRD, Ready(Lsn(2)))
        connection.execute(sql.SQL("create table {} ()").format(table))
        assert subscription_tables.table_states(connection, "nsw") == {}
        [dropped_table] = subscription_tables.known_tables(connection, "nsw")
        assert (dropped_table.name, dropped_table.recorded_name, dropped_table.state) == (
            None,
            WEIRD,
            Ready(Lsn(1)),
        )


def test_a_subscription_stays_bound_to_its_publisher(subscriber: Database) -> None:
    with opened(subscriber) as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(connection, "nsw", "7", ["p1"], ANY_DATABASE)
        subscription_records.bind_subscription(connection, "nsw", "7", ["p2", "p1"], ANY_DATABASE)
        record = subscription_records.subscription_record(connection, "nsw")
        assert record is not None
        assert record.publications == ("p2", "p1")
        with pytest.raises(SubscriberNotReady, match="belongs to another publisher"):
            subscription_records.bind_subscription(connection, "nsw", "8", ["p1"], ANY_DATABASE)


def test_parking_keeps_position_and_reason(subscriber: Database) -> None:
    with opened(subscriber) as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(connection, "nsw", "7", ["p1"], ANY_DATABASE)
        subscription_records.park(connection, "nsw", Lsn.parse("A/B"), "duplicate key", Lsn.parse("A/C"))
        record = subscription_records.subscription_record(connection, "nsw")
        assert record is not None
        assert (record.parked_at, record.parked_reason) == (Lsn.parse("A/B"), "duplicate key")
        assert record.parked_transaction == Lsn.parse("A/C")
        subscription_records.unpark(connection, "nsw")
        record = subscription_records.subscription_record(connection, "nsw")
        assert record is not None
        assert record.parked_at is None


def test_the_last_result_is_the_newest_and_old_ones_are_deleted(subscriber: Database) -> None:
    with opened(subscriber) as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(connection, "nsw", "7", ["p1"], ANY_DATABASE)
        recorded_results.record_result(connection, "nsw", "validate", {"ok": True})
        for index in range(recorded_results.RESULTS_KEPT + 5):
            recorded_results.record_result(
                connection, "nsw", "replay", {"number": index, "conflicts": {"a": 1}}
            )
        last = recorded_results.last_result(connection, "nsw", "replay")
        assert last is not None
        assert last.result == {"number": recorded_results.RESULTS_KEPT + 4, "conflicts": {"a": 1}}
        counts = connection.execute("select command, count(*) from cdc_replay.result group by 1 order by 1")
        assert counts.fetchall() == [("replay", recorded_results.RESULTS_KEPT), ("validate", 1)]


def test_a_second_process_is_refused_with_the_name_of_the_lock_holder(subscriber: Database) -> None:
    with opened(subscriber) as first, opened(subscriber) as second:
        with subscription_lock.lock(first, "nsw"):
            with subscription_lock.lock(second, "other"):
                pass
            with (
                pytest.raises(SubscriptionInUse, match=r"cdc_replay state test"),
                subscription_lock.lock(second, "nsw"),
            ):
                pass
        with subscription_lock.lock(second, "nsw"):
            pass


def test_the_lock_brings_its_keys_to_the_state_of_an_earlier_release(subscriber: Database) -> None:
    with opened(subscriber) as first, opened(subscriber) as second:
        state_schema.install(first)
        first.execute("drop table cdc_replay.lock_key")
        assert subscription_lock.lock_holder(second, "nsw") is None
        with subscription_lock.lock(first, "nsw"):
            assert "cdc_replay state test" in str(subscription_lock.lock_holder(second, "nsw"))
            assert state_schema.is_complete(second)


def test_a_held_lock_keeps_no_transaction_and_no_xid(subscriber: Database) -> None:
    xid = "select pg_current_xact_id_if_assigned(), pg_snapshot_xmax(pg_current_snapshot())::text"
    with opened(subscriber) as first, opened(subscriber) as second:
        state_schema.install(first)
        with subscription_lock.lock(first, "nsw"):
            before = second.execute(xid).fetchall()
        for _ in range(3):
            with subscription_lock.lock(first, "nsw"):
                assert first.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
                assert second.execute(xid).fetchall() == before


def test_a_lock_that_was_held_does_not_keep_its_connection(subscriber: Database) -> None:
    """A process that syncs for days opens one in each window."""
    connection = opened(subscriber)
    state_schema.install(connection)
    with (
        subscription_lock.lock(connection, "nsw"),
        subscription_lock.lock(connection, "other"),
        subscription_lock.release(connection, "nsw"),
    ):
        pass
    connection.close()

    kept = weakref.ref(connection)
    del connection
    gc.collect()

    assert kept() is None


def test_the_lock_is_released_after_an_error_inside_a_transaction(subscriber: Database) -> None:
    with opened(subscriber) as first, opened(subscriber) as second:
        with (
            pytest.raises(psycopg.errors.DivisionByZero),
            subscription_lock.lock(first, "nsw"),
            first.transaction(),
        ):
            first.execute("select 1 / 0")
        with subscription_lock.lock(second, "nsw"):
            pass


def test_concurrent_installation_succeeds(subscriber: Database) -> None:
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def install() -> None:
        try:
            with opened(subscriber) as connection:
                barrier.wait(timeout=300)
                state_schema.install(connection)
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    threads = [threading.Thread(target=install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_schema_is_dropped_with_the_last_subscription(subscriber: Database) -> None:
    with opened(subscriber, WEIRD) as connection:
        state_schema.install(connection)
        for name in ("a", "b"):
            subscription_records.bind_subscription(connection, name, "7", ["p1"], ANY_DATABASE)
            subscription_tables.set_table_state(connection, name, WEIRD, Pending())
            recorded_results.record_result(connection, name, "replay", {})
        subscription_records.remove_subscription(connection, "a")
        assert subscription_tables.table_states(connection, "a") == {}
        assert subscription_tables.table_states(connection, "b") == {WEIRD: Pending()}
        subscription_records.remove_subscription(connection, "b")
        assert not state_schema.is_installed(connection)


def waits_for(database: Database, lock: str) -> bool:
    return bool(database.rows(f"select from pg_locks where not granted and locktype = '{lock}'"))


def test_who_finds_the_schema_dropped_meanwhile_installs_it_or_has_nothing_to_remove(
    subscriber: Database,
) -> None:
    """The server then misses the schema, not the table."""
    with opened(subscriber) as first, opened(subscriber) as second, ThreadPoolExecutor(1) as pool:
        for act in (
            lambda: state_schema.install(second),
            lambda: subscription_records.remove_subscription(second, "a"),
        ):
            state_schema.install(first)
            first.execute("drop table cdc_replay.lock_key")  # as in the state of an earlier release
            with first.transaction():
                first.execute("lock table cdc_replay.subscription")
                waiting = pool.submit(act)
                wait_for(lambda: waits_for(subscriber, "relation"), "the lock of the state", 60)
                state_schema.drop(first)
            waiting.result()
        assert not state_schema.is_installed(second)


def test_who_waits_for_the_lock_of_a_subscription_is_told_that_it_was_removed(subscriber: Database) -> None:
    def lock(connection: Connection) -> None:
        with subscription_lock.lock(connection, "a", patience_seconds=60):
            pytest.fail("there is no lock any more")

    with opened(subscriber) as first, opened(subscriber) as second, ThreadPoolExecutor(1) as pool:
        state_schema.install(first)
        with subscription_lock.lock(first, "a"):
            waiting = pool.submit(lock, second)
            wait_for(lambda: waits_for(subscriber, "advisory"), "the lock of the subscription", 60)
            subscription_records.remove_subscription(first, "a")
        with pytest.raises(SubscriptionInUse, match="has removed the state"):
            waiting.result()
