"""An error on one side names the table and the cause, and leaves nothing (R7.6, R8.5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from cdc_replay.errors import (
    InvalidFilter,
    MissingPrivilege,
    PublisherNotReady,
    SubscriberNotReady,
    SubscriberNotWritable,
)
from cdc_replay.postgres.exported_snapshot import import_snapshot
from cdc_replay.snapshot.copy_chunk import FailedChunk, copy_chunks, subscriber_connection
from cdc_replay.snapshot.copy_tables import load_tables
from cdc_replay.snapshot.plan import CHUNK_BYTES
from cdc_replay.snapshot.planning import plan_tables
from fixtures.postgres import Database
from integration.snapshot.copying import copy_tables, snapshot_request

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILLED = "insert into t select n, repeat('x', 150) from generate_series(1, 3000) n"


@pytest.mark.spark
def test_row_that_fails_at_the_end_of_a_chunk_names_table_and_cause(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run(f"""
        create table t (id int primary key, pad text); {FILLED};
        create publication p for table t where (1000 / (3000 - id) >= 0)
    """)
    subscriber.run("create table t (id int primary key, pad text)")
    with pytest.raises(InvalidFilter, match=r'table "public\.t" of the publisher: division by zero'):
        copy_tables(spark, publisher, subscriber, "p", chunk_bytes=64 * 1024)
    assert subscriber.rows("select count(*) from t") == [(0,)]


@pytest.mark.spark
def test_trigger_that_refuses_a_row_is_quoted(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run(
        f"create table t (id int primary key, pad text); {FILLED}; create publication p for table t"
    )
    subscriber.run("""
        create table t (id int primary key, pad text);
        create function refuse() returns trigger language plpgsql as
            $$ begin raise exception 'no row %', new.id using detail = 'Ask the owner.'; end $$;
        create trigger refuse before insert on t for each row execute function refuse();
        alter table t enable always trigger refuse
    """)
    with pytest.raises(SubscriberNotReady, match=r'table "public\.t" of the subscriber: no row 1') as error:
        copy_tables(spark, publisher, subscriber, "p")
    assert error.value.detail == "Ask the owner."
    assert subscriber.rows("select count(*) from t") == [(0,)]


def test_read_only_subscriber_is_named_as_such(publisher: Database, subscriber: Database) -> None:
    publisher.run(
        f"create table t (id int primary key, pad text); {FILLED}; create publication p for table t"
    )
    subscriber.run("create table t (id int primary key, pad text)")
    with snapshot_request(publisher.dsn, subscriber.dsn, "p") as request:
        settings = request.settings(1)
        with subscriber_connection(settings) as connection:
            (planned,) = plan_tables(connection, request)
        subscriber.run(
            "do $$ begin execute format('alter database %I set default_transaction_read_only = on',"
            " current_database()); end $$"
        )
        (failed,) = copy_chunks(settings, planned.chunks)
    assert isinstance(failed, FailedChunk)
    assert isinstance(failed.error, SubscriberNotWritable)
    assert "public.t" in failed.error.message
    assert "read-only" in failed.error.message
    assert "The subscriber is read-only" in str(failed.error.hint)


def test_missing_privilege_on_the_target_names_side_and_remedy(
    publisher: Database, subscriber: Database
) -> None:
    publisher.run(
        f"create table t (id int primary key, pad text); {FILLED}; create publication p for table t"
    )
    role = f"poor_{subscriber.name}"
    subscriber.run(f"""
        create table t (id int primary key, pad text);
        create role {role} login;
        grant set on parameter session_replication_role to {role};
        grant create on database {subscriber.name} to {role};
        grant select on t to {role}
    """)
    dsn = subscriber.cluster.dsn(subscriber.name, role)
    try:
        with snapshot_request(publisher.dsn, dsn, "p", run_as_owner=True) as request:
            settings = request.settings(1)
            with subscriber_connection(settings) as connection:
                (planned,) = plan_tables(connection, request)
            (failed,) = copy_chunks(settings, planned.chunks)
        assert isinstance(failed, FailedChunk)
        assert isinstance(failed.error, MissingPrivilege)
        assert 'cannot write table "public.t" of the subscriber: permission denied' in failed.error.message
        assert "On the subscriber, grant the role SELECT and INSERT" in str(failed.error.hint)
    finally:
        subscriber.run(f"drop owned by {role}; drop role {role}")


@pytest.fixture
def reader(publisher: Database) -> Iterator[str]:
    """A role that may export snapshots and read all tables, and that policies restrict."""
    name = f"reader_{publisher.name}"
    publisher.run(f"create role {name} login replication; grant pg_read_all_data to {name}")
    yield name
    publisher.run(f"drop owned by {name}; drop role {name}")


@pytest.mark.spark
@pytest.mark.parametrize("changes", [{}, {"replace": True}, {"replace": True, "chunk_bytes": 64 * 1024}])
def test_rows_that_a_policy_hides_are_not_left_out_in_silence(
    spark: SparkSession, publisher: Database, subscriber: Database, reader: str, changes: dict[str, Any]
) -> None:
    """R7.10: a copy that replaces rows would lose them."""
    publisher.run(f"""
        create table t (id int primary key, pad text); {FILLED}; create publication p for table t;
        alter table t enable row level security; create policy few on t using (id <= 10)
    """)
    subscriber.run(f"create table t (id int primary key, pad text); {FILLED if changes else ''}")
    rows_before = subscriber.rows("select count(*) from t")
    dsn = publisher.cluster.dsn(publisher.name, reader)
    refusal = pytest.raises(MissingPrivilege, match=r'table "public\.t" of the publisher: .*policy')
    with snapshot_request(dsn, subscriber.dsn, "p", **changes) as request, refusal as error:
        load_tables(spark, request)
    assert "BYPASSRLS" in (error.value.hint or "")
    assert subscriber.rows("select count(*) from t") == rows_before

    publisher.run(f"alter role {reader} bypassrls")
    with snapshot_request(dsn, subscriber.dsn, "p", **changes) as request:
        (copied,) = load_tables(spark, request)
    assert copied.rows == 3000


@pytest.mark.spark
def test_a_policy_of_a_partition_hides_nothing_from_who_reads_the_partitioned_table(
    spark: SparkSession, publisher: Database, subscriber: Database, reader: str
) -> None:
    """R7.10: the server applies only policies of the named table."""
    publisher.run("""
        create table t (id int primary key) partition by range (id);
        create table t1 partition of t for values from (0) to (100);
        create table t2 partition of t for values from (100) to (200);
        alter table t2 enable row level security;
        insert into t select generate_series(0, 199);
        create publication p for table t with (publish_via_partition_root)
    """)
    subscriber.run("create table t (id int primary key)")
    dsn = publisher.cluster.dsn(publisher.name, reader)
    with snapshot_request(dsn, subscriber.dsn, "p") as request:
        (copied,) = load_tables(spark, request)
    assert copied.rows == 200


@pytest.mark.spark
@pytest.mark.parametrize(
    ("change", "key", "chunk_bytes"),
    [
        ("truncate t", "primary key", 64 * 1024),
        ("vacuum full t", "primary key", 64 * 1024),
        ("alter table t add r float default random()", "", 64 * 1024),
        ("alter table t add r float default random()", "primary key", CHUNK_BYTES),
    ],
    ids=["truncated", "vacuumed", "without a key", "one chunk"],
)
def test_table_that_gets_another_file_under_the_snapshot_is_not_put_together(
    spark: SparkSession, publisher: Database, subscriber: Database, change: str, key: str, chunk_bytes: int
) -> None:
    """TRUNCATE and rewrites hide rows from earlier snapshots; a rewrite sends none of them again."""
    publisher.run(f"create table t (id int {key}, pad text); {FILLED}; create publication p for table t")
    subscriber.run("create table t (id int primary key, pad text)")
    with snapshot_request(publisher.dsn, subscriber.dsn, "p", chunk_bytes=chunk_bytes) as request:
        publisher.run(change)
        publisher.run("insert into t select n, 'new' from generate_series(5001, 9000) n")
        with import_snapshot(request.snapshot, purpose="test") as reader:
            assert reader.execute("select count(*) from public.t where id > 5000").fetchone() == (0,)
        with pytest.raises(PublisherNotReady, match="t was truncated, rewritten, attached or detached"):
            load_tables(spark, request)
    subscriber.run("alter table t add r float")
    copy_tables(spark, publisher, subscriber, "p", chunk_bytes=chunk_bytes)
    content = "select count(*), min(id), max(id) from t"
    assert subscriber.rows(content) == publisher.rows(content)


@pytest.mark.spark
@pytest.mark.parametrize("is_partitioned", [False, True])
def test_a_table_that_is_dropped_while_its_copy_is_planned_is_named_and_the_others_are_copied(
    spark: SparkSession, publisher: Database, subscriber: Database, *, is_partitioned: bool
) -> None:
    """The snapshot's catalog has the dropped table, with size NULL; the next snapshot does not have it."""
    tables = "create table t (id int primary key); create table u (id int primary key)"
    publisher.run(
        f"{tables}; create publication p for table t, u; insert into t values (1); insert into u values (2)"
        if not is_partitioned
        else "create table t (id int) partition by range (id); create table u (id int primary key);"
        " create table t1 partition of t for values from (0) to (9); insert into t values (1);"
        " create publication p for table t, u with (publish_via_partition_root); insert into u values (2)"
    )
    subscriber.run(tables)
    with snapshot_request(publisher.dsn, subscriber.dsn, "p") as request:
        publisher.run("drop table t")
        with pytest.raises(PublisherNotReady, match=r'table "public\.t1?" of the publisher') as error:
            load_tables(spark, request)
    assert "run it again" in str(error.value.hint)
    assert subscriber.rows("select (select count(*) from t), (select id from u)") == [(0, 2)]

    copied = copy_tables(spark, publisher, subscriber, "p")
    assert copied == ()
