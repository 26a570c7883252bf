"""R8.18, R8.19: copied rows carry an origin, as those of a native table synchronisation do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import replication_origin as origin
from fixtures.native import NativeSubscription
from fixtures.postgres import Database, our_origins
from integration.snapshot.copying import copy_tables, run_until_killed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TABLES = "create table small (id int primary key, a text); create table large (id int primary key, a text)"
ROWS = """
    insert into small values (1, 'x');
    insert into large select n, repeat('x', 500) from generate_series(1, 1000) n;
"""
CHUNK_BYTES = 128 * 1024
"""`small` is copied directly, `large` is staged."""
COUNTS = "select (select count(*) from small), (select count(*) from large)"


def test_cascaded_subscription_with_origin_none_gets_no_copied_rows(
    spark: SparkSession,
    publisher: Database,
    subscriber: Database,
    native: Database,
    onward: tuple[Database, Database],
) -> None:
    publisher.run(f"{TABLES}; {ROWS}; create publication p for table small, large")
    subscriptions = []
    for source, database in zip((subscriber, native), onward, strict=True):
        source.run(f"{TABLES}; create publication onward for table small, large")
        database.run(TABLES)
        subscriptions.append(NativeSubscription(source, database, f"none_{source.name}"))
        subscriptions[-1].create(["onward"], {"copy_data": False, "origin": "none"})

    copied = copy_tables(spark, publisher, subscriber, "p", chunk_bytes=CHUNK_BYTES)
    chunks = [table.chunks_read for table in copied]
    assert min(chunks) == 1
    assert max(chunks) > 1
    copy = NativeSubscription(publisher, native, f"copy_{native.name}")
    copy.create(["p"], {})
    copy.wait()
    for source in (subscriber, native):
        assert source.rows(COUNTS) == [(1, 1000)]
        source.run("insert into small values (9, 'here')")
    for subscription in subscriptions:
        subscription.wait()

    for database in onward:
        assert database.rows("select id from small") == [(9,)]
        assert database.rows("select count(*) from large") == [(0,)]
    assert our_origins(subscriber) == []


def test_leftovers_of_a_killed_reader_are_dropped_by_the_next_snapshot(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run(f"{TABLES}; {ROWS}; create publication p for table small, large")
    subscriber.run(TABLES)
    run_until_killed(publisher, subscriber, "snapshot.mid_copy", str(1 << 30), "first")
    with connect(subscriber.dsn, purpose="test") as connection:
        name = f"{origin.origin_name(connection, 's')}:1"
        connection.execute("select pg_replication_origin_create(%s)", (name,))
    copy_tables(spark, publisher, subscriber, "p")
    assert subscriber.rows(COUNTS) == [(1, 1000)]
    assert our_origins(subscriber) == []
