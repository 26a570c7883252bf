"""What each command promises beside equal rows: positions, failures, definitions that change, traces left."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from cdc_replay.capture.ddl.event_triggers import EVENT_TRIGGERS
from cdc_replay.capture.publications import OUR_PUBLICATIONS
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.capture import capture
from cdc_replay.commands.explain import BY_POSITION, BY_PULL, explain
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.replay import replay
from cdc_replay.commands.setup import setup
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.status import status
from cdc_replay.commands.sync import sync
from cdc_replay.commands.teardown import teardown
from cdc_replay.commands.validate import validate
from cdc_replay.errors import (
    ChangeLogMissing,
    InvalidConfiguration,
    PublisherNotReady,
    SlotMissing,
    SubscriberNotReady,
)
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Ready
from cdc_replay.monitoring.subscription_details import subscription_details
from cdc_replay.subscriber.history import TimeRange
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLES = "create table t (id int primary key, a int); create table u (id int primary key, a int)"
T, U = QualifiedName("public", "t"), QualifiedName("public", "u")


def applied(twin: Twin, name: str, table: str) -> Lsn:
    """The applied LSN of a table that must be ready."""
    table_state = twin.states(name)[table]
    assert isinstance(table_state, Ready)
    return table_state.applied_lsn


def test_failed_subscription_stops_no_other(twin: Twin) -> None:
    """An existing row is a conflict for one of three; its window is applied once the row is deleted."""
    twin.publisher.run(f"{TABLES}; create publication p for table t, u")
    for name in ("first", "second", "third"):
        twin.subscribe(name, "p", tables=TABLES, native=False)
    twin.sync_ours()
    before = applied(twin, "second", "t")
    twin.pairs["second"].ours.run("insert into t values (2, 0)")
    twin.publish("insert into t values (1, 1), (2, 2);\ninsert into u values (1, 1)")
    capture(twin.config, "pub")

    results = replay(twin.config, ["first", "second", "third"])

    assert [result.subscription for result in results] == ["first", "second", "third"]
    assert [result.error is None for result in results] == [True, False, True]
    assert "(id)=(2)" in (results[1].error or "")
    for name in ("first", "third"):
        assert twin.pairs[name].ours.rows("table t order by id") == [(1, 1), (2, 2)]
    second = twin.pairs["second"].ours
    assert (second.rows("table t"), second.rows("table u")) == ([(2, 0)], [])
    assert applied(twin, "second", "t") == applied(twin, "second", "u") == before
    report = {result.subscription: result for result in status(twin.config).subscriptions}
    assert (report["second"].last_replay or "").startswith("failed")
    assert (report["second"].lag_bytes or 0) > 0
    assert (report["second"].lag_seconds or 0) > 0
    assert (report["first"].last_replay or "").startswith("succeeded")
    assert report["first"].lag_seconds == 0

    second.run("delete from t")
    (again,) = replay(twin.config, ["second"])
    assert again.error is None
    assert again.applied == {"insert": 3, "update": 0, "delete": 0, "truncate": 0}
    assert second.rows("table t order by id") == [(1, 1), (2, 2)]


def test_a_table_that_was_copied_again_is_never_replayed_from_before_its_copy(twin: Twin) -> None:
    """A resync ends ahead of the log; a replay to the log's end must leave that table where it is."""
    twin.publisher.run(f"{TABLES}; insert into t values (1, 1); create publication p for table t, u")
    twin.subscribe("s", "p", tables=TABLES)
    twin.sync()
    twin.pairs["s"].ours.run("delete from t; insert into t values (77, 77)")
    twin.publish(
        "insert into t values (2, 2);\nupdate t set a = 10 where id = 1;\ninsert into u values (1, 1)"
    )

    copied = snapshot(twin.config, "s", tables=[T])
    assert [(table.table, table.rows) for table in copied.tables] == [("public.t", 2)]
    point = applied(twin, "s", "t")
    assert copied.to_lsn == point > applied(twin, "s", "u")
    (result,) = replay(twin.config, ["s"])
    assert result.error is None
    assert applied(twin, "s", "t") == point

    twin.publish("insert into t values (3, 3)")
    replayed = twin.sync()["s"]
    assert replayed.applied["insert"] == 2  # t: 3; u: 1
    assert twin.rows("s", "t") == [(1, 10), (2, 2), (3, 3)]
    assert twin.rows("s", "u") == [(1, 1)]


def test_first_copy_of_a_named_table_leaves_the_others_waiting(twin: Twin) -> None:
    twin.publisher.run(f"{TABLES}; insert into t values (1, 1); insert into u values (1, 1)")
    twin.publisher.run("create publication p for table t, u")
    twin.subscribe("s", "p", tables=TABLES)

    snapshot(twin.config, "s", tables=[T])
    assert twin.pairs["s"].ours.rows("table u") == []
    with pytest.raises(SubscriberNotReady, match=r"has no table public\.v"):
        snapshot(twin.config, "s", tables=[QualifiedName("public", "v")])
    twin.sync()
    assert twin.rows("s", "t") == twin.rows("s", "u") == [(1, 1)]


def test_refresh_adds_new_tables_and_removes_dropped_ones(twin: Twin) -> None:
    """R7.12: ignored until then; R7.13: rows of a table that leaves stay; copy_data = false: from now on."""
    twin.publisher.run(f"{TABLES}; create publication p for table t")
    for name, options in {"copying": {}, "not_copying": {"copy_data": False}}.items():
        twin.subscribe(name, "p", tables=TABLES, **options)
    twin.sync()
    twin.publish("insert into t values (1, 1)")
    twin.sync()
    twin.publish("alter publication p add table u;\ninsert into u values (1, 1)")
    twin.sync()
    assert twin.rows("copying", "u") == twin.rows("not_copying", "u") == []
    with pytest.raises(SubscriberNotReady, match=r"(?s)is not in subscription .*refresh copying") as caught:
        snapshot(twin.config, "copying", tables=[U])
    assert caught.value.rule == "R7.12"

    for name, copy_data in {"copying": True, "not_copying": False}.items():
        result = refresh(twin.config, name)
        assert (result.added, result.removed) == (("public.u",), ())
        twin.native(name).refresh(copy_data=copy_data)
        twin.native(name).wait()
        assert refresh(twin.config, name).added == ()
    twin.publish("insert into u values (2, 2);\nupdate u set a = 5 where id = 1")
    twin.sync()
    assert twin.rows("copying", "u") == [(1, 5), (2, 2)]
    assert twin.rows("not_copying", "u") == [(2, 2)]

    twin.publish("alter publication p drop table t")
    for name in twin.pairs:
        assert refresh(twin.config, name).removed == ("public.t",)
        twin.native(name).refresh()
    twin.publish("insert into t values (9, 9);\ninsert into u values (9, 9)")
    twin.sync()
    for name in twin.pairs:
        assert twin.states(name).keys() == {"u"}
        assert (9, 9) in twin.rows(name, "u")
        assert (9, 9) not in twin.rows(name, "t")


@pytest.mark.parametrize("publication", ["", " for tables in schema empty"])
def test_publications_may_have_no_tables_yet_or_any_more(twin: Twin, publication: str) -> None:
    """R7.12: what enters them is not subscribed to before a refresh, as where there were tables before."""
    later = "create table empty.t (id int primary key, a int)"
    twin.publisher.run(f"create schema empty; create publication p{publication}")
    twin.subscribe("s", "p", tables=f"create schema empty; {later}")
    twin.sync()
    assert twin.states("s") == {}
    twin.publish(f"{later};\ninsert into empty.t values (1, 1)")
    if not publication:
        twin.publish("alter publication p add table empty.t;\ninsert into empty.t values (2, 2)")
    twin.sync()
    assert twin.rows("s", "empty.t") == []

    refresh(twin.config, "s")
    twin.native("s").refresh()
    twin.publish("insert into empty.t values (3, 3)")
    twin.sync()
    assert (3, 3) in twin.rows("s", "empty.t")

    leaves = "drop table empty.t" if not publication else "drop tables in schema empty"
    twin.publish(f"alter publication p {leaves};\ninsert into empty.t values (4, 4)")
    refresh(twin.config, "s")
    twin.native("s").refresh()
    twin.sync()
    assert twin.states("s") == {}
    assert (4, 4) not in twin.rows("s", "empty.t")
    assert explain(twin.config, "s").tables == ()
    assert validate(twin.config, "s").error == "the subscription has no tables to validate"
    assert status(twin.config).tables == ()


def test_a_refresh_that_copies_nothing_waits_for_no_transaction(twin: Twin) -> None:
    """R1.34: only an exported snapshot does. What is open meanwhile is applied when it commits (R7.11)."""
    twin.publisher.run(f"{TABLES}; create publication p for table t")
    twin.subscribe("s", "p", tables=TABLES, copy_data=False)
    twin.sync()
    with twin.publisher.connect() as other, other.transaction():
        other.execute("insert into t values (1, 1)")
        twin.publish("alter publication p add table u")
        other.execute("insert into u values (1, 1)")
        assert refresh(twin.config, "s").added == ("public.u",)
        twin.native("s").refresh(copy_data=False)
        assert refresh(twin.config, "s").added == ()
        twin.publish("insert into u values (3, 3)")
        twin.sync()
    twin.sync()
    assert twin.rows("s", "t") == [(1, 1)]
    assert twin.rows("s", "u") == [(1, 1), (3, 3)]


def test_a_table_that_the_subscriber_has_created_again_is_filled_by_a_refresh(twin: Twin) -> None:
    """R7.12: a native subscription does not know the new one before."""
    twin.publisher.run(f"{TABLES}; create publication p for table t, u; insert into t values (1, 1)")
    twin.subscribe("s", "p", tables=TABLES)
    twin.sync()
    for database in (twin.pairs["s"].ours, twin.pairs["s"].native):
        database.run("drop table t; create table t (id int primary key, a int)")
    assert refresh(twin.config, "s").snapshot.rows == 1
    twin.native("s").refresh()
    twin.publish("insert into t values (2, 2)")
    twin.sync()
    assert twin.rows("s", "t") == [(1, 1), (2, 2)]
    assert refresh(twin.config, "s").snapshot.tables == ()


def test_a_table_is_not_copied_before_its_changes_are_captured(twin: Twin) -> None:
    """A subscription that came into the configuration after `setup` would silently stand still."""
    twin.publisher.run(f"{TABLES}; create publication p for table t; create publication q for table u")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.change("s", "p", "q")

    with pytest.raises(PublisherNotReady, match=r"(?s)public\.u \(insert\).*cdc-replay setup pub") as caught:
        snapshot(twin.config, "s")
    assert "public.t" not in (caught.value.detail or "")
    setup(twin.config, "pub")
    assert len(snapshot(twin.config, "s").tables) == 2


def test_new_log_after_a_lost_slot_leaves_no_gap(twin: Twin) -> None:
    """R1.33: after a slot is lost there is no repair: replay refuses, snapshot copies again."""
    twin.publisher.run(f"{TABLES}; insert into t values (1, 1); create publication p for table t, u")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.subscribe("from_now", "p", tables=TABLES, native=False, copy_data=False)
    twin.sync_ours()
    teardown(twin.config, "pub")
    twin.publish("insert into t values (2, 2);\ndelete from t where id = 1")
    with pytest.raises(SlotMissing, match=r"no longer exists"):
        setup(twin.config, "pub")
    twin.change_log.rename(twin.folder / "old_log")
    setup(twin.config, "pub")

    for result in replay(twin.config, ["s", "from_now"]):
        assert "needs changes from before the change log" in (result.error or "")
        assert "snapshot" in (result.error or "")
    copied, other = twin.sync_ours("s", "from_now")
    assert [table.table for table in copied.snapshot.tables] == ["public.t", "public.u"]
    assert twin.pairs["s"].ours.rows("table t") == [(2, 2)]
    # Without copy_data nothing is copied unasked; the gap stays refused.
    assert other.replay.error is not None
    snapshot(twin.config, "from_now", tables=[T, U])
    assert twin.sync_ours("from_now")[0].replay.error is None
    assert twin.pairs["from_now"].ours.rows("table t") == [(2, 2)]


def test_a_refresh_while_the_log_is_missing_changes_nothing(twin: Twin) -> None:
    """It makes sure of the slot, as `setup` does: neither begins a new log."""
    twin.publisher.run(f"{TABLES}; create publication p for table t")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.publish("insert into t values (1, 1)")
    twin.sync_ours()
    elsewhere = twin.change_log.rename(twin.folder / "elsewhere")
    twin.publish("alter publication p add table u;\ninsert into u values (1, 1)")

    with pytest.raises(ChangeLogMissing, match="Mount or restore"):
        refresh(twin.config, "s")

    assert not twin.change_log.exists()
    elsewhere.rename(twin.change_log)
    assert refresh(twin.config, "s").added == ("public.u",)
    twin.sync_ours()
    assert twin.pairs["s"].ours.rows("table u") == [(1, 1)]


def test_uncaptured_changes_are_reported(twin: Twin, caplog: pytest.LogCaptureFixture) -> None:
    """R2.3, R1.19: a capture publication that somebody altered, a subscribed one that was dropped."""
    twin.publisher.run(f"{TABLES}; create publication p for table t; create publication q for table u")
    twin.subscribe("s", "p", "q", tables=TABLES, native=False)
    twin.sync_ours()
    assert (explain(twin.config, "s").warnings, "[R" in caplog.text) == ((), False)

    twin.publish("alter publication cdc_replay_capture_i drop table t")
    twin.publish("drop publication q;\ninsert into t values (1, 1);\ninsert into u values (1, 1)")
    twin.publish("insert into t values (2, 2);\ndelete from t where id = 2")
    twin.sync_ours()

    uncaptured = "public.t (insert)"
    [warning] = [text for text in explain(twin.config, "s").warnings if "captured" in text]
    assert uncaptured in warning
    (subscription,) = status(twin.config).subscriptions
    for part in (uncaptured, 'publication "q" does not exist', "cdc-replay setup pub", "[R1.19]", "[R2.3]"):
        assert part in caplog.text
        assert part in (subscription.error or "")

    twin.publisher.run("create publication q for table u")
    setup(twin.config, "pub")
    refresh(twin.config, "s", reconcile=True)
    twin.sync_ours()
    (subscription,) = status(twin.config).subscriptions
    assert subscription.error is None
    assert validate(twin.config, "s").success


def test_sync_and_replay_stop_at_the_given_position(twin: Twin) -> None:
    twin.publisher.run(f"{TABLES}; create publication p for table t, u")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    twin.publish("insert into t values (1, 1)")
    first = twin.position()
    twin.publish("insert into t values (2, 2)")
    capture(twin.config, "pub")
    rows = "table t order by id"

    (synced,) = (result.replay for result in sync(twin.config, ["s"], to_lsn=first))
    assert (synced.to_lsn, twin.pairs["s"].ours.rows(rows)) == (first, [(1, 1)])
    (back,) = replay(twin.config, ["s"], to_lsn=Lsn(first.value - 1))
    assert (back.error, back.to_lsn, applied(twin, "s", "t")) == (None, first, first)
    end = ChangeLog.open(str(twin.change_log)).end_lsn
    with pytest.raises(ChangeLogMissing, match=r"(?s)before .*cdc-replay capture pub"):
        replay(twin.config, ["s"], to_lsn=Lsn(end.value + 2**32))
    for command in (partial(sync, twin.config, ["s"]), partial(capture, twin.config, "pub")):
        with pytest.raises(PublisherNotReady, match="the publisher's WAL has not reached"):
            command(to_lsn=Lsn(end.value + 2**32))
    (result,) = replay(twin.config, ["s"])
    assert (result.from_lsn, result.to_lsn) == (first, end)
    assert twin.pairs["s"].ours.rows(rows) == [(1, 1), (2, 2)]


def test_a_log_is_opened_as_often_for_many_subscriptions_as_for_one(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replays up to `CHECKPOINT_EVERY` commits, which is a good part of a small window's time."""
    twin.publisher.run(f"{TABLES}; create publication p for table t, u")
    names = ("first", "second", "third")
    for name in names:
        twin.subscribe(name, "p", tables=TABLES, native=False)
    twin.sync_ours()
    opened = list[str]()
    open_log = ChangeLog.open

    def counted(uri: str) -> ChangeLog:
        opened.append(uri)
        return open_log(uri)

    monkeypatch.setattr(ChangeLog, "open", counted)
    counts = set[int]()
    for number in range(1, len(names) + 1):
        opened.clear()
        twin.publish(f"insert into t values ({number}, 1)")
        sync(twin.config, names[:number])
        counts.add(len(opened))
    assert len(counts) == 1
    assert twin.pairs["first"].ours.rows("table t order by id") == [(1, 1), (2, 1), (3, 1)]


def test_setup_shows_its_sql_and_teardown_removes_only_created_objects(twin: Twin) -> None:
    """Two subscriptions share a database; a slot, a publication and a schema of the user's stay."""
    twin.publisher.run(f"{TABLES}; create publication p for table t, u")
    twin.subscribe("s", "p", tables=f"{TABLES}; create schema mine", native=False)
    database = twin.pairs["s"].ours
    twin.pairs["other"] = twin.pairs["s"]
    with twin.publisher.connect() as connection:
        mine = f"mine_{twin.publisher.name}"
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (mine,))
    again = setup(twin.config, "pub", dry_run=True)
    assert (again.statements, again.dry_run) == ((), True)
    twin.sync_ours()

    def in_subscriber() -> list[str]:
        schemas = "select nspname::text from pg_namespace where nspname in ('cdc_replay', 'mine') order by 1"
        return [name for (name,) in database.rows(schemas)]

    assert teardown(twin.config, "s").removed == ("state of subscription s",)
    assert in_subscriber() == ["cdc_replay", "mine"]
    teardown(twin.config, "other")
    assert in_subscriber() == ["mine"]
    assert teardown(twin.config, "s").removed == ()
    assert in_subscriber() == ["mine"]
    removed = teardown(twin.config, "pub").removed
    assert removed[0] == f"replication slot {twin.slot}"
    assert sorted(removed[1:]) == sorted(
        [f"publication {name}" for name in OUR_PUBLICATIONS]
        + [f"event trigger {name}" for name in EVENT_TRIGGERS]
    )
    assert teardown(twin.config, "pub").removed == ()
    assert twin.publisher.rows("select pubname::text from pg_publication") == [("p",)]
    slots = "select slot_name::text from pg_replication_slots where database = current_database()"
    assert twin.publisher.rows(slots) == [(mine,)]
    assert ChangeLog.exists(str(twin.change_log))
    with pytest.raises(
        InvalidConfiguration,
        match=r'(?s)no publisher and no subscription is named "nobody".*has: pub, other, s\.',
    ):
        teardown(twin.config, "nobody")


def test_explain_shows_filters_and_their_evaluators(twin: Twin) -> None:
    """R2.8: a leaf whose deletes leak without a filter is a row of its own."""
    twin.publisher.run("""
        create table t (id int primary key, a int, w text); alter table t replica identity full;
        create publication p for table t where (a > 5);
        create publication q for table t where (lower(w) = 'x') with (publish = 'insert');
        create table r (id int primary key, b int) partition by range (id);
        create table r1 partition of r for values from (0) to (10);
        create table r2 partition of r for values from (10) to (20);
        create publication root for table r where (id > 5)
            with (publish = 'insert', publish_via_partition_root = true);
        create publication leaf for table r1 with (publish = 'delete')
    """)
    twin.subscribe("s", "p", "q", "root", "leaf", tables="create table t (id int primary key)", native=False)

    explained = explain(twin.config, "s")

    r1, r2, t = explained.tables
    assert [table.table for table in explained.tables] == ["public.r", "public.r", "public.t"]
    assert (r1.leaves, r2.leaves, t.leaves) == (1, 1, 1)
    assert {r1.actions, r2.actions} == {("insert", "delete"), ("insert",)}
    assert t.insert == "(a > 5) OR (lower(w) = 'x'::text)"
    assert (t.update, t.delete, t.identity) == ("(a > 5)", "(a > 5)", "full")
    assert t.evaluated_by[0] == "(a > 5): Arrow"
    assert t.evaluated_by[1].startswith("(lower(w) = 'x'::text): PostgreSQL, because ")
    assert explained.warnings
    assert explained.definitions == BY_POSITION
    twin.publisher.run("alter event trigger cdc_replay_drop disable")
    assert explain(twin.config, "s").definitions == BY_PULL


def test_status_reports_servers_that_do_not_answer(twin: Twin) -> None:
    twin.publisher.run(f"{TABLES}; create publication p for table t, u")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    before = status(twin.config)
    assert before.tables == ()
    assert before.subscriptions[0].applied_lsn is None
    twin.sync_ours()
    (publisher,), (subscription,) = status(twin.config).publishers, status(twin.config).subscriptions
    assert (publisher.slot_state, publisher.error) == ("reserved", None)
    assert publisher.log_end == subscription.applied_lsn
    assert [table.state.startswith("replayed up to") for table in status(twin.config).tables] == [True, True]

    teardown(twin.config, "pub")
    twin.change("s", dsn="postgresql://postgres@127.0.0.1:1/none")
    (publisher,), (subscription,) = status(twin.config).publishers, status(twin.config).subscriptions
    assert (publisher.slot_state, publisher.log_end is None) == ("missing", False)
    assert publisher.position is not None
    assert "cannot connect" in (subscription.error or "")


def test_a_damaged_subscriber_is_found_and_the_keys_are_named(twin: Twin, tmp_path: Path) -> None:
    twin.publisher.run(f"{TABLES}; create publication p for table t where (id < 100), u")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.publish("insert into t select n, n from generate_series(1, 200) n")
    twin.sync_ours()
    twin.publish("insert into t values (0, 0);\ninsert into u values (1, 1)")
    # The fence is after this commit: validate captures and replays up to it.
    sound = validate(twin.config, "s")
    assert (sound.success, sound.error) == (True, None)
    assert {table["table"]: table["subscriber_rows"] for table in sound.tables} == {
        "public.t": 100,
        "public.u": 1,
    }

    ours = twin.pairs["s"].ours
    ours.run("delete from t where id = 7; update t set a = -1 where id = 8; insert into t values (9999, 1)")
    damaged = validate(twin.config, "s")
    assert not damaged.success
    assert damaged.error is not None
    for key in ("7", "8", "9999"):
        assert f"id={key}" in damaged.error
    assert damaged.report.is_file()
    assert damaged.report.is_relative_to(tmp_path)
    (subscription,) = status(twin.config).subscriptions
    assert (subscription.last_validation or "").startswith("not consistent at")

    details = subscription_details(twin.config, "s", TimeRange.HOUR, 10)
    assert [(table.table, table.state, table.filters) for table in details.tables] == [
        ("public.t", "ready", ("(id < 100)",)),
        ("public.u", "ready", None),
    ]
    assert [record.consistent for record in details.validations] == [False, True]
    assert details.validations[0].differing_rows == 3
    assert sum(window.changes_read for window in details.windows) == 2
    assert max(point.lag_seconds or 0 for point in details.points) > 0
    assert "1 of the last 2 validations" in damaged.report.read_text(encoding="utf-8")


def test_table_dropped_on_the_subscriber_fails_the_validation(twin: Twin) -> None:
    """R8.1: the other tables are judged, and the report is written."""
    twin.publisher.run(f"{TABLES}; create publication p for table t, u")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.publish("insert into t values (1, 1);\ninsert into u values (1, 1)")
    twin.sync_ours()
    twin.pairs["s"].ours.run("drop table t")

    result = validate(twin.config, "s")

    assert {table["table"]: table["success"] for table in result.tables} == {
        "public.t": False,
        "public.u": True,
    }
    assert "public.t: the table is missing on the subscriber" in (result.error or "")
    assert result.report.is_file()
