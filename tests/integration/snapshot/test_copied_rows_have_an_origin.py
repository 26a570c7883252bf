"""R8.18, R8.19: copied rows carry an origin, as those of a native table synchronisation do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import origin
from embedded.postgres import Cluster
from fixtures.native import NativeSubscription
from fixtures.postgres import Database, create_database, drop_database
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
ORIGINS = """
    select roname::text from pg_replication_origin
    join pg_database on starts_with(roname::text, 'cdc_replay_' || pg_database.oid || '_')
    where datname = current_database()
"""


@pytest.fixture
def other(subscriber_cluster: Cluster) -> Iterator[Database]:
    """A second subscriber, for the native copy."""
    database = create_database(subscriber_cluster, "native")
    yield database
    drop_database(database)


@pytest.fixture
def onward(publisher_cluster: Cluster) -> Iterator[list[Database]]:
    """Two databases that subscribe to subscribers."""
    databases = [create_database(publisher_cluster, f"onward_{number}") for number in range(2)]
    yield databases
    for database in databases:
        drop_database(database)


def test_an_onward_subscription_with_origin_none_gets_none_of_them(
    spark: SparkSession, publisher: Database, subscriber: Database, other: Database, onward: list[Database]
) -> None:
    publisher.run(f"{TABLES}; {ROWS}; create publication p for table small, large")
    natives = []
    for source, database in zip((subscriber, other), onward, strict=True):
        source.run(f"{TABLES}; create publication onward for table small, large")
        database.run(TABLES)
        natives.append(NativeSubscription(source, database, f"none_{source.name}"))
        natives[-1].create(["onward"], {"copy_data": False, "origin": "none"})

    copied = copy_tables(spark, publisher, subscriber, "p", chunk_bytes=CHUNK_BYTES)
    chunks = [each.chunks_read for each in copied]
    assert min(chunks) == 1
    assert max(chunks) > 1
    copy = NativeSubscription(publisher, other, f"copy_{other.name}")
    copy.create(["p"], {})
    copy.wait()
    for source in (subscriber, other):
        assert source.rows(COUNTS) == [(1, 1000)]
        source.run("insert into small values (9, 'here')")
    for native in natives:
        native.wait()

    for database in onward:
        assert database.rows("select id from small") == [(9,)]
        assert database.rows("select count(*) from large") == [(0,)]
    assert subscriber.rows(ORIGINS) == []


def test_what_a_killed_reader_leaves_goes_with_the_next_snapshot(
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
    assert subscriber.rows(ORIGINS) == []
