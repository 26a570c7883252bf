"""A table rewrite changes values without sending them: they are compared by key (R9.3, R11.9)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.explain import explain
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.replay import replay
from cdc_replay.commands.resume import resume
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.status import status
from cdc_replay.commands.validate import validate
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import TableCompared
from cdc_replay.model.table_state import Ready
from cdc_replay.subscriber import subscription_records, subscription_tables
from fixtures.log_records import warnings_of
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

T = "create table t (id int primary key, a int)"
T_ROWS = "insert into t values (1, 1), (2, 2)"
THERE = "create table t (id bigint primary key, a bigint, own text default 'own')"
WIDENED = "alter table t alter a type bigint"
HUNDREDFOLD = "alter table t alter a type bigint using a * 100"
RENUMBERED = "alter table t alter id type bigint using id + 100"


def ours(twin: Twin, table: str, name: str = "s") -> list[tuple[Any, ...]]:
    return twin.pairs[name].ours.rows(f"select * from {table} as t order by t::text")


def native(twin: Twin, table: str, name: str = "s") -> list[tuple[Any, ...]]:
    return twin.pairs[name].native.rows(f"select * from {table} as t order by t::text")


def on_both(twin: Twin, script: str, name: str = "s") -> None:
    """Statements of the subscriber's own users, on both subscribers."""
    for database in (twin.pairs[name].ours, twin.pairs[name].native):
        database.run(script)


def synced(twin: Twin, name: str = "s") -> list[TableCompared]:
    """Sync both; the tables that ours has compared."""
    (result,) = twin.sync_ours(name)
    assert result.replay.error is None, result.replay.error
    twin.native(name).wait()
    return list(result.compared)


def marks(twin: Twin, name: str = "s") -> list[str]:
    with twin.pairs[name].ours.connect() as connection:
        return [table.name for table in subscription_tables.rewritten_tables(connection, name)]


def test_rewritten_values_reach_the_rows_of_both_sides(twin: Twin, caplog: pytest.LogCaptureFixture) -> None:
    """R11.9: `own` is the subscriber's, and so is row 50, which no row of the publisher differs from."""
    twin.publisher.run(f"{T}; create publication p for table t; {T_ROWS}")
    twin.subscribe("s", "p", tables=THERE)
    twin.sync()
    on_both(twin, "update t set own = 'kept'; insert into t values (50, 50, 'mine')")
    twin.publish(f"insert into t values (3, 3);\n{HUNDREDFOLD};\ninsert into t values (4, 4)")
    twin.publish("delete from t where id = 2")
    caplog.set_level(logging.WARNING)

    (compared,) = synced(twin)

    assert (compared.table, compared.updated, compared.differing) == ("public.t", 2, 0)
    assert (compared.missing, compared.taken_out, compared.warning) == (0, 0, None)
    assert ours(twin, "t") == [(1, 100, "kept"), (3, 300, "own"), (4, 4, "own"), (50, 50, "mine")]
    assert [row[0] for row in native(twin, "t")] == [1, 3, 4, 50]
    assert (warnings_of(caplog), marks(twin)) == ([], [])
    assert isinstance(twin.states("s")["t"], Ready)

    twin.publish("update t set a = 7 where id = 1")
    assert synced(twin) == []
    assert ours(twin, "t")[0] == (1, 7, "kept")


def test_rewritten_key_leaves_rows_as_natively_and_counts_them(
    twin: Twin, caplog: pytest.LogCaptureFixture
) -> None:
    """R11.9: the UPDATE of id 101 matches no row, as natively; `refresh --reconcile` moves them."""
    twin.publisher.run(f"{T}; create publication p for table t; {T_ROWS}")
    twin.subscribe("s", "p", tables="create table t (id bigint primary key, a int)")
    twin.sync()
    twin.publish(f"update t set a = 10 where id = 1;\n{RENUMBERED}")
    twin.publish("update t set a = 20 where id = 101;\ninsert into t values (7, 7)")
    caplog.set_level(logging.WARNING)

    (compared,) = synced(twin)

    assert twin.rows("s", "t") == [(1, 10), (2, 2), (7, 7)]
    assert (compared.missing, compared.taken_out, compared.updated) == (2, 0, 0)
    assert warnings_of(caplog) == [f"subscription s: {compared.warning}"]
    assert "2 rows are published and not here; `cdc-replay refresh s --reconcile`" in str(compared.warning)

    refresh(twin.config, "s", reconcile=True)
    assert ours(twin, "t") == [(101, 20), (102, 2), (7, 7)]


def test_rows_of_a_rewritten_key_do_not_get_each_other_s_values(twin: Twin) -> None:
    """R11.9: id 2 is on both sides, and is not the same row."""
    twin.publisher.run(f"{T}; create publication p for table t; {T_ROWS}")
    twin.subscribe("s", "p", tables="create table t (id int primary key, a int)")
    twin.sync()
    twin.publish("alter table t alter id type int using id + 1")

    (compared,) = synced(twin)

    assert twin.rows("s", "t") == [(1, 1), (2, 2)]
    assert (compared.updated, compared.differing, compared.missing) == (0, 1, 1)
    assert "because its key may have been rewritten" in str(compared.warning)


def test_rows_whose_key_has_another_text_after_a_rewrite_get_their_values(twin: Twin) -> None:
    """R11.9: 1.0 and 1.00 are equal, and the same row."""
    twin.publisher.run("create table t (id numeric(8, 1) primary key, a int); insert into t values (1, 1)")
    twin.publisher.run("create publication p for table t")
    twin.subscribe("s", "p", tables="create table t (id numeric primary key, a int, own int default 5)")
    twin.sync()
    twin.publish("alter table t alter id type numeric(8, 2), alter a type bigint using a * 100")

    (compared,) = synced(twin)

    assert (compared.missing, compared.taken_out, compared.updated) == (0, 0, 1)
    assert twin.pairs["s"].ours.rows("select id::text, a, own from t") == [("1.00", 100, 5)]


def test_rewrite_in_a_skipped_transaction_is_compared(twin: Twin) -> None:
    """R8.5, R11.9: nothing of the transaction is applied, and its rewritten values are updated."""
    twin.publisher.run(f"{T}; create publication p for table t; {T_ROWS}")
    twin.subscribe("s", "p", tables=THERE, native=False)
    twin.sync_ours()
    twin.pairs["s"].ours.run("insert into t values (3, 0)")
    twin.publish(f"begin; {HUNDREDFOLD}; insert into t values (3, 3); commit")
    (result,) = twin.sync_ours()
    assert result.replay.error is not None
    with twin.pairs["s"].ours.connect() as connection:
        record = subscription_records.subscription_record(connection, "s")
    assert record is not None

    resume(twin.config, "s", skip=record.parked_transaction)

    assert marks(twin) == ["t"]
    (result,) = twin.sync_ours()
    assert [table.updated for table in result.compared] == [3]
    assert [row[:2] for row in ours(twin, "t")] == [(1, 100), (2, 200), (3, 3)]


@pytest.mark.parametrize(
    ("listed", "ddl"), [("", WIDENED), (" (id, a)", "alter table t add serial bigserial")]
)
def test_rewrite_without_changed_values_updates_nothing(
    twin: Twin, caplog: pytest.LogCaptureFixture, listed: str, ddl: str
) -> None:
    """R8.2: integer to bigint, and a column that is not published."""
    twin.publisher.run(f"{T}; create publication p for table t{listed}; {T_ROWS}")
    twin.subscribe("s", "p", tables=THERE)
    twin.sync()
    on_both(twin, "update t set own = 'kept'; insert into t values (50, 50)")
    twin.publish(f"{ddl};\nupdate t set a = 5 where id = 2")
    caplog.set_level(logging.WARNING)

    (compared,) = synced(twin)

    assert (compared.updated, compared.differing, compared.missing) == (0, 0, 0)
    assert warnings_of(caplog) == []
    assert twin.rows("s", "t") == [(1, 1, "kept"), (2, 5, "kept"), (50, 50, "own")]


@pytest.mark.parametrize("filtered", ["id", "a"])
def test_two_subscriptions_that_feed_one_table_leave_each_other_s_rows(twin: Twin, filtered: str) -> None:
    """R9.3: a row between two filters has the values of the subscription that publishes it."""
    twin.publisher.run(f"{T}; create publication low for table t where ({filtered} < 100)")
    twin.publisher.run(f"create publication high for table t where ({filtered} >= 100)")
    twin.publisher.run("insert into t values (1, 1), (2, 99), (150, 150)")
    twin.subscribe("low", "low", tables=THERE)
    twin.subscribe_beside("low", "high", "high")
    twin.sync()
    twin.publish("alter table t add c float default random()")
    on_both(twin, "alter table t add c float; insert into t values (500, 500)", "low")
    twin.publish("insert into t values (3, 3), (160, 160)")

    twin.sync("low")
    twin.sync("high")
    twin.sync()

    assert [row[0] for row in ours(twin, "t", "low")] == [1, 150, 160, 2, 3, 500]
    assert [row[:3] for row in ours(twin, "t", "low")] == [row[:3] for row in native(twin, "t", "low")]
    updated_rows = twin.pairs["low"].ours.rows("select id, c from t where id < 500 order by id")
    assert updated_rows == twin.publisher.rows("select id, c from t order by id")


def test_rows_that_enter_or_leave_the_filter_by_a_rewrite_are_counted(twin: Twin) -> None:
    """R9.12: the filter is the same before and after the rewrite."""
    twin.publisher.run(f"{T}; create publication p for table t where (a > 1)")
    twin.publisher.run(f"{T_ROWS}, (3, 3), (4, 4)")
    twin.subscribe("s", "p", tables="create table t (id int primary key, a int)")
    twin.sync()
    twin.pairs["s"].ours.run("insert into t values (50, 50)")
    # A type that a filter reads cannot change.
    twin.publish(
        "begin; alter publication p drop table t; alter table t alter a type bigint using 4 - a;"
        " alter publication p add table t where (a > 1); commit"
    )

    (result,) = twin.sync_ours()

    assert result.replay.error is None
    (compared,) = result.compared
    assert [row[0] for row in ours(twin, "t")] == [2, 3, 4, 50]
    assert (compared.missing, compared.taken_out) == (1, 2)
    assert "cdc-replay refresh s --reconcile" in str(compared.warning)


def test_rows_that_stay_by_postgresql_s_rules_stay_after_a_rewrite(twin: Twin) -> None:
    """R11.6, R11.14, R2.2: dropped and detached partitions; DELETE and TRUNCATE are not published."""
    twin.publisher.run(
        "create table r (id int, part text, a int, primary key (id, part)) partition by list (part);"
        "create table r_n partition of r for values in ('n');"
        "create table r_s partition of r for values in ('s');"
        "create table r_w partition of r for values in ('w');"
        "create table d (id int primary key, a int);"
        "create publication p for table r with (publish_via_partition_root = true);"
        "create publication q for table d with (publish = 'insert, update');"
        "insert into r values (1, 'n', 1), (2, 's', 2), (3, 'w', 3);"
        "insert into d values (1, 1), (2, 2), (3, 3)"
    )
    tables = (
        "create table r (id int, part text, a bigint, c float, primary key (id, part));"
        "create table d (id int primary key, a bigint, c float)"
    )
    twin.subscribe("s", "p", "q", tables=tables)
    twin.sync()
    twin.publish("drop table r_s;\nalter table r detach partition r_w;\ndelete from d where id = 1")
    twin.publish("truncate d;\ninsert into d values (4, 4)")
    twin.publish("alter table r add c float default random();\nalter table d add c float default random()")
    twin.publish("alter table r alter a type bigint;\nalter table d alter a type bigint using a * 10")

    tables_compared = synced(twin)

    assert [table.table for table in tables_compared] == ["public.d", "public.r"]
    assert [table.warning for table in tables_compared] == [None, None]
    assert [row[:3] for row in ours(twin, "r")] == [(1, "n", 1), (2, "s", 2), (3, "w", 3)]
    assert [row[:3] for row in ours(twin, "r")] == [row[:3] for row in native(twin, "r")]
    assert [row[:2] for row in ours(twin, "d")] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert [row[0] for row in native(twin, "d")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("publication", "options", "before", "because"),
    [
        ("for table t", {"copy_data": False}, "", "copy_data is false"),
        ("for table t", {"origin": "none"}, "", "an UPDATE of public.t on the publisher"),
        ("for table t with (publish = 'insert')", {}, "", "the publications do not publish update"),
        (
            "for table t where (id < 90)",
            {},
            "alter publication p set table t where (id > 1)",
            "its row filter",
        ),
    ],
)
def test_changes_continue_as_natively_if_values_may_differ(
    twin: Twin, publication: str, options: dict[str, object], before: str, because: str
) -> None:
    """R2.2, R7.11, R8.19, R9.12: nothing is updated, and differing rows are counted."""
    twin.publisher.run(f"{T}; create publication p {publication}; {T_ROWS}")
    twin.subscribe("s", "p", tables=THERE, native=True, **options)
    twin.sync()
    on_both(twin, "insert into t values (50, 50), (51, 51); update t set a = 8 where id = 2")
    if before:
        twin.publish(before)
    twin.publish(f"insert into t values (3, 3);\n{HUNDREDFOLD};\ninsert into t values (4, 30000000000)")

    (compared,) = synced(twin)

    assert (twin.rows("s", "t")[-2:], compared.updated) == ([(50, 50, "own"), (51, 51, "own")], 0)
    assert (3, 3, "own") in twin.rows("s", "t")
    assert compared.differing >= 1
    assert because in str(compared.warning)
    assert marks(twin) == []


def test_whole_rows_are_not_paired(twin: Twin) -> None:
    """R8.3: a table without a key; the subscriber's rows and older rows stay."""
    twin.publisher.run("create table t (a int); alter table t replica identity full")
    twin.publisher.run("create publication p for table t; insert into t values (1), (2)")
    twin.subscribe("s", "p", tables="create table t (a bigint)")
    twin.sync()
    on_both(twin, "insert into t values (50)")
    twin.publish(WIDENED)
    (compared,) = synced(twin)
    assert compared.warning is None
    twin.publish("alter table t alter a type bigint using a * 10;\ninsert into t values (3)")

    (compared,) = synced(twin)

    assert twin.rows("s", "t") == [(1,), (2,), (3,), (50,)]
    assert compared.missing == 2
    assert "because its rows have no key" in str(compared.warning)


def test_changes_before_a_rewrite_are_applied_before_it(twin: Twin) -> None:
    """R8.1, R11.9: a row under the old name of a renamed column, all in one window."""
    twin.publisher.run("create table t (id int primary key, b text); create publication p for table t")
    twin.publisher.run("insert into t values (1, 'one')")
    twin.subscribe("s", "p", tables="create table t (id int primary key, b text, c bigint)")
    twin.sync()
    twin.publish("insert into t values (2, 'two')")
    twin.publish("alter table t drop b;\nalter table t add c int;\nupdate t set c = 1 where id = 1")
    twin.publish("alter table t alter c type bigint;\ninsert into t values (3, 3)")

    synced(twin)

    assert twin.rows("s", "t") == [(1, "one", 1), (2, "two", None), (3, None, 3)]


def test_column_renamed_before_a_rewrite_keeps_earlier_values(twin: Twin) -> None:
    """R8.1, R11.9: what came under `b` stays there; under `d` comes what is published by that name."""
    twin.publisher.run("create table t (id int primary key, b text); create publication p for table t")
    twin.subscribe("s", "p", tables="create table t (id int primary key, b text, d text, c bigint)")
    twin.sync()
    twin.publish("insert into t values (1, 'one')")
    twin.publish("alter table t rename b to d;\nalter table t add c int;\ninsert into t values (2, 'two', 2)")
    twin.publish("alter table t alter c type bigint;\nupdate t set c = 3 where id = 2")

    synced(twin)

    assert [row[1] for row in ours(twin, "t")] == [row[1] for row in native(twin, "t")] == ["one", None]
    assert ours(twin, "t")[1] == native(twin, "t")[1] == (2, None, "two", 3)


def test_replay_marks_the_table_and_the_next_snapshot_compares_it(twin: Twin) -> None:
    """R11.9: replay alone continues as natively; `status` and `explain` report the table."""
    twin.publisher.run(
        f"{T}; create table u (id int primary key); create publication p for table t, u; {T_ROWS}"
    )
    twin.subscribe("s", "p", tables=f"{THERE}; create table u (id int primary key)", native=False)
    twin.sync_ours()
    twin.publish(f"{HUNDREDFOLD};\ninsert into t values (3, 3);\n{HUNDREDFOLD};\ninsert into u values (1)")
    capture(twin.config, "pub")

    (replayed,) = replay(twin.config, ["s"])

    assert replayed.error is None
    assert [row[:2] for row in ours(twin, "t")] == [(1, 1), (2, 2), (3, 3)]
    assert ours(twin, "u") == [(1,)]
    assert isinstance(twin.states("s")["t"], Ready)
    notices = {table.table: table.notice for table in status(twin.config).tables}
    assert "`cdc-replay snapshot s` updates the rows that differ" in str(notices["public.t"])
    assert notices["public.u"] is None
    assert [warning for warning in explain(twin.config, "s").warnings if "R11.9" in warning]
    validated = validate(twin.config, "s")
    assert not validated.success
    assert "its values have not been compared since" in str(validated.error)

    (compared,) = snapshot(twin.config, "s").compared

    assert compared.updated == 3
    assert [row[:2] for row in ours(twin, "t")] == [(1, 10000), (2, 20000), (3, 300)]
    assert validate(twin.config, "s").success
    assert {table.notice for table in status(twin.config).tables} == {None}


@pytest.mark.parametrize("copies", [True, False])
def test_refresh_compares_and_copy_clears_a_rewrite(twin: Twin, copies: bool) -> None:
    twin.publisher.run(f"{T}; create publication p for table t; {T_ROWS}")
    twin.subscribe("s", "p", tables=THERE, native=False)
    twin.sync_ours()
    twin.publish(HUNDREDFOLD)
    capture(twin.config, "pub")
    replay(twin.config, ["s"])
    assert marks(twin) == ["t"]

    if copies:
        assert snapshot(twin.config, "s", tables=[QualifiedName("public", "t")]).compared == ()
    else:
        assert [table.updated for table in refresh(twin.config, "s").snapshot.compared] == [2]

    assert [row[:2] for row in ours(twin, "t")] == [(1, 100), (2, 200)]
    assert marks(twin) == []


def test_table_that_cannot_be_compared_continues_and_is_compared_later(
    twin: Twin, caplog: pytest.LogCaptureFixture
) -> None:
    """R8.1: the subscriber lacks the new column until somebody adds it; nothing natively stops for that."""
    twin.publisher.run(f"{T}; create publication p for table t; {T_ROWS}")
    twin.subscribe("s", "p", tables=THERE)
    twin.sync()
    twin.publish("alter table t add c bigserial")

    assert synced(twin) == []
    assert twin.rows("s", "t") == [(1, 1, "own"), (2, 2, "own")]
    assert "could not be compared and will be compared again" in caplog.text
    assert marks(twin) == ["t"]

    on_both(twin, "alter table t add c bigint")
    assert [result.updated for result in synced(twin)] == [2]
    assert ours(twin, "t") == [(1, 1, "own", 1), (2, 2, "own", 2)]


def test_values_exchanged_between_rows_are_updated_under_a_unique_constraint(twin: Twin) -> None:
    """R8.2: rows of two partitions exchange them, and one moves to the other partition here."""
    twin.publisher.run("create table t (id int primary key, a int unique); create publication p for table t")
    twin.publisher.run(f"{T_ROWS}, (3, 3)")
    there = (
        "create table t (id int, a bigint unique, own text default 'own') partition by range (a);"
        "create table t1 partition of t for values from (0) to (2);"
        "create table t2 partition of t for values from (2) to (9)"
    )
    twin.subscribe("s", "p", tables=there, native=False)
    twin.sync_ours()
    twin.pairs["s"].ours.run("update t set own = 'kept ' || id")
    twin.publish("alter table t alter a type bigint using 4 - a")

    ((compared,),) = [result.compared for result in twin.sync_ours()]

    assert compared.updated == 2
    assert ours(twin, "t") == [(1, 3, "kept 1"), (2, 2, "kept 2"), (3, 1, "kept 3")]
