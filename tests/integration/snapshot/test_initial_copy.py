"""Rows of an initial copy; their bytes are the publisher's (R7.1-R7.7)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from cdc_replay.errors import ApplyConflict, InvalidFilter, MissingPrivilege, SubscriberNotReady
from cdc_replay.model.progress import Progress
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Copying, Ready
from cdc_replay.snapshot.copy_chunk import (
    ChunkCopy,
    CopiedChunk,
    CopySettings,
    FailedChunk,
    TableCopy,
    copy_chunks,
)
from cdc_replay.snapshot.copy_tables import load_tables
from cdc_replay.subscriber.subscription_tables import set_table_state
from fixtures.postgres import Database
from integration.snapshot.copying import copy_tables, public, snapshot_request, states_of, target_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SMALL_CHUNKS = 64 * 1024
PAGE = 8192


def test_rows_pass_the_or_of_all_filters_whatever_is_published(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run("""
        create table t (id int primary key, a int);
        insert into t select n, n * 10 from generate_series(1, 6) n;
        create publication p1 for table t where (id <= 2) with (publish = 'insert');
        create publication p2 for table t where (id = 5) with (publish = 'delete')
    """)
    subscriber.run("create table t (id int primary key, a int)")
    (copied,) = copy_tables(spark, publisher, subscriber, "p1", "p2")
    # R7.3: `publish` is not considered; R7.4: the filters are OR-ed.
    assert subscriber.rows("select * from t order by id") == [(1, 10), (2, 20), (5, 50)]
    assert (copied.name, copied.rows) == (public("t"), 3)
    assert states_of(subscriber) == {"public.t": Ready(copied.lsn)}


def test_publication_without_filter_makes_the_other_filters_redundant(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run("""
        create table t (id int primary key);
        insert into t select generate_series(1, 4);
        create publication p1 for table t where (id = 1);
        create publication p2 for all tables
    """)
    subscriber.run("create table t (id int primary key)")
    copy_tables(spark, publisher, subscriber, "p1", "p2")
    assert subscriber.rows("select count(*) from t") == [(4,)]


def test_filter_text_is_the_publishers_own(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run(r"""
        create table t (id int primary key, a text, "Mixed ""Case"" %s {}" text);
        insert into t values (1, '100%', 'x'), (2, 'it''s', 'x'), (3, 'back\slash', 'x'), (4, 'none', 'x'),
            (5, 'none', '{0} %(x)s'), (6, null, null);
        create publication p for table t where
            (a like '%\%' or a = 'it''s' or a = 'back\slash' or "Mixed ""Case"" %s {}" = '{0} %(x)s')
    """)
    subscriber.run('create table t (id int primary key, a text, "Mixed ""Case"" %s {}" text)')
    copy_tables(spark, publisher, subscriber, "p")
    assert subscriber.rows("select id from t order by id") == [(1,), (2,), (3,), (5,)]


def test_text_is_copied_byte_for_byte(spark: SparkSession, publisher: Database, subscriber: Database) -> None:
    publisher.run(r"""
        create table t (id int primary key, a text, b bytea, c text[], d jsonb, e float8, f timestamptz);
        insert into t (id, a) values
            (1, ''), (2, null), (3, '\N'), (4, E'tab\tnew\nline\rreturn\b\f\v'), (5, '\.'), (6, E'\\\\ \\t'),
            (7, 'ü € 😀 ' || chr(65533) || chr(160)), (8, '   '), (9, repeat(E'x\ty\n', 20000)),
            (10, '"quoted", ''single''');
        insert into t (id, a) select 100 + n, chr(n) from generate_series(1, 127) n;
        insert into t values (1000, null, '\x00ff0a5c09', array['a,b', null, '"', E'\t'], '{"k": "\n"}',
            0.1::float8 + 0.2, '2024-02-29 12:34:56.789012+05:30'),
            (1001, null, '', '{}', 'null', 'NaN', 'infinity');
        create publication p for table t
    """)
    subscriber.run(
        "create table t (f timestamptz, e float8, d jsonb, c text[], b bytea, a text, id int primary key)"
    )
    copy_tables(spark, publisher, subscriber, "p")
    everything = (
        "select md5(string_agg(row(id, a, b, c, d, e, f)::text, '|' order by id)), count(*), count(a) from t"
    )
    assert subscriber.rows(everything) == publisher.rows(everything)


def test_partitioned_root_is_copied_by_column_name(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run("""
        create table r (a int, b text, c int, primary key (a, c)) partition by list (c);
        create table r1 (c int not null, gone int, b text, a int not null, primary key (a, c));
        alter table r1 drop column gone;
        alter table r attach partition r1 for values in (1);
        create table r2 partition of r for values in (2) partition by range (a);
        create table r2a partition of r2 for values from (0) to (100);
        create schema other;
        create table other.r3 partition of r default;
        insert into r values (1, 'one', 1), (2, 'two', 2), (3, 'three', 3), (4, 'four', 4);
        create publication p for table r where (a <> 3) with (publish_via_partition_root)
    """)
    subscriber.run("create table r (a int, b text, c int, primary key (a, c))")
    (copied,) = copy_tables(spark, publisher, subscriber, "p")
    assert subscriber.rows("select * from r order by a") == [(1, "one", 1), (2, "two", 2), (4, "four", 4)]
    assert copied.rows == 3


def test_leaves_are_copied_into_their_own_tables_without_via_root(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    ddl = """
        create table r (a int primary key) partition by range (a);
        create table r1 partition of r for values from (0) to (10);
        create table r2 partition of r for values from (10) to (20)
    """
    publisher.run(ddl + "; insert into r values (1), (11); create publication p for table r")
    subscriber.run(ddl)
    copied = copy_tables(spark, publisher, subscriber, "p")
    assert [table.name for table in copied] == [public("r1"), public("r2")]
    assert subscriber.rows("select tableoid::regclass::text, a from r order by a") == [("r1", 1), ("r2", 11)]


def test_inheritance_children_are_not_part_of_a_plain_table(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run("""
        create table t (id int primary key);
        create table child () inherits (t);
        insert into t values (1);
        insert into child values (2);
        create publication p for table only t
    """)
    subscriber.run("create table t (id int primary key)")
    copy_tables(spark, publisher, subscriber, "p")
    assert subscriber.rows("select id from t") == [(1,)]


def test_names_are_quoted(spark: SparkSession, publisher: Database, subscriber: Database) -> None:
    ddl = (
        'create schema "S %s"; create table "S %s"."T "" {}" ("Id" int primary key, "a b" text, "select" int)'
    )
    publisher.run(
        ddl
        + """;
        insert into "S %s"."T "" {}" values (1, 'x', 2);
        create publication p for table "S %s"."T "" {}" where ("select" > 1)
    """
    )
    subscriber.run(ddl)
    (copied,) = copy_tables(spark, publisher, subscriber, "p")
    assert copied.name == QualifiedName("S %s", 'T " {}')
    assert subscriber.rows('select * from "S %s"."T "" {}"') == [(1, "x", 2)]


def test_column_list_and_generated_columns_decide_what_is_sent(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run("""
        create table t (id int primary key, a int, secret text, g int generated always as (a * 2) stored);
        insert into t values (1, 21, 'hidden');
        create publication p for table t (id, a) where (secret = 'hidden' and g = 42)
    """)
    subscriber.run("""
        create table t (id int generated always as identity primary key, secret text default 'local', a int,
            g int generated always as (a + 1) stored)
    """)
    copy_tables(spark, publisher, subscriber, "p")
    # R8.2: a column that is not sent gets its default; R8.14: identity takes the value, generated is local.
    assert subscriber.rows("select id, secret, a, g from t") == [(1, "local", 21, 22)]


@pytest.mark.parametrize("chunk_bytes", [PAGE, 2**30], ids=["several chunks", "one chunk"])
def test_table_without_columns_is_copied(
    spark: SparkSession, publisher: Database, subscriber: Database, chunk_bytes: int
) -> None:
    publisher.run("""
        create table t ();
        insert into t select from generate_series(1, 1000);
        create publication p for table t
    """)
    subscriber.run("create table t ()")
    copy_tables(spark, publisher, subscriber, "p", chunk_bytes=chunk_bytes)
    assert subscriber.rows("select count(*) from t") == [(1000,)]


def test_nothing_fires_but_replica_triggers(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run(
        "create table t (id int primary key, ref int); insert into t values (1, 77);"
        "create publication p for table t"
    )
    subscriber.run("""
        create table parent (id int primary key);
        create table t (id int primary key, ref int references parent);
        create table fired (name text);
        create function note() returns trigger language plpgsql as
            $$ begin insert into public.fired values (tg_name); return new; end $$;
        create trigger ordinary before insert on t for each row execute function note();
        create trigger replica before insert on t for each row execute function note();
        alter table t enable replica trigger replica
    """)
    copy_tables(spark, publisher, subscriber, "p")
    # R7.10, R8.13: the foreign key of row 1 points nowhere, and that is not checked.
    assert subscriber.rows("select * from t") == [(1, 77)]
    assert subscriber.rows("select name from fired") == [("replica",)]


def test_big_table_arrives_complete_and_at_once_from_several_chunks(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run("""
        create table t (id int primary key, pad text);
        insert into t select n, repeat('x', n % 200) from generate_series(1, 20000) n;
        delete from t where id % 7 = 0;
        update t set pad = 'moved' where id % 5 = 0;
        create publication p for table t where (id % 2 = 0)
    """)
    subscriber.run("create table t (id int generated always as identity primary key, pad text not null)")
    (copied,) = copy_tables(spark, publisher, subscriber, "p", chunk_bytes=SMALL_CHUNKS)
    content = "select count(*), md5(string_agg(id || pad, ',' order by id)) from t"
    assert subscriber.rows(content) == publisher.rows(f"{content} where id % 2 = 0")
    assert copied.rows == publisher.rows("select count(*) from t where id % 2 = 0")[0][0]
    assert states_of(subscriber) == {"public.t": Ready(copied.lsn)}
    assert subscriber.rows("select relname from pg_class where relname like 'snapshot%'") == []


def test_constraint_is_checked_when_chunks_are_moved(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run("""
        create table t (id int primary key, pad text);
        insert into t select n, repeat('x', 100) from generate_series(1, 5000) n;
        create publication p for table t
    """)
    subscriber.run("create table t (id int primary key, pad text); insert into t values (4999, 'mine')")
    with pytest.raises(ApplyConflict, match=r'"public\.t".*duplicate key value violates unique constraint'):
        copy_tables(spark, publisher, subscriber, "p", chunk_bytes=SMALL_CHUNKS)
    assert subscriber.rows("select * from t") == [(4999, "mine")]
    assert isinstance(states_of(subscriber)["public.t"], Copying)


def test_row_that_is_there_already_is_a_conflict_and_other_tables_are_copied(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    ddl = "create table t (id int primary key, a text); create table u (id int primary key)"
    publisher.run(
        ddl + "; insert into t values (1, 'new'), (2, 'new'); insert into u values (1);"
        "create publication p for table t, u"
    )
    subscriber.run(ddl + "; insert into t values (1, 'mine')")
    with pytest.raises(ApplyConflict, match=r'"public\.t".*duplicate key value violates unique constraint'):
        copy_tables(spark, publisher, subscriber, "p")
    assert subscriber.rows("select * from t") == [(1, "mine")]
    assert subscriber.rows("select * from u") == [(1,)]
    states = states_of(subscriber)
    assert isinstance(states["public.t"], Copying)
    assert isinstance(states["public.u"], Ready)
    # R7.13: an initial copy deletes nothing; with the conflict out of the way the table is copied.
    subscriber.run("delete from t; insert into t values (3, 'mine')")
    (copied,) = copy_tables(spark, publisher, subscriber, "p")
    assert copied.name == public("t")
    assert subscriber.rows("select * from t order by id") == [(1, "new"), (2, "new"), (3, "mine")]


def test_ready_table_is_left_alone(spark: SparkSession, publisher: Database, subscriber: Database) -> None:
    publisher.run("create table t (id int); insert into t values (1); create publication p for table t")
    subscriber.run("create table t (id int)")
    copy_tables(spark, publisher, subscriber, "p")
    before = states_of(subscriber)
    assert copy_tables(spark, publisher, subscriber, "p") == ()
    assert subscriber.rows("select * from t") == [(1,)]
    assert states_of(subscriber) == before


@pytest.mark.parametrize("chunk_bytes", [SMALL_CHUNKS, 2**30], ids=["several chunks", "one chunk"])
def test_resync_replaces_the_rows(
    spark: SparkSession, publisher: Database, subscriber: Database, chunk_bytes: int
) -> None:
    publisher.run("""
        create table t (id int primary key, pad text);
        insert into t select n, repeat('x', 100) from generate_series(1, 5000) n;
        create publication p for table t
    """)
    subscriber.run("create table t (id int primary key, pad text)")
    copy_tables(spark, publisher, subscriber, "p")
    subscriber.run("update t set pad = 'damaged' where id < 10; insert into t values (0, 'not there')")
    (copied,) = copy_tables(spark, publisher, subscriber, "p", replace=True, chunk_bytes=chunk_bytes)
    content = "select count(*), md5(string_agg(id || pad, ',' order by id)) from t"
    assert subscriber.rows(content) == publisher.rows(content)
    assert states_of(subscriber) == {"public.t": Ready(copied.lsn)}


def test_resync_that_fails_leaves_the_table_as_it_was(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run(
        "create table t (id int primary key, a int); insert into t values (1, 1);"
        "create publication p for table t"
    )
    subscriber.run("create table t (id int primary key, a int)")
    copy_tables(spark, publisher, subscriber, "p")
    before = states_of(subscriber)
    subscriber.run("alter table t add check (a < 2)")
    publisher.run("update t set a = 2")
    with pytest.raises(ApplyConflict, match="check constraint"):
        copy_tables(spark, publisher, subscriber, "p", replace=True)
    assert subscriber.rows("select * from t") == [(1, 1)]
    assert states_of(subscriber) == before


@pytest.mark.parametrize("staging", [None, "snapshot_test"])
def test_task_that_runs_twice_copies_once(
    publisher: Database, subscriber: Database, staging: str | None
) -> None:
    publisher.run("create table t (id int); insert into t values (1); create publication p for table t")
    subscriber.run("create table t (id int)")
    with snapshot_request(publisher.dsn, subscriber.dsn, "p") as request:
        begun = Copying(request.snapshot.consistent_point)
        with subscriber.connect() as connection:
            set_table_state(connection, "s", public("t"), begun)
        target = target_table(subscriber, "t")
        table = TableCopy(("id",), begun, target)
        chunk = ChunkCopy(table, 0, (sql.SQL("select id from only public.t").format(),), (), 0, staging)
        settings = CopySettings("s", request.snapshot, subscriber.dsn, replace=False)
        for _ in range(2):
            (result,) = copy_chunks(settings, [chunk])
            assert isinstance(result, CopiedChunk)
    receiver = "t" if staging is None else f"cdc_replay.{staging}"
    assert subscriber.rows(f"select * from {receiver}") == [(1,)]


def test_a_table_that_comes_under_the_name_meanwhile_gets_no_rows(
    publisher: Database, subscriber: Database
) -> None:
    publisher.run("create table t (id int); insert into t values (1); create publication p for table t")
    subscriber.run("create table t (id int)")
    with snapshot_request(publisher.dsn, subscriber.dsn, "p") as request:
        begun = Copying(request.snapshot.consistent_point)
        with subscriber.connect() as connection:
            set_table_state(connection, "s", public("t"), begun)
        target = target_table(subscriber, "t")
        subscriber.run("alter table t rename to u; create table t (id int)")
        table = TableCopy(("id",), begun, target)
        chunk = ChunkCopy(table, 0, (sql.SQL("select id from only public.t").format(),), (), 0, None)
        settings = CopySettings("s", request.snapshot, subscriber.dsn, replace=False)
        (result,) = copy_chunks(settings, [chunk])
    assert isinstance(result, FailedChunk)
    assert "was renamed, dropped or recreated" in str(result.error)
    assert subscriber.rows("select * from t") == subscriber.rows("select * from u") == []
    assert states_of(subscriber) == {"public.u": begun}


def test_missing_tables_and_columns_are_listed_together(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run("""
        create table t (id int primary key, a int);
        create table u (id int primary key, b int, c int);
        create publication p for table t, u
    """)
    subscriber.run("create table u (id int primary key)")
    with pytest.raises(SubscriberNotReady) as error:
        copy_tables(spark, publisher, subscriber, "p")
    assert all(word in str(error.value) for word in ('"public"."t"', '"public"."u"', '"b"', '"c"'))
    assert states_of(subscriber) == {}


def test_missing_select_privilege_names_the_table(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run("""
        create table t (id int primary key);
        create table u (id int primary key);
        insert into u values (1);
        create publication p for table t, u;
        create role copy_reader login replication;
        grant select on u to copy_reader
    """)
    subscriber.run("create table t (id int primary key); create table u (id int primary key)")
    try:
        with (
            snapshot_request(
                publisher.cluster.dsn(publisher.name, user="copy_reader"), subscriber.dsn, "p"
            ) as request,
            pytest.raises(MissingPrivilege, match=r'cannot read table "public\.t" of the publisher') as error,
        ):
            load_tables(spark, request)
        assert "On the publisher, grant the role SELECT" in str(error.value.hint)
        assert subscriber.rows("select * from u") == [(1,)]
    finally:
        publisher.run("drop owned by copy_reader; drop role copy_reader")


def test_root_that_may_be_read_stands_for_leaves_that_may_not(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run("""
        create table r (a int, b int) partition by range (a);
        create table r1 (b int, a int);
        alter table r attach partition r1 for values from (0) to (10);
        insert into r values (1, 2), (3, 4);
        create publication p for table r where (b > 2) with (publish_via_partition_root);
        create role root_reader login replication;
        grant select on r to root_reader
    """)
    subscriber.run("create table r (a int, b int)")
    try:
        dsn = publisher.cluster.dsn(publisher.name, user="root_reader")
        with snapshot_request(dsn, subscriber.dsn, "p") as request:
            load_tables(spark, request)
        assert subscriber.rows("select * from r") == [(3, 4)]
    finally:
        publisher.run("drop owned by root_reader; drop role root_reader")


def test_filter_that_fails_on_a_row_names_table_and_reason(
    spark: SparkSession, publisher: Database, subscriber: Database
) -> None:
    publisher.run("""
        create table t (id int primary key);
        insert into t values (1), (0);
        create publication p for table t where (10 / id > 1)
    """)
    subscriber.run("create table t (id int primary key)")
    with pytest.raises(InvalidFilter, match=r'"public\.t".*division by zero'):
        copy_tables(spark, publisher, subscriber, "p")
    assert subscriber.rows("select * from t") == []


def test_every_table_is_reported_to_the_log_and_to_the_caller(
    spark: SparkSession, publisher: Database, subscriber: Database, caplog: pytest.LogCaptureFixture
) -> None:
    ddl = "create table t (id int primary key); create table empty (id int primary key)"
    publisher.run(ddl + "; insert into t values (1), (22); create publication p for table t, empty")
    subscriber.run(ddl)
    reported: list[Progress] = []
    with (
        snapshot_request(publisher.dsn, subscriber.dsn, "p") as request,
        caplog.at_level(logging.INFO, "cdc_replay.snapshot"),
    ):
        load_tables(spark, request, reported.append)
    # COPY text: two digits and three, with their line ends.
    finished = {
        (progress.of, progress.rows, progress.done)
        for progress in reported
        if progress.action == "copy" and progress.is_done
    }
    assert finished == {("public.empty", 0, 0), ("public.t", 2, 5)}
    assert "table public.t: 2 rows, 5 bytes" in caplog.text
