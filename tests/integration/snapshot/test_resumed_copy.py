"""A killed copy of a big table is resumed, and is exact as of the last snapshot (R7.9).

The chunks of such a table were read under different snapshots, while rows were inserted, updated, so that
they moved to other pages, deleted, given other keys, and led across the filter.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from psycopg.errors import UniqueViolation

from cdc_replay.errors import PublisherNotReady
from cdc_replay.model.table_state import Copying, Ready
from cdc_replay.snapshot.changed_rows import ChangedRows, ChangedRowsResult, stage_changed_rows
from cdc_replay.snapshot.copy_tables import load_tables
from cdc_replay.snapshot.staging import staged_chunks
from fixtures.postgres import Database
from integration.snapshot.copying import states_of
from integration.snapshot.resumed import ResumedCopy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key, a int, pad text)"
FILLED = "insert into t select n, n % 100, repeat('x', 150) from generate_series(1, 2000) n"
INDEX = """
    create unique index u on t (id, a); alter table t alter a set not null;
    alter table t replica identity using index u
"""
ROWS = "select id, a, pad from t"

TRAFFIC = (
    "insert into t select {base} + n, {small}, repeat('n', {small}) from generate_series(1, {small}) n",
    "update t set pad = repeat('u', {small} * 3) where id % {modulus} = {rest}",
    "update t set a = (a + {small}) % 100 where id % {modulus} = {rest}",
    "update t set id = id + {base} where id % {modulus} = {rest} and id < {base}",
    "delete from t where id % {modulus} = {rest}",
    "delete from t where id between {point} and {point} + 50",
    "insert into t select n, 5, 'again' from generate_series({point}, {point} + 20) n on conflict do nothing",
    "vacuum t",
)


@pytest.fixture
def copy(publisher: Database, subscriber: Database, tmp_path: Path) -> ResumedCopy:
    return ResumedCopy(publisher, subscriber, tmp_path)


def traffic(publisher: Database, chance: random.Random, statements: int, turn: int) -> None:
    for _ in range(statements):
        modulus = chance.choice([2, 7, 31])
        statement = chance.choice(TRAFFIC).format(
            base=turn * 100_000 + chance.randrange(1000) * 50,
            small=chance.randrange(1, 60),
            modulus=modulus,
            rest=chance.randrange(modulus),
            point=chance.randrange(1, 2000),
        )
        # An existing key: then nothing happens.
        with contextlib.suppress(UniqueViolation):
            publisher.run(statement)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("identity", "filter_"),
    [
        ("", ""),
        ("", " where (id % 3 < 2)"),
        ("alter table t replica identity full", " where (a < 70)"),
        (INDEX, " where (a < 70)"),
    ],
    ids=["plain", "filter", "full", "index"],
)
def test_chunks_of_several_snapshots_equal_the_table_at_the_last_one(
    spark: SparkSession, copy: ResumedCopy, identity: str, filter_: str, seed: int
) -> None:
    chance = random.Random(seed)
    copy.publisher.run(
        f"{TABLE}; {FILLED}; {identity or 'select'}; create publication p for table t{filter_}"
    )
    copy.subscriber.run(TABLE)
    copy.begin("p")
    staged = 0
    for turn in range(1, chance.randrange(2, 5)):
        some = chance.randrange(1, 5)
        staged += min(some, copy.killed_after(some, chance))
        assert isinstance(states_of(copy.subscriber)["public.t"], Copying)
        traffic(copy.publisher, chance, statements=chance.randrange(1, 8), turn=turn)
    rows = f"{ROWS} {filter_}"
    copied = copy.completed(spark, rows, received=ROWS)
    assert copied.chunks_staged_before == staged
    assert states_of(copy.subscriber)["public.t"] == Ready(copied.lsn)


def test_only_missing_chunks_are_read_again(spark: SparkSession, copy: ResumedCopy) -> None:
    copy.publisher.run(f"{TABLE}; {FILLED}; create publication p for table t")
    copy.subscriber.run(TABLE)
    copy.begin("p")
    chunks = copy.killed_after(5)
    assert copy.killed_after(0) == chunks - 5
    copied = copy.completed(spark, ROWS)
    assert (copied.chunks_staged_before, copied.chunks_read) == (5, chunks - 5)


def test_changed_rows_that_the_snapshot_does_not_see_any_more_are_not_taken_for_deleted(
    spark: SparkSession, copy: ResumedCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy.publisher.run(f"{TABLE}; {FILLED}; create publication p for table t")
    copy.subscriber.run(TABLE)
    copy.begin("p")
    copy.killed_after(1000)
    copy.publisher.run("update t set a = -1 where id < 100")

    def rewrite_and_stage(changed: ChangedRows, keys: DataFrame) -> tuple[ChangedRowsResult, ...]:
        copy.publisher.run("alter table t add r float default random()")
        return stage_changed_rows(changed, keys)

    with monkeypatch.context() as patched, copy.request() as request:
        patched.setattr("cdc_replay.snapshot.copy_tables.stage_changed_rows", rewrite_and_stage)
        with pytest.raises(PublisherNotReady, match="t was truncated, rewritten, attached or detached"):
            load_tables(spark, request)
    assert copy.subscriber.rows("select from t") == []
    copy.subscriber.run("alter table t add r float")
    assert copy.completed(spark, "select id, a, pad, r from t").chunks_staged_before == 0


def test_completely_staged_table_needs_no_chunk(spark: SparkSession, copy: ResumedCopy) -> None:
    copy.publisher.run(f"{TABLE}; {FILLED}; create publication p for table t")
    copy.subscriber.run(TABLE)
    copy.begin("p")
    chunks = copy.killed_after(1000)
    copy.publisher.run("update t set id = -id where id < 100; delete from t where id = 1000")
    copied = copy.completed(spark, ROWS)
    assert (copied.chunks_staged_before, copied.chunks_read) == (chunks, 0)


def test_writes_during_the_remaining_copy_are_replayed(spark: SparkSession, copy: ResumedCopy) -> None:
    copy.publisher.run(f"{TABLE}; {FILLED}; create publication p for table t")
    copy.subscriber.run(TABLE)
    copy.begin("p")
    copy.killed_after(3)
    copy.publisher.run("update t set pad = 'before' where id % 4 = 0")
    copy.completed(
        spark, ROWS, meanwhile=lambda: copy.publisher.run("update t set pad = 'behind', id = id + 5000")
    )


def test_killed_resync_is_resumed(spark: SparkSession, copy: ResumedCopy) -> None:
    copy.publisher.run(f"{TABLE}; {FILLED}; create publication p for table t")
    copy.subscriber.run(f"{TABLE}; insert into t values (1, 1, 'damaged'), (-1, 1, 'damaged')")
    copy.begin("p")
    copy.replace = True
    copy.killed_after(3)
    assert copy.subscriber.rows("select count(*) from t") == [(2,)]
    copy.publisher.run("delete from t where id < 500; update t set id = id + 10000 where id > 1500")
    copied = copy.completed(spark, ROWS)
    assert copied.chunks_staged_before == 3


@pytest.mark.parametrize(
    "change",
    [
        "truncate t; insert into t select n, 1, 'new' from generate_series(1, 500) n",
        "vacuum full t",
        "cluster t using t_pkey",
        "alter table t alter pad type varchar(500)",
        "alter table t alter a type bigint",
        "alter table t drop pad; alter table t add pad text default 'other'",
        "alter table t rename a to b; alter table t rename pad to a; alter table t rename b to pad",
        "alter publication p set table t where (id > 100)",
        "alter publication p set table t (id, a)",
        "alter table t replica identity full; alter table t drop constraint t_pkey",
        "alter publication p set (publish = 'insert')",
    ],
)
def test_table_with_a_changed_fingerprint_is_copied_again(
    spark: SparkSession, copy: ResumedCopy, change: str
) -> None:
    copy.publisher.run(f"{TABLE}; {FILLED}; create publication p for table t")
    copy.subscriber.run("create table t (id int, a text, pad text)")
    copy.begin("p")
    copy.killed_after(3)
    for statement in change.split("; "):
        copy.publisher.run(statement)
    copy.begin("p")
    copy.publisher.run("insert into t (id) values (100000)")
    rows = "select id, a::text from t" + (" where (id > 100)" if "where" in change else "")
    copied = copy.completed(spark, rows, received="select id, a from t")
    # Publish actions do not affect the copy (R7.3), but the log lacks changes.
    assert copied.chunks_staged_before == 0


def test_values_of_a_renamed_enum_label_are_read_again(spark: SparkSession, copy: ResumedCopy) -> None:
    copy.publisher.run("""
        create type mood as enum ('glad', 'sad');
        create table t (id int primary key, m mood[], pad text);
        insert into t select n, array['sad']::mood[], repeat('x', 150) from generate_series(1, 2000) n;
        create publication p for table t
    """)
    copy.subscriber.run("create table t (id int primary key, m text, pad text)")
    copy.begin("p")
    copy.killed_after(3)
    copy.publisher.run("alter type mood rename value 'sad' to 'blue'")
    copied = copy.completed(spark, "select id, m::text from t", received="select id, m from t")
    assert copied.chunks_staged_before == 0


def test_table_without_a_key_is_copied_again(spark: SparkSession, copy: ResumedCopy) -> None:
    copy.publisher.run("create table t (id int, a int, pad text); alter table t replica identity full")
    copy.publisher.run(f"{FILLED}; create publication p for table t")
    copy.subscriber.run("create table t (id int, a int, pad text)")
    copy.begin("p")
    copy.killed_after(3)
    copy.publisher.run("update t set pad = 'moved' where id < 500")
    assert copy.completed(spark, ROWS).chunks_staged_before == 0


def test_row_that_moves_to_another_partition_exists_once(spark: SparkSession, copy: ResumedCopy) -> None:
    copy.publisher.run("""
        create table t (id int, a int, pad text, primary key (id, a)) partition by range (a);
        create table t1 partition of t for values from (0) to (30);
        create table t2 (pad text, a int not null, id int not null);
        alter table t attach partition t2 for values from (30) to (100);
        create publication p for table t where (a <> 5) with (publish_via_partition_root)
    """)
    copy.publisher.run(FILLED)
    copy.subscriber.run("create table t (id int, a int, pad text, primary key (id, a))")
    copy.begin("p")
    copy.killed_after(4)
    copy.publisher.run("update t set a = 99 - a where id % 3 = 0")
    copy.killed_after(4, random.Random(1))
    copy.publisher.run("update t set a = 5 where id % 10 = 0; update t set a = 6 where a = 5 and id % 20 = 0")
    assert copy.completed(spark, f"{ROWS} where a <> 5", received=ROWS).chunks_staged_before == 8


def test_rows_are_found_by_keys_of_any_text(spark: SparkSession, copy: ResumedCopy) -> None:
    copy.publisher.run(r"""
        create table t (id numeric, k char(8), "k0" text, "x y" timestamptz, pad text,
            primary key (id, k, "k0", "x y"));
        insert into t select n::numeric / 4, 'c' || n % 3, E'\\ "q", {a} ''%s'' \t' || n % 5,
            '2024-03-31 01:59:59+00'::timestamptz + n * interval '1 h', repeat('x', 150)
            from generate_series(1, 2000) n;
        create publication p for table t
    """)
    copy.subscriber.run("""
        create table t (id numeric, k char(8), "k0" text, "x y" timestamptz, pad text,
            primary key (id, k, "k0", "x y"))
    """)
    copy.begin("p")
    copy.killed_after(3)
    copy.publisher.run("""
        update t set pad = 'short' where id < 100;
        update t set id = id * 1.000 where id between 100 and 200;
        update t set id = trim_scale(id), k = '', "k0" = '' where id between 300 and 350;
        delete from t where id > 400
    """)
    assert copy.completed(spark, "select t::text from t").chunks_staged_before == 3


def test_staged_chunk_emptied_by_a_crash_of_the_subscriber_is_read_again(
    spark: SparkSession, copy: ResumedCopy
) -> None:
    copy.publisher.run(f"{TABLE}; {FILLED}; create publication p for table t")
    copy.subscriber.run(TABLE)
    copy.begin("p")
    copy.killed_after(3)
    with copy.subscriber.connect() as connection:
        first = min(staged_chunks(connection, "s"))
        # What the server does to an unlogged table when it starts after a crash.
        connection.execute(f'truncate cdc_replay."{first}"'.encode())
        assert len(staged_chunks(connection, "s")) == 2
    assert copy.completed(spark, ROWS).chunks_staged_before == 2
