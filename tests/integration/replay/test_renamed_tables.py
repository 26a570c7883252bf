"""A subscribed table is a table of the subscriber, not a name (R7.12, R8.1), beside native.

Native finds the target of a change by the published name, and decides by its oid whether it is subscribed to.
"""

from __future__ import annotations

from typing import Any

import pytest

from cdc_replay.commands.backfill import backfill
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.replay import replay
from cdc_replay.commands.status import status
from cdc_replay.commands.validate import validate
from cdc_replay.errors import CdcReplayError
from fixtures.native import wait_for
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLES = """
create schema s;
create table t (id int primary key, v text);
create table s.t (id int primary key, v text);
create table moving (id int primary key, v text);
create table root (id int primary key, v text) partition by range (id);
create table low partition of root for values from (0) to (100);
create table high partition of root for values from (100) to (200);
create table leafy (id int primary key, v text) partition by range (id);
create table leaf partition of leafy for values from (0) to (100)
"""

ROWS = """
insert into t values (1, 'a'), (2, 'a');
insert into s.t values (1, 's'), (2, 's');
insert into moving values (1, 'm'), (2, 'm');
insert into root values (1, 'r'), (101, 'r');
insert into leafy values (1, 'l'), (2, 'l')
"""

PUBLICATION = """
create publication p for table t, s.t, moving, root with (publish_via_partition_root = true);
create publication q for table leaf
"""

RENAMES = """
alter table t rename to u;
alter schema s rename to s2;
alter table moving set schema s2;
alter table root rename to trunk;
alter table leaf rename to leaflet
"""

ALIKE = {"u": "t", "s2.t": "s.t", "s2.moving": "moving", "trunk": "root", "leaflet": "leaf"}


def on_subscribers(twin: Twin, name: str, script: str) -> None:
    pair = twin.pairs[name]
    for database in (pair.ours, pair.native):
        database.run(script)


def subscribed(twin: Twin, *, tables: str = TABLES, rows: str = ROWS, **options: Any) -> None:
    twin.publisher.run(tables)
    twin.publisher.run(rows)
    twin.publisher.run(PUBLICATION if tables is TABLES else "create publication p for all tables")
    twin.subscribe("sub", *(("p", "q") if tables is TABLES else ("p",)), tables=tables, **options)
    twin.sync()


def changed(tables: tuple[str, ...], key: int) -> str:
    return ";\n".join(
        f"insert into {table} values ({key}, 'new'); update {table} set v = 'after {key}' where id = 1;"
        f" delete from {table} where id = {key - 1}"
        for table in tables
    )


def assert_native_stops(twin: Twin, name: str) -> None:
    native = twin.pairs[name].native
    query = "select apply_error_count > 0 from pg_stat_subscription_stats where subname like 'sub%'"
    wait_for(lambda: native.rows(query) == [(True,)], "an error of native")


def assert_ours_stops(twin: Twin, name: str, table: str) -> str:
    """A sync fails and says which table is missing; returns the error."""
    [result] = twin.sync_ours(name)
    text = result.replay.error or ""
    assert f"table {table}: the table does not exist" in text
    assert status(twin.config).subscriptions[0].error is not None
    return text


def test_table_renamed_alike_on_both_sides_continues(twin: Twin) -> None:
    subscribed(twin)
    on_subscribers(twin, "sub", RENAMES)
    twin.publish(RENAMES)
    twin.publish(changed(tuple(ALIKE), 3))
    twin.sync()
    for table in ALIKE:
        assert (3, "new") in twin.rows("sub", table), table
    assert set(twin.states("sub")) == {"u", "t", "moving", "trunk", "leaflet"}
    # Nothing is new to a refresh, nothing is copied again, and nothing is forgotten.
    result = refresh(twin.config, "sub")
    twin.native("sub").refresh()
    assert (result.added, result.removed, result.snapshot.rows) == ((), (), 0)
    twin.publish(changed(tuple(ALIKE), 4))
    twin.sync()
    for table in ALIKE:
        twin.rows("sub", table)


def test_changes_under_both_names_in_one_window_reach_the_renamed_table(twin: Twin) -> None:
    # Native has applied what came under the old names before the subscriber is renamed.
    subscribed(twin)
    twin.publish(changed(tuple(ALIKE.values()), 3))
    twin.native("sub").wait()
    twin.publish(RENAMES)
    on_subscribers(twin, "sub", RENAMES)
    twin.publish(changed(tuple(ALIKE), 4))
    twin.sync()
    for table in ALIKE:
        assert (4, "new") in twin.rows("sub", table)


TWO = "create table a (id int primary key, v text); create table b (id int primary key, v text)"
TWO_ROWS = "insert into a values (1, 'a'), (2, 'a'); insert into b values (1, 'b'), (2, 'b')"
EXCHANGE = "begin; alter table a rename to c; alter table b rename to a; alter table c rename to b; commit"


def test_two_tables_exchange_their_names_on_both_sides(twin: Twin) -> None:
    subscribed(twin, tables=TWO, rows=TWO_ROWS)
    twin.publish("update a set v = 'a before' where id = 1;\nupdate b set v = 'b before' where id = 1")
    twin.native("sub").wait()
    on_subscribers(twin, "sub", EXCHANGE)
    twin.publish(EXCHANGE.replace("; ", ";\n"))
    twin.publish("update a set v = 'after, in a' where id = 2;\ninsert into b values (3, 'after, in b')")
    twin.sync()
    assert twin.rows("sub", "a") == [(1, "b before"), (2, "after, in a")]
    assert twin.rows("sub", "b") == [(1, "a before"), (2, "a"), (3, "after, in b")]
    assert refresh(twin.config, "sub").added == ()
    twin.publish("delete from a where id = 1;\ndelete from b where id = 1")
    twin.sync()
    assert twin.rows("sub", "a") == [(2, "after, in a")]
    assert twin.rows("sub", "b") == [(2, "a"), (3, "after, in b")]


def test_two_tables_exchange_their_names_on_the_publisher_alone(twin: Twin) -> None:
    subscribed(twin, tables=TWO, rows=TWO_ROWS)
    twin.publish(EXCHANGE.replace("; ", ";\n"))
    twin.publish("update a set v = 'was b' where id = 2;\ninsert into b values (3, 'was a')")
    twin.sync()
    assert twin.rows("sub", "a") == [(1, "a"), (2, "was b")]
    assert twin.rows("sub", "b") == [(1, "b"), (2, "b"), (3, "was a")]


@pytest.mark.parametrize("policy", ["subscription", "table"])
def test_renamed_on_the_publisher_alone_stops_until_the_subscriber_follows(twin: Twin, policy: str) -> None:
    subscribed(twin, tables=TWO, rows=TWO_ROWS, on_failure=policy)
    twin.publish("insert into b values (3, 'before')")
    twin.publish("alter table a rename to c;\ninsert into c values (3, 'c');\ninsert into b values (4, 'b')")
    assert_native_stops(twin, "sub")
    assert "is parked before the transaction" in assert_ours_stops(twin, "sub", '"public"."c"')
    # Everything before it is applied, and nothing after it.
    assert twin.rows("sub", "b") == [(1, "b"), (2, "b"), (3, "before")]
    assert_ours_stops(twin, "sub", '"public"."c"')
    on_subscribers(twin, "sub", "alter table a rename to c")
    twin.sync()
    assert twin.rows("sub", "c") == [(1, "a"), (2, "a"), (3, "c")]
    assert twin.rows("sub", "b")[-1] == (4, "b")


def test_renamed_on_the_subscriber_alone_stops(twin: Twin) -> None:
    subscribed(twin, tables=TWO, rows=TWO_ROWS)
    on_subscribers(twin, "sub", "alter table a rename to c")
    twin.publish("insert into a values (3, 'a')")
    assert_native_stops(twin, "sub")
    assert_ours_stops(twin, "sub", '"public"."a"')
    on_subscribers(twin, "sub", "alter table c rename to a")
    twin.sync()
    assert twin.rows("sub", "a") == [(1, "a"), (2, "a"), (3, "a")]


def test_the_only_table_is_dropped_on_the_subscriber(twin: Twin) -> None:
    table_ddl = "create table a (id int primary key, v text)"
    subscribed(twin, tables=table_ddl, rows="insert into a values (1, 'a')")
    on_subscribers(twin, "sub", "drop table a")
    twin.publish("insert into a values (2, 'a')")
    assert_native_stops(twin, "sub")
    assert_ours_stops(twin, "sub", '"public"."a"')
    on_subscribers(twin, "sub", table_ddl)
    twin.publish("insert into a values (3, 'a')")
    twin.sync()
    assert twin.rows("sub", "a") == []
    refresh(twin.config, "sub")
    twin.native("sub").refresh()
    twin.sync()
    assert twin.rows("sub", "a") == [(1, "a"), (2, "a"), (3, "a")]


def test_new_published_table_that_the_subscriber_lacks_stops(twin: Twin) -> None:
    subscribed(twin, tables=TWO, rows=TWO_ROWS)
    twin.publish("create table c (id int primary key);\ninsert into c values (1)")
    assert_native_stops(twin, "sub")
    assert_ours_stops(twin, "sub", '"public"."c"')
    on_subscribers(twin, "sub", "create table c (id int primary key)")
    # There, and not subscribed to: passed over.
    results = twin.sync()
    assert results["sub"].passed_over == ("public.c",)
    assert twin.rows("sub", "c") == []


def test_table_recreated_on_the_subscriber_is_skipped_until_copied(
    twin: Twin,
) -> None:
    subscribed(twin, tables=TWO, rows=TWO_ROWS)
    anew = "drop table a; create table a (id int primary key, v text); insert into a values (50, 'own')"
    on_subscribers(twin, "sub", anew)
    twin.publish(
        "insert into a values (3, 'a');\nupdate a set v = 'x' where id = 1;\ninsert into b values (3, 'b')"
    )
    results = twin.sync()
    assert twin.rows("sub", "a") == [(50, "own")]
    assert twin.rows("sub", "b")[-1] == (3, "b")
    assert results["sub"].passed_over == ("public.a",)
    [table] = [table for table in status(twin.config).tables if table.table == "public.a"]
    assert "refresh" in table.state
    assert refresh(twin.config, "sub").added == ("public.a",)
    twin.native("sub").refresh()
    twin.publish("insert into a values (4, 'a')")
    twin.sync()
    assert twin.rows("sub", "a") == [(1, "x"), (2, "a"), (3, "a"), (4, "a"), (50, "own")]


def test_copy_into_a_recreated_table_survives_conflicts(twin: Twin) -> None:
    subscribed(twin, tables=TWO, rows=TWO_ROWS)
    twin.pairs["sub"].ours.run(
        "drop table a; create table a (id int primary key, v text); insert into a values (1, 'own')"
    )
    with pytest.raises(CdcReplayError, match=r"\(id\)=\(1\)"):
        refresh(twin.config, "sub")
    assert twin.pairs["sub"].ours.rows("select * from a") == [(1, "own")]
    twin.pairs["sub"].ours.run("delete from a")
    twin.sync()
    assert twin.rows("sub", "a") == [(1, "a"), (2, "a")]


def test_table_recreated_on_both_sides(twin: Twin) -> None:
    subscribed(twin, tables=TWO, rows=TWO_ROWS)
    anew = "drop table a; create table a (id int primary key, v text)"
    on_subscribers(twin, "sub", anew)
    twin.publish(anew.replace("; ", ";\n"))
    twin.publish("insert into a values (7, 'new')")
    results = twin.sync()
    assert twin.rows("sub", "a") == []
    assert results["sub"].passed_over == ("public.a",)
    refresh(twin.config, "sub")
    twin.native("sub").refresh()
    twin.sync()
    assert twin.rows("sub", "a") == [(7, "new")]


def test_table_dropped_on_the_subscriber_and_from_the_publication(twin: Twin) -> None:
    twin.publisher.run(TWO)
    twin.publisher.run(TWO_ROWS)
    twin.publisher.run("create publication p for table a, b")
    twin.subscribe("sub", "p", tables=TWO)
    twin.sync()
    on_subscribers(twin, "sub", "drop table a")
    twin.publish(
        "alter publication p drop table a;\ninsert into a values (3, 'a');\ninsert into b values (3, 'b')"
    )
    twin.sync()
    assert twin.rows("sub", "b")[-1] == (3, "b")
    assert refresh(twin.config, "sub").removed == ("public.a",)
    assert set(twin.states("sub")) == {"b"}
    results = replay(twin.config, ["sub"])
    assert results[0].error is None


def test_lagging_native_subscription_stops_at_the_old_name_and_ours_does_not(twin: Twin) -> None:
    subscribed(twin, tables=TWO, rows=TWO_ROWS)
    twin.native("sub").pause()
    twin.publish("insert into a values (3, 'a');\nalter table a rename to c;\ninsert into c values (4, 'c')")
    on_subscribers(twin, "sub", "alter table a rename to c")
    twin.sync_ours("sub")
    assert twin.pairs["sub"].ours.rows("select id from c order by id") == [(1,), (2,), (3,), (4,)]
    twin.native("sub").resume()
    assert_native_stops(twin, "sub")
    twin.pairs["sub"].native.run("alter table c rename to a")
    native = twin.pairs["sub"].native
    wait_for(lambda: native.rows("select count(*) from a") == [(3,)], "the change under the old name")
    native.run("alter table a rename to c")
    twin.sync()
    assert len(twin.rows("sub", "c")) == 4


def test_backfill_reaches_a_table_under_its_old_name(twin: Twin) -> None:
    subscribed(twin, tables=TWO, rows=TWO_ROWS)
    begin = twin.position()
    twin.publish("update a set v = 'x' where id = 1")
    twin.sync()
    on_subscribers(twin, "sub", "alter table a rename to c")
    twin.publish("alter table a rename to c;\ninsert into c values (3, 'c')")
    end = twin.position()
    twin.sync()
    twin.pairs["sub"].ours.run("delete from c where id = 1")
    backfill(twin.config, "sub", str(begin), str(end))
    assert twin.rows("sub", "c") == [(1, "x"), (2, "a"), (3, "c")]


def test_validation_fails_for_a_table_recreated_on_the_subscriber(twin: Twin) -> None:
    subscribed(twin, tables=TWO, rows=TWO_ROWS)
    on_subscribers(twin, "sub", "drop table a; create table a (id int primary key, v text)")
    result = validate(twin.config, "sub")
    assert not result.success
    assert "refresh" in (result.error or "")
