"""Indexes are built after the load only if they are the same as before (R8.1)."""

from __future__ import annotations

import pytest
from psycopg.errors import UniqueViolation

from cdc_replay.snapshot.indexes import DESCRIBED, REBUILD_FROM_BYTES, indexes_rebuilt_after
from fixtures.postgres import Database

OIDS = "select array_agg(indexrelid::text order by indexrelid) from pg_index where indrelid = 't'::regclass"
TABLE = "create table t (id int primary key, a int, b text, r int4range)"


def described(subscriber: Database) -> object:
    with subscriber.connect() as connection:
        return connection.execute(DESCRIBED, ["t"]).fetchall()


def load(subscriber: Database, size_bytes: int = REBUILD_FROM_BYTES) -> None:
    with (
        subscriber.connect() as connection,
        connection.transaction(),
        indexes_rebuilt_after(connection, "public", "t", size_bytes),
    ):
        connection.execute("insert into t (id, a) select n, n from generate_series(1, 100) n")


@pytest.mark.parametrize(
    "definition",
    [
        TABLE,
        f"{TABLE}; create index on t (a); create unique index u on t (lower(b) text_pattern_ops) where a > 1",
        f"{TABLE}; alter table t add constraint c unique (a, b) deferrable initially deferred",
        f"{TABLE}; alter table t add constraint x exclude using gist (r with &&)",
        'create table t (id int, a int, constraint "a ""k" primary key (id) include (a))',
        f"{TABLE}; create index h on t using hash (a); create index on t using brin (a)",
    ],
)
def test_indexes_are_rebuilt_with_the_same_description(subscriber: Database, definition: str) -> None:
    subscriber.run(definition)
    before, oids = described(subscriber), subscriber.rows(OIDS)
    load(subscriber)
    assert described(subscriber) == before
    assert subscriber.rows(OIDS) != oids
    assert subscriber.rows("select count(*) from t") == [(100,)]


@pytest.mark.parametrize(
    "definition",
    [
        f"{TABLE}; comment on index t_pkey is 'mine'",
        f"{TABLE}; comment on constraint t_pkey on t is 'mine'",
        "create table t (id int, a int, primary key (id) with (fillfactor = 70))",
        f"{TABLE}; alter table t replica identity using index t_pkey",
        f"{TABLE}; alter table t cluster on t_pkey",
        f"{TABLE}; create table other (id int references t)",
        f"{TABLE}; create view v as select id, a from t group by id",
        f"{TABLE}; create index e on t ((a + 1)); alter index e alter column 1 set statistics 500",
        f"{TABLE}; insert into t values (0)",
        """create table root (id int primary key, a int) partition by range (id);
            create table t partition of root default""",
    ],
)
def test_indexes_that_would_change_are_kept(subscriber: Database, definition: str) -> None:
    subscriber.run(definition)
    before, oids = described(subscriber), subscriber.rows(OIDS)
    load(subscriber)
    assert described(subscriber) == before
    assert subscriber.rows(OIDS) == oids


def test_table_in_use_keeps_its_indexes(subscriber: Database) -> None:
    subscriber.run(TABLE)
    oids = subscriber.rows(OIDS)
    with subscriber.connect() as reader, reader.transaction():
        reader.execute("select from t")
        load(subscriber)
    assert subscriber.rows(OIDS) == oids


def test_few_rows_are_indexed_one_by_one(subscriber: Database) -> None:
    subscriber.run(TABLE)
    oids = subscriber.rows(OIDS)
    load(subscriber, REBUILD_FROM_BYTES - 1)
    assert subscriber.rows(OIDS) == oids


def test_failed_load_keeps_the_indexes(subscriber: Database) -> None:
    subscriber.run(TABLE)
    before, oids = described(subscriber), subscriber.rows(OIDS)
    with (
        subscriber.connect() as connection,
        pytest.raises(UniqueViolation),
        connection.transaction(),
        indexes_rebuilt_after(connection, "public", "t", REBUILD_FROM_BYTES),
    ):
        connection.execute("insert into t (id) values (1), (1)")
    assert (described(subscriber), subscriber.rows(OIDS)) == (before, oids)
