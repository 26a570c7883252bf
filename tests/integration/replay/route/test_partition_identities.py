"""UPDATEs and DELETEs of partitions find their rows, however the subscriber's table is keyed and partitioned.

Every table is a case of its own; all of them are in one window:

| table  | publisher                                       | subscriber                         | native  |
|--------|-------------------------------------------------|------------------------------------|---------|
| plain  | root FULL without key, partitions with key (id) | plain, no key                      | misses  |
| keyed  | root with key (id, region), partitions FULL     | plain, key (id)                    | right   |
| mixed  | root with key (id, region), one partition FULL  | plain, key (id, region)            | right   |
| other  | root with key (id, region)                      | partitioned by id, the same key    | right   |
| sliced | plain, key (id)                                 | partitioned by at, parts' key (id) | misses  |
| strict | plain, key (id)                                 | partitioned by at, key (id, at)    | refuses |
"""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.twin import Twin

pytestmark = pytest.mark.spark

PUBLISHER = """
    create table plain (id int, region text, v text) partition by list (region);
    create table plain_n partition of plain (primary key (id)) for values in ('n', 'm');
    create table plain_s partition of plain (primary key (id)) for values in ('s');
    alter table plain replica identity full;
    create table keyed (id int, region text, v text, primary key (id, region)) partition by list (region);
    create table keyed_n (v text, region text not null, id int not null);
    alter table keyed attach partition keyed_n for values in ('n', 'm');
    create table keyed_s partition of keyed for values in ('s');
    alter table keyed_n replica identity full;
    alter table keyed_s replica identity full;
    create table mixed (id int, region text, v text, primary key (id, region)) partition by list (region);
    create table mixed_n partition of mixed for values in ('n', 'm');
    create table mixed_s partition of mixed for values in ('s');
    alter table mixed_n replica identity full;
    create table other (id int, region text, v text, primary key (id, region)) partition by list (region);
    create table other_n partition of other for values in ('n', 'm');
    create table other_s partition of other for values in ('s');
    create table sliced (id int primary key, at int, v text);
    create table strict (id int primary key, at int, v text);
    create publication trees for table plain, keyed, mixed, other with (publish_via_partition_root = true);
    create publication sliced for table sliced;
    create publication strict for table strict
"""
TREE_TABLES = ("plain", "keyed", "mixed", "other")
TREES = """
    create table plain (id int, region text, v text, own int default 7);
    create table keyed (id int primary key, region text, v text);
    create table mixed (id int, region text, v text, primary key (id, region));
    create table other (id int, region text, v text, primary key (id, region)) partition by range (id);
    create table other_1 partition of other for values from (0) to (10);
    create table other_2 partition of other for values from (10) to (100)
"""
SLICED = """
    create table sliced (id int, at int, v text) partition by range (at);
    create table sliced_1 partition of sliced (primary key (id)) for values from (0) to (10);
    create table sliced_2 partition of sliced (primary key (id)) for values from (10) to (100);
    create table sliced_rest partition of sliced (primary key (id)) default
"""
STRICT = """
    create table strict (id int, at int, v text, primary key (id, at)) partition by range (at);
    create table strict_1 partition of strict for values from (0) to (10);
    create table strict_2 partition of strict for values from (10) to (100)
"""
ROWS = "insert into {0} values (1, 'n', 'a'), (2, 's', 'a'), (3, 'n', 'a'), (4, 's', 'a'), (5, 'm', 'a')"
TREE_CHANGES = """
    update {0} set v = 'b' where id = 1;
    delete from {0} where id = 2;
    update {0} set id = 30 where id = 3;
    update {0} set region = 'n', v = 'c' where id = 4;
    update {0} set region = 'n' where id = 5;
    insert into {0} values (6, 's', 'a');
    update {0} set v = 'b' where id = 6
"""
TREE_RESULT = [(1, "n", "b"), (30, "n", "a"), (4, "n", "c"), (5, "n", "a"), (6, "s", "b")]
SLICED_ROWS = "insert into {0} values (1, 1, 'a'), (2, 2, 'a'), (3, 3, 'a'), (4, 4, 'a')"
SLICED_CHANGES = """
    update {0} set v = 'b' where id = 1;
    delete from {0} where id = 2;
    update {0} set at = 50 where id = 3;
    update {0} set id = 5 where id = 4
"""
SLICED_RESULT = [(1, 1, "b"), (3, 50, "a"), (5, 4, "a")]


def of(twin: Twin, table: str, *, native: bool = False) -> list[tuple[Any, ...]]:
    pair = twin.pairs["trees" if table in TREE_TABLES else table]
    side = pair.native if native else pair.ours
    return side.rows(f"select (t).id, * from {table} as t order by t::text")


def rows(result: list[tuple[Any, ...]], width: int = 3) -> list[tuple[Any, ...]]:
    return [row[1 : width + 1] for row in result]


def test_rows_are_found_by_the_key_that_partitions_send(twin: Twin) -> None:
    """R8.6, R8.7, R8.11, R8.12, R2.12, R2.15, R1.7, R11.3."""
    twin.publisher.run(";".join([PUBLISHER, *map(ROWS.format, TREE_TABLES)]))
    twin.publisher.run(";".join(SLICED_ROWS.format(name) for name in ("sliced", "strict")))
    twin.subscribe("trees", "trees", tables=TREES)
    twin.subscribe("sliced", "sliced", tables=SLICED)
    twin.subscribe("strict", "strict", tables=STRICT, native=False)
    twin.sync("trees", "sliced")
    twin.sync_ours("strict")

    for name in TREE_TABLES:
        twin.publish(TREE_CHANGES.format(name))
    for name in ("sliced", "strict"):
        twin.publish(SLICED_CHANGES.format(name))
    results = twin.sync("trees", "sliced")
    (strict,) = twin.sync_ours("strict")
    assert strict.replay.error is None

    assert twin.rows("trees", "keyed") == TREE_RESULT
    assert twin.rows("trees", "mixed") == TREE_RESULT
    # The subscriber's own partitions: 3 has moved from one to the other with its key.
    assert twin.rows("trees", "other") == TREE_RESULT
    assert twin.rows("trees", "other_2") == [(30, "n", "a")]
    # R8.11: native looks for whole rows by new values and by NULLs, and finds the inserted one only.
    assert rows(of(twin, "plain"), 4) == [(*row, 7) for row in TREE_RESULT]
    assert (1, "n", "a") in rows(of(twin, "plain", native=True))
    # R8.12: native looks into the default partition, as the key says nothing of `at`.
    assert rows(of(twin, "sliced")) == SLICED_RESULT
    assert (2, 2, "a") in rows(of(twin, "sliced", native=True))
    # R8.7: a native worker stops here.
    assert rows(of(twin, "strict")) == SLICED_RESULT
    assert [result.conflicts for result in (*results.values(), strict.replay)] == [{}, {}, {}]


TWINS = """
    create table t (id int, region text, v text) partition by list (region);
    create table t_n partition of t (primary key (id)) for values in ('n');
    create table t_s partition of t (primary key (id)) for values in ('s');
    create publication p for table t with (publish_via_partition_root = true);
    insert into t values (1, 'n', 'a'), (2, 's', 'a')
"""


def test_equal_keys_of_two_partitions_are_two_rows(twin: Twin) -> None:
    """R8.12: nothing that the publisher sends of the old row says which of the two it is."""
    twin.publisher.run(TWINS)
    twin.subscribe("s", "p", tables="create table t (id int, region text, v text)", native=False)
    twin.sync_ours()
    # In one window they are told apart by their partition: only (3, 's') is left, and (4, …) twice.
    twin.publish("""
        insert into t values (3, 'n', 'a'), (3, 's', 'a'), (4, 'n', 'a'), (4, 's', 'a');
        update t set v = 'b' where id = 3 and region = 's';
        delete from t where id = 3 and region = 'n';
        update t set v = 'b' where id = 1
    """)
    (synced,) = twin.sync_ours()
    assert (synced.replay.error, synced.replay.conflicts) == (None, {})
    expected = [(1, "n", "b"), (2, "s", "a"), (3, "s", "b"), (4, "n", "a"), (4, "s", "a")]
    ours = twin.pairs["s"].ours
    assert ours.rows("table t order by t::text") == expected

    twin.publish("update t set v = 'c' where id = 1;\ndelete from t where id = 4 and region = 'n'")
    (synced,) = twin.sync_ours()

    error = synced.replay.error or ""
    assert 'table "public"."t"' in error
    assert "(id)=(4)" in error
    assert "R8.12" in error
    # The transaction before the refused one is applied.
    assert ours.rows("table t order by t::text") == [(1, "n", "c"), *expected[1:]]


def test_old_row_without_a_usable_key_is_refused_with_table_column_and_rule(twin: Twin) -> None:
    """R8.7: one partition sends the subscriber's key, the other sends another one."""
    twin.publisher.run("""
        create table t (id int, region text, v text not null, primary key (id, region))
            partition by list (region);
        create table t_n partition of t for values in ('n');
        create table t_s partition of t for values in ('s');
        create unique index t_s_v on t_s (v);
        alter table t_s replica identity using index t_s_v;
        create publication p for table t with (publish_via_partition_root = true);
        insert into t values (1, 'n', 'a'), (2, 's', 'b')
    """)
    target = "create table t (id int, region text, v text, primary key (id, region))"
    twin.subscribe("s", "p", tables=target, native=False)
    twin.sync_ours()
    twin.publish("insert into t values (3, 's', 'c');\nupdate t set v = 'd' where id = 1")
    (synced,) = twin.sync_ours()
    assert synced.replay.error is None

    twin.publish("""
        insert into t values (4, 'n', 'e');
        begin;
        update t set v = 'f' where id = 1;
        delete from t where id = 2;
        commit
    """)
    (synced,) = twin.sync_ours()

    error = synced.replay.error or ""
    for named in ('"public.t"', '"public.t_s"', '"id", "region"', '"v"', "R8.7", "REPLICA IDENTITY"):
        assert named in error
    # The transaction before the refused one is applied.
    assert twin.pairs["s"].ours.rows("table t order by id") == [
        (1, "n", "d"),
        (2, "s", "b"),
        (3, "s", "c"),
        (4, "n", "e"),
    ]
