"""Tables that change their columns between the changes of one window (R9.10, R8.1-R8.3).

Native is the oracle: it applies each transaction in its own shape. Every table is one case; all of them are
in one window. The subscriber's tables have the old and the new columns, where a native worker needs both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cdc_replay.commands.resume import resume
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.model.relation import QualifiedName
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

BIG = "(select string_agg(md5(i::text), '') from generate_series(1, 200) i)"


@dataclass(frozen=True)
class Case:
    """The columns on both sides, the other values of the rows 1 to 3, and what happens in the window."""

    publisher: str
    subscriber: str
    values: str
    changes: str


CASES = {
    "added": Case(
        "id int primary key, a int",
        "id int primary key, a int, b int default 5, own int default 9",
        "1",
        """
        insert into added values (10, 1), (11, 1), (12, 1);
        update added set a = 2 where id = 1;
        alter table added add b int default 7;
        insert into added values (20, 1, 1);
        insert into added (id) values (21);
        update added set a = 3 where id in (2, 11);
        update added set b = 8 where id = 12;
        update added set id = 13 where id = 3""",
    ),
    "dropped": Case(
        "id int primary key, a int, b int",
        "id int primary key, a int, b int default 5",
        "1, 1",
        """
        insert into dropped values (10, 1, 1), (11, 1, 1), (12, 1, 1);
        update dropped set b = 2 where id = 1;
        alter table dropped drop b;
        update dropped set a = 3 where id in (1, 2, 10);
        delete from dropped where id = 11;
        insert into dropped values (11, 4), (20, 1);
        update dropped set id = 120 where id = 12""",
    ),
    "readded": Case(
        "id int primary key, a int, b int",
        "id int primary key, a int, b text default 'none'",
        "1, 1",
        """
        insert into readded values (10, 1, 1), (11, 1, 1);
        update readded set b = 2 where id = 1;
        alter table readded drop b;
        insert into readded values (12, 1);
        update readded set a = 2 where id = 2;
        alter table readded add b text;
        update readded set b = 'x' where id in (10, 12);
        update readded set a = 3 where id in (1, 11);
        insert into readded values (13, 1, 'y')""",
    ),
    "swapped": Case(
        "id int primary key, a text, b text",
        "id int primary key, a text, b text",
        "'a', 'b'",
        f"""
        alter table swapped alter b set storage external;
        insert into swapped values (10, 'a', {BIG}), (11, 'a', 'b');
        update swapped set a = 'c' where id = 1;
        begin;
        alter table swapped rename a to x;
        alter table swapped rename b to a;
        alter table swapped rename x to b;
        commit;
        update swapped set b = 'new' where id in (2, 10, 11);
        insert into swapped values (12, 'b', 'a')""",
    ),
    "renamed": Case(
        "id int primary key, a int",
        "id int primary key, a int, b int",
        "1",
        """
        insert into renamed values (10, 1);
        update renamed set a = 2 where id = 1;
        alter table renamed rename a to b;
        update renamed set b = 3 where id in (1, 10);
        insert into renamed values (11, 1);
        delete from renamed where id = 2""",
    ),
    "wider": Case(
        "id int primary key, a varchar(5), n numeric(6, 2)",
        "id bigint primary key, a text, n numeric",
        "'a', 1",
        """
        insert into wider values (10, 'a', 1.5);
        alter table wider alter a type text;
        update wider set a = 'longer than five', n = 2.25 where id in (1, 10);
        alter table wider alter n type numeric(8, 2);
        insert into wider values (11, 'b', 3.75)""",
    ),
    "within": Case(
        "id int primary key, a int",
        "id int primary key, a int, b int default 5",
        "1",
        """
        begin;
        insert into within values (10, 1), (11, 1);
        alter table within add b int default 6;
        update within set b = 7 where id in (1, 10);
        savepoint s;
        alter table within drop a;
        update within set b = 8 where id = 2;
        rollback to s;
        insert into within values (12, 1, 1);
        commit;
        update within set a = 3 where id in (2, 11)""",
    ),
    "whole": Case(
        "id int, a int",
        "id int, a int, b int",
        "1",
        """
        alter table whole replica identity full;
        insert into whole values (10, 1), (10, 1);
        update whole set a = 2 where id = 1;
        alter table whole add b int;
        insert into whole values (11, 1, 1);
        update whole set b = 3 where id = 11""",
    ),
    # Without a key all that is sent must be equal: 7 is, where the subscriber's default is that one too.
    "defaulted": Case(
        "id int, a int",
        "id int, a int, b int default 7",
        "1",
        """
        alter table defaulted replica identity full;
        insert into defaulted values (10, 1), (11, 1), (11, 1);
        alter table defaulted add b int default 7;
        update defaulted set a = 2 where id in (1, 10);
        delete from defaulted where id = 11;
        insert into defaulted values (12, 1, 1)""",
    ),
    # R8.9: what is not sent any more hides the row from a native worker, not from ours.
    "narrowed": Case(
        "id int, a int, b int",
        "id int, a int, b int",
        "1, 1",
        """
        alter table narrowed replica identity full;
        insert into narrowed values (10, 1, 1);
        update narrowed set b = 2 where id = 1;
        alter table narrowed drop a;
        update narrowed set b = 3 where id in (1, 2, 10)""",
    ),
    # R8.6, R8.7: only what comes after the change has the subscriber's key.
    "identified": Case(
        "a int not null unique, b int not null unique",
        "a int, b int primary key",
        "i",
        """
        insert into identified values (10, 10), (11, 11);
        alter table identified replica identity using index identified_b_key;
        update identified set a = 100 + b where b in (1, 10);
        delete from identified where b = 11""",
    ),
}


def test_every_change_is_applied_in_its_own_shape(twin: Twin) -> None:
    """R9.10, R8.2, R8.3: columns that a version does not send keep their value, or get their default."""
    for name, case in CASES.items():
        rows = f"select i, {case.values} from generate_series(1, 3) i"
        twin.publisher.run(f"create table {name} ({case.publisher}); insert into {name} {rows}")
    twin.publisher.run("create publication p for all tables with (publish = 'insert, update, delete')")
    target = ";".join(f"create table {name} ({case.subscriber})" for name, case in CASES.items())
    twin.subscribe("s", "p", tables=target)
    twin.sync()

    for case in CASES.values():
        twin.publish(case.changes)
    results = twin.sync()

    for name in CASES.keys() - {"narrowed"}:
        twin.rows("s", name)
    assert ours(twin, "table narrowed order by id") == [(1, 1, 3), (2, 1, 3), (3, 1, 1), (10, 1, 3)]
    assert twin.pairs["s"].native.rows("select count(*) from narrowed where b = 3") == [(0,)]
    assert dict(results["s"].conflicts) == {}
    # On the publisher every row that was there has 7; nobody sends it before the row is touched.
    added = {row[0]: row[2] for row in twin.rows("s", "added")}
    assert added == {1: 5, 2: 7, 13: 7, 10: 5, 11: 7, 12: 8, 20: 1, 21: 7}


def ours(twin: Twin, query: str) -> list[tuple[Any, ...]]:
    return twin.pairs["s"].ours.rows(query)


@pytest.mark.parametrize(
    ("change", "after", "missing", "columns"),
    [
        ("alter table t add b int", "update t set b = 3 where id = 1", "b", "id, a, b"),
        ("alter table t rename a to b", "update t set b = 3 where id = 1", "b", "id, b"),
        ("alter table t rename id to key", "update t set key = 3 where key = 1", "key", "key, a"),
    ],
    ids=["added", "renamed", "key renamed"],
)
def test_window_ends_where_the_subscriber_lacks_columns(
    twin: Twin, change: str, after: str, missing: str, columns: str
) -> None:
    """R8.1: as natively, at the first transaction that sends a column which the table lacks."""
    table = "create table t (id int primary key, a int)"
    twin.publisher.run(f"""
        {table};
        create table u (id int primary key);
        create publication p for all tables;
        insert into t values (1, 1), (2, 1)
    """)
    twin.subscribe("s", "p", tables=f"{table}; create table u (id int primary key)")
    twin.sync()
    twin.publish("update t set a = 2 where id = 1")
    twin.publish(f"{change};\nbegin;\ninsert into u values (1);\n{after};\ncommit")
    twin.publish("insert into u values (2)")

    for _ in range(2):
        (synced,) = twin.sync_ours()
        error = synced.replay.error or ""
        for named in ('table "public"."t"', f'missing column "{missing}"', "R8.1"):
            assert named in error
        # What came before the change is there; nothing of the transaction that does not fit.
        assert ours(twin, "table t order by 1") == [(1, 2), (2, 1)]
        assert ours(twin, "table u") == []

    for side in (twin.pairs["s"].ours, twin.pairs["s"].native):
        side.run(change)
    twin.sync()

    assert twin.rows("s", "t") == twin.publisher.rows(f"select {columns} from t order by t::text")
    assert twin.rows("s", "u") == [(1,), (2,)]


@pytest.mark.parametrize("policy", ["table", "subscription"])
@pytest.mark.parametrize("before", ["", "insert into t values (2, 2);"], ids=["alone", "after a row"])
def test_truncate_waits_for_the_columns_that_its_table_lacks(twin: Twin, before: str, policy: str) -> None:
    """R8.1: a native worker opens the table, and stops; the rows go once the table has the columns again."""
    tables = "create table t (id int primary key, a int); create table u (id int primary key)"
    twin.publisher.run(f"{tables}; create publication p for table t, u; insert into t values (1, 1)")
    twin.subscribe("s", "p", tables=tables, on_failure=policy)
    twin.sync()
    sides = twin.pairs["s"].ours, twin.pairs["s"].native
    for side in sides:
        side.run("alter table t rename column a to gone")
    twin.publish(f"{before} truncate t, u; insert into u values (9)")
    (synced,) = twin.sync_ours()
    assert 'missing column "a"' in (synced.replay.error or str(twin.states("s")))

    for side in sides:
        side.run("alter table t rename column gone to a")
    if policy == "table":
        resume(twin.config, "s", tables=[QualifiedName("public", "t")])
    twin.sync()

    assert twin.rows("s", "t") == []
    assert twin.rows("s", "u") == [(9,)]


def test_subscription_that_stops_early_does_not_stop_another(twin: Twin) -> None:
    """R8.1, R11.11: both are replayed from one decoding of the window."""
    table = "create table t (id int primary key, a int{})"
    twin.publisher.run(f"{table.format('')}; create publication p for table t")
    twin.subscribe("narrow", "p", tables=table.format(""), native=False)
    twin.subscribe("wide", "p", tables=table.format(", b int"), native=False)
    twin.sync_ours()
    twin.publish("""
        insert into t values (1, 1);
        alter table t add b int;
        insert into t values (2, 2, 2);
        update t set a = 3 where id = 1""")

    narrow, wide = twin.sync_ours()

    assert 'missing column "b"' in (narrow.replay.error or "")
    assert wide.replay.error is None
    assert twin.pairs["narrow"].ours.rows("table t") == [(1, 1)]
    assert twin.pairs["wide"].ours.rows("table t order by id") == [(1, 3, None), (2, 2, 2)]


def test_table_copied_in_between_does_not_need_earlier_columns(twin: Twin) -> None:
    """R7.8: its own position is after the change, that of the other table before it."""
    tables = "create table t (id int primary key, a int); create table u (id int primary key)"
    twin.publisher.run(f"{tables}; create publication p for all tables; insert into t values (1, 1)")
    twin.subscribe("s", "p", tables=tables, native=False)
    twin.sync_ours()
    twin.publish("""
        insert into u values (1);
        update t set a = 2;
        alter table t rename a to b;
        update t set b = 3""")
    twin.pairs["s"].ours.run("alter table t rename a to b")
    (synced,) = twin.sync_ours()
    assert 'missing column "a"' in (synced.replay.error or "")

    snapshot(twin.config, "s", tables=[QualifiedName("public", "t")])
    twin.publish("update t set b = 4")
    (synced,) = twin.sync_ours()

    assert synced.replay.error is None
    assert ours(twin, "table t") == [(1, 4)]
    assert ours(twin, "table u") == [(1,)]
