"""A killed copy loses and duplicates nothing: the next run copies tables that are not ready, once.

| killed at            | state left                         | rows left   |
|----------------------|------------------------------------|-------------|
| snapshot.mid_copy    | Copying, or Ready before a resync  | as before   |
| snapshot.before_swap | Copying, or Ready before a resync  | as before   |
| snapshot.after_table | Ready                              | all of them |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cdc_replay.model.table_state import Copying, Ready
from fixtures.postgres import Database
from integration.snapshot.copying import copy_tables, run_until_killed, states_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ONE_CHUNK = str(2**30)
SEVERAL_CHUNKS = str(64 * 1024)
CONTENT = "select count(*), md5(string_agg(id || pad, ',' order by id)) from t"
STAGING = "select count(*) from pg_class where relname like 'snapshot%'"


@pytest.fixture
def table(publisher: Database, subscriber: Database) -> str:
    """A table without a key on the subscriber, in which duplicates are possible; its content."""
    publisher.run("""
        create table t (id int primary key, pad text);
        insert into t select n, repeat('x', 100) from generate_series(1, 3000) n;
        create publication p for table t
    """)
    subscriber.run("create table t (id int, pad text)")
    return str(publisher.rows(CONTENT))


@pytest.mark.parametrize(
    ("failpoint", "chunk_bytes"),
    [
        ("snapshot.mid_copy", ONE_CHUNK),
        ("snapshot.mid_copy@3", SEVERAL_CHUNKS),
        ("snapshot.before_swap", SEVERAL_CHUNKS),
    ],
)
def test_killed_initial_copy_shows_no_row_and_is_done_again(
    spark: SparkSession,
    publisher: Database,
    subscriber: Database,
    table: str,
    failpoint: str,
    chunk_bytes: str,
) -> None:
    killed = run_until_killed(publisher, subscriber, failpoint, chunk_bytes, "copy")
    assert killed.returncode != 0, killed.stderr
    assert subscriber.rows("select count(*) from t") == [(0,)]
    assert isinstance(states_of(subscriber)["public.t"], Copying)
    copy_tables(spark, publisher, subscriber, "p")
    assert str(subscriber.rows(CONTENT)) == table
    assert isinstance(states_of(subscriber)["public.t"], Ready)
    assert subscriber.rows(STAGING) == [(0,)]


@pytest.mark.parametrize("chunk_bytes", [ONE_CHUNK, SEVERAL_CHUNKS])
def test_table_that_was_complete_before_the_kill_is_not_copied_again(
    spark: SparkSession, publisher: Database, subscriber: Database, table: str, chunk_bytes: str
) -> None:
    killed = run_until_killed(publisher, subscriber, "snapshot.after_table", chunk_bytes, "copy")
    assert killed.returncode != 0, killed.stderr
    assert str(subscriber.rows(CONTENT)) == table
    assert copy_tables(spark, publisher, subscriber, "p") == ()
    assert str(subscriber.rows(CONTENT)) == table


def test_killed_resync_keeps_rows_and_state(
    spark: SparkSession, publisher: Database, subscriber: Database, table: str
) -> None:
    copy_tables(spark, publisher, subscriber, "p")
    before = states_of(subscriber)
    publisher.run("delete from t where id > 10")
    killed = run_until_killed(publisher, subscriber, "snapshot.mid_copy", ONE_CHUNK, "replace")
    assert killed.returncode != 0, killed.stderr
    assert str(subscriber.rows(CONTENT)) == table
    assert states_of(subscriber) == before
    copy_tables(spark, publisher, subscriber, "p", replace=True)
    assert subscriber.rows(CONTENT) == publisher.rows(CONTENT)
