"""Rows that enter a subscription with unsent values: never a silent NULL (R4.6, R11.1).

A value of 3000 characters in a column with storage `external` is out of line, and an UPDATE that does not
change it does not send it. `body` is such a column. Native stores NULL for it if the row enters; ours must
have the publisher's value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from cdc_replay.capture.pull import current_position
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.backfill import backfill
from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from cdc_replay.commands.validate import validate
from cdc_replay.config import load_config
from cdc_replay.errors import UnchangedToastLost
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import ReplayResult
from cdc_replay.model.table_state import Ready
from cdc_replay.replay import publisher_fence as fences
from fixtures.native import wait_for
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

T = "create table t (id int primary key, a int, body text)"
OUT_OF_LINE = "alter table t alter body set storage external"
P = f"{T}; {OUT_OF_LINE}; create publication p for table t where (id > 10)"


def long(letter: str) -> str:
    """SQL of a value that is stored out of line."""
    return f"repeat('{letter}', 3000)"


def short(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Long values by their first character."""
    return [
        tuple(value[0] if isinstance(value, str) and len(value) == 3000 else value for value in row)
        for row in rows
    ]


def ours(twin: Twin, name: str, query: str) -> list[tuple[Any, ...]]:
    return short(twin.pairs[name].ours.rows(query))


def native(twin: Twin, name: str, query: str) -> list[tuple[Any, ...]]:
    return short(twin.pairs[name].native.rows(query))


def replayed(twin: Twin, *names: str) -> dict[str, ReplayResult]:
    """Replay what is captured, without a capture; none fails."""
    results = {result.subscription: result for result in replay(twin.config, names or tuple(twin.pairs))}
    for result in results.values():
        assert result.error is None, result.error
    return results


IDENTITIES = """
    create table by_key (id int primary key, body text);
    create table by_index (body text, code int not null unique, id int primary key);
    create table by_row (id int primary key, body text);
    create table long_key (name text, n int, body text, primary key (name, n));
    create table inserted (id int primary key, body text);
    create table only_updates (id int primary key, body text);
    alter table by_key alter body set storage external;
    alter table by_index alter body set storage external;
    alter table by_row alter body set storage external;
    alter table long_key alter name set storage external, alter body set storage external;
    alter table inserted alter body set storage external;
    alter table only_updates alter body set storage external;
    alter table by_index replica identity using index by_index_code_key;
    alter table by_row replica identity full;
    alter table inserted replica identity nothing
"""
IDENTITY_PUBLICATION = """
    create publication p for table
        by_key where (id > 10), by_index where (code > 10), by_row where (id > 10), long_key where (n > 10);
    create publication i for table inserted where (id > 10) with (publish = 'insert');
    create publication u for table only_updates where (id > 10) with (publish = 'update')
"""
TABLES = ("by_key", "by_index", "by_row", "long_key", "inserted", "only_updates")


def test_entering_row_has_its_values_under_every_replica_identity(twin: Twin) -> None:
    """R1.6: the old tuple has the key only, but under REPLICA IDENTITY FULL; the body is sent by neither."""
    rows = f"""
        insert into by_key select n, {long("a")} from generate_series(1, 3) n;
        insert into by_index select {long("b")}, n, n + 100 from generate_series(1, 3) n;
        insert into by_row select n, {long("c")} from generate_series(1, 3) n;
        insert into long_key select repeat('k', 2100), n, {long("d")} from generate_series(1, 3) n;
        insert into inserted select n, {long("e")} from generate_series(1, 3) n;
        insert into only_updates select n, {long("f")} from generate_series(1, 3) n
    """
    twin.publisher.run(f"{IDENTITIES}; {IDENTITY_PUBLICATION}; {rows}")
    twin.subscribe("s", "p", "i", "u", tables=IDENTITIES)
    twin.sync()

    twin.publish(
        f"""
    update by_key set id = id + 20;
    update by_index set code = code + 20;
    update by_row set id = id + 20;
    update long_key set n = n + 20;
    update inserted set id = id + 20;
    insert into inserted values (50, {long("e")});
    update only_updates set id = id + 20
    """.strip()
    )
    result = twin.sync()["s"]

    def both(query: str) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        return ours(twin, "s", query), native(twin, "s", query)

    # R4.6: native has NULL; ours what the publisher has.
    assert both("table by_key order by id") == (
        [(21, "a"), (22, "a"), (23, "a")],
        [(21, None), (22, None), (23, None)],
    )
    assert both("table by_index order by id") == (
        [("b", 21, 101), ("b", 22, 102), ("b", 23, 103)],
        [(None, 21, 101), (None, 22, 102), (None, 23, 103)],
    )
    # R4.4: the old row has it.
    assert both("table by_row order by id") == ([(21, "c"), (22, "c"), (23, "c")],) * 2
    # R1.6: the key column that is out of line is in the old tuple; the body is not.
    assert both("select n, body from long_key where length(name) = 2100 order by n") == (
        [(21, "d"), (22, "d"), (23, "d")],
        [(21, None), (22, None), (23, None)],
    )
    # Only INSERTs are published: nothing becomes one.
    assert both("table inserted") == ([(50, "e")],) * 2
    # R4.1: sent as INSERTs though only UPDATE is published.
    assert native(twin, "s", "table only_updates order by id") == [(21, None), (22, None), (23, None)]
    assert ours(twin, "s", "table only_updates order by id") == [(21, "f"), (22, "f"), (23, "f")]
    assert result.updates_to_insert == 15


def subscribed(twin: Twin, *, native: bool = True, publish: str = "", **options: object) -> None:
    """Table `t` with rows 1 to 5, `a` to `e`, none of which is in the filter `id > 10`."""
    settings = f"with (publish = '{publish}')" if publish else ""
    rows = "insert into t select n, 0, repeat(chr(96 + n), 3000) from generate_series(1, 5) n"
    twin.publisher.run(f"{P} {settings}; {rows}; create table v (id int); create publication q for table v")
    twin.subscribe("s", "p", tables=T, native=native, **options)
    twin.sync() if native else twin.sync_ours()


def test_rows_are_tracked_through_changes_outside_the_subscription(twin: Twin) -> None:
    """One window; the last values are the publisher's, which only the filter id > 10 restricts."""
    subscribed(twin)
    twin.publish(
        f"""
    update t set id = 20 where id = 1;
    update t set body = {long("A")} where id = 20;
    update t set id = 1 where id = 20;
    update t set id = 21 where id = 1;
    update t set id = 22 where id = 2;
    update t set body = {long("B")} where id = 22;
    update t set id = 2 where id = 22;
    update t set body = {long("X")} where id = 2;
    update t set id = 23 where id = 2;
    update t set id = 9 where id = 3;
    update t set id = 30 where id = 9;
    update t set id = 31, a = 1 where id = 30;
    update t set id = 3 where id = 4;
    update t set id = 32 where id = 3;
    update t set a = 2 where id = 32;
    update t set id = 40 where id = 5;
    delete from t where id = 40;
    insert into t values (5, 0, {long("y")});
    update t set id = 40 where id = 5;
    insert into t values (6, 0, {long("z")});
    update t set id = 41, body = null where id = 6;
    update t set id = 41, body = {long("w")} where id = 6
    """.strip()
    )
    result = twin.sync()["s"]
    # (21)  enters, gets A, leaves, enters again with A not sent
    # (23)  X was sent while the row was outside of the filter
    # (31)  c is in no change of the window
    # (32)  d came from key 4 by key 3, where c had been before
    # (40)  e entered and was deleted; y, the row inserted later, entered under the same key
    # (41)  an UPDATE to NULL sends NULL
    expected = [(21, 0, "A"), (23, 0, "X"), (31, 1, "c"), (32, 2, "d"), (40, 0, "y"), (41, 0, None)]
    assert ours(twin, "s", "table t order by id") == expected
    assert ours(twin, "s", "table t order by id") == short(
        twin.publisher.rows("select * from t where id > 10 order by id")
    )
    lost = {id_ for id_, _, body in native(twin, "s", "table t") if body is None}
    assert lost == {21, 23, 31, 32, 40, 41}
    assert result.conflicts == {}


def test_values_in_the_log_need_no_publisher(twin: Twin) -> None:
    """Inserted outside of the filter and moved into it within a window: no fence is opened."""
    subscribed(twin, native=False)
    twin.publish(f"insert into t values (6, 0, {long('f')});\nupdate t set id = 20 where id = 6")
    end = capture(twin.config, "pub").to_lsn
    twin.publish("insert into t values (50, 0, null)")

    result = replayed(twin)["s"]

    assert ours(twin, "s", "table t") == [(20, 0, "f")]
    assert result.to_lsn == end == ChangeLog.open(str(twin.change_log)).end_lsn


def test_value_unchanged_up_to_the_fence_does_not_extend_the_window(twin: Twin) -> None:
    """`--to-lsn` is kept: later changes of the key and of another column prove that it is the same row."""
    subscribed(twin, native=False)
    twin.publish("update t set id = 20 where id = 1")
    end = capture(twin.config, "pub").to_lsn
    twin.publish("update t set id = 21, a = 1 where id = 20;\ninsert into t values (50, 0, null)")

    result = replayed(twin)["s"]

    assert ours(twin, "s", "table t") == [(20, 0, "a")]
    assert result.to_lsn == end
    twin.sync_ours()
    assert ours(twin, "s", "table t order by id") == [(21, 1, "a"), (50, 0, None)]


def test_window_is_extended_to_the_change_that_has_the_value(
    twin: Twin, caplog: pytest.LogCaptureFixture
) -> None:
    """`a` does not exist any more: at its LSN the row cannot be proved, at the fence it can."""
    subscribed(twin, native=False)
    twin.publish("update t set id = 20 where id = 1;\nupdate t set id = 22 where id = 2")
    end = capture(twin.config, "pub").to_lsn
    twin.publish(f"update t set body = {long('A')} where id = 20;\ninsert into t values (50, 0, null)")

    with caplog.at_level(logging.WARNING, "cdc_replay.replay.engine"):
        (result,) = replay(twin.config, ["s"], to_lsn=end)

    assert result.error is None
    assert result.to_lsn > end
    [warning] = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("subscription s: window")
    assert ours(twin, "s", "table t order by id") == [(20, 0, "A"), (22, 0, "b"), (50, 0, None)]
    assert twin.states("s")["t"] == Ready(result.to_lsn)


def test_open_transactions_are_not_waited_for(twin: Twin) -> None:
    """R1.35: a slot's snapshot would wait for them. One has changed a row after it entered."""
    subscribed(twin, native=False)
    with twin.publisher.connect() as idle, twin.publisher.connect() as prepared:
        idle.execute("begin; insert into v values (1)")
        twin.publish("update t set id = 20 where id = 1;\nupdate t set id = 21 where id = 2")
        prepared.execute(f"begin; update t set body = {long('A')}, id = 22 where id = 21".encode())
        prepared.execute("prepare transaction 'not yet'")

        twin.sync_ours()

        assert ours(twin, "s", "table t order by id") == [(20, 0, "a"), (21, 0, "b")]
        prepared.execute("commit prepared 'not yet'")
        idle.execute("commit")
    twin.sync_ours()
    assert ours(twin, "s", "table t order by id") == [(20, 0, "a"), (22, 0, "A")]


def test_commits_during_the_opening_of_the_fence_are_after_it(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits between the snapshot and the position: they are in the log, and not in the rows.

    They move a row into the filter, change the value of another after its entry, and reuse a key.
    """
    subscribed(twin, native=False)
    twin.publish("update t set id = 20 where id = 1;\nupdate t set id = 21 where id = 2")
    capture(twin.config, "pub")
    seen = []
    query = "select * from t where id > 10 order by id"

    def busy(dsn: str) -> Lsn:
        seen.append(short(twin.publisher.rows(query)))
        twin.publish(f"""
            update t set id = id + 100 where id = 20;
            update t set id = 20, body = {long("A")} where id = 21;
            update t set id = 21 where id = 20;
            update t set id = id - 100 where id = 120
        """)
        twin.publish("update t set id = id + 20 where id = (select min(id) from t)")
        return current_position(dsn)

    monkeypatch.setattr(fences, "current_position", busy)
    replayed(twin)
    monkeypatch.undo()

    assert ours(twin, "s", "table t order by id") == seen[-1]
    assert len(seen) == 1
    twin.sync_ours()
    assert ours(twin, "s", "table t order by id") == short(twin.publisher.rows(query))
    assert ours(twin, "s", "table t order by id") == [(20, 0, "a"), (21, 0, "A"), (23, 0, "c")]


WAITING = "select from pg_stat_activity where wait_event = 'SyncRep'"


@pytest.fixture
def standby(twin: Twin) -> Iterator[Callable[[], None]]:
    """Sessions that ask for it wait for an absent standby, until this is called."""

    def answers() -> None:
        twin.publisher.run("alter system reset synchronous_standby_names")
        twin.publisher.run("select pg_reload_conf()")

    twin.publisher.run(f"alter database {twin.publisher.name} set synchronous_commit = local")
    twin.publisher.run("alter system set synchronous_standby_names = 'nobody'")
    twin.publisher.run("select pg_reload_conf()")
    yield answers
    answers()


def test_commit_in_the_window_that_waits_for_a_standby_is_awaited(
    twin: Twin, standby: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the log, and invisible before the standby has answered."""
    subscribed(twin, native=False)
    caplog.set_level(logging.INFO, "cdc_replay.replay.publisher_fence")
    with ThreadPoolExecutor(2) as pool, twin.publisher.connect() as waiting:
        waiting.execute("set synchronous_commit = on")
        committed = pool.submit(waiting.execute, "update t set id = 20 where id = 1")
        wait_for(lambda: bool(twin.publisher.rows(WAITING)), "the commit to wait")
        synced = pool.submit(twin.sync_ours)
        wait_for(lambda: "not visible yet" in caplog.text or synced.done(), "the fence to be opened")
        assert ours(twin, "s", "table t") == []
        standby()
        committed.result()
        synced.result()
    assert "not visible yet" in caplog.text
    assert ours(twin, "s", "table t") == [(20, 0, "a")]


def test_commit_after_the_window_that_waits_for_a_standby_is_not_awaited(
    twin: Twin, standby: Callable[[], None]
) -> None:
    """The snapshot has later commits, one of them of a row that has entered."""
    subscribed(twin, native=False)
    twin.publish("update t set id = 20 where id = 1;\nupdate t set id = 21 where id = 2")
    end = capture(twin.config, "pub").to_lsn
    with ThreadPoolExecutor(1) as pool, twin.publisher.connect() as waiting:
        waiting.execute("set synchronous_commit = on")
        committed = pool.submit(waiting.execute, "update t set id = 23 where id = 3")
        wait_for(lambda: bool(twin.publisher.rows(WAITING)), "the commit to wait")
        twin.publish("update t set id = 22 where id = 20;\nupdate t set id = 24 where id = 4")
        (result,) = replay(twin.config, ["s"], to_lsn=end)
        assert (result.error, result.to_lsn) == (None, end)
        assert ours(twin, "s", "table t order by id") == [(20, 0, "a"), (21, 0, "b")]
        standby()
        committed.result()
    twin.sync_ours()
    assert ours(twin, "s", "table t order by id") == [(21, 0, "b"), (22, 0, "a"), (23, 0, "c"), (24, 0, "d")]


@pytest.mark.parametrize("ending", ["delete from t where id = 20", "truncate t"])
def test_row_deleted_after_the_window_is_deleted(twin: Twin, ending: str) -> None:
    subscribed(twin, native=False)
    twin.publish("update t set id = 20 where id = 1")
    capture(twin.config, "pub")
    twin.publish(ending)

    replayed(twin)

    assert ours(twin, "s", "table t") == []


def test_row_gone_without_a_published_delete_has_null_as_natively(twin: Twin) -> None:
    """Only UPDATEs are published: the subscriber keeps a deleted row, and its value is lost.

    Another row has its key now, which the subscription does not see either, and must not be mistaken for it.
    """
    subscribed(twin, publish="update")
    twin.publish("update t set id = 20 where id = 1;\nupdate t set id = 21 where id = 2")
    twin.publish(f"delete from t where id = 20;\ninsert into t values (20, 0, {long('g')})")

    result = twin.sync()["s"]

    assert (result.unsent_nulls, result.error) == (1, None)
    assert ours(twin, "s", "table t order by id") == [(20, 0, None), (21, 0, "b")]
    assert native(twin, "s", "table t order by id") == [(20, 0, None), (21, 0, None)]


def test_log_before_the_window_has_values_that_the_publisher_lacks(twin: Twin) -> None:
    """The DELETE is not published; the row's INSERT is older than the window, and in the log."""
    subscribed(twin, publish="insert, update")
    twin.publish(f"insert into t values (6, 0, {long('f')})")
    twin.sync()
    twin.publish("update t set id = 20 where id = 6;\ndelete from t where id = 20")

    twin.sync()

    assert ours(twin, "s", "table t") == [(20, 0, "f")]
    assert native(twin, "s", "table t") == [(20, 0, None)]


def test_row_whose_identity_changes_meanwhile_is_not_guessed(twin: Twin) -> None:
    """Under the other identity nothing links the row's changes; a copy has the values."""
    subscribed(twin, native=False)
    twin.publisher.run("update t set a = id")
    twin.publisher.run("alter table t add unique (id, a), alter a set not null")
    twin.sync_ours()
    twin.publish(
        """
    update t set id = 20 where id = 1;
    alter table t replica identity using index t_id_a_key;
    update t set a = 77 where id = 20
    """.strip()
    )

    (synced,) = twin.sync_ours()

    assert "[R4.6]" in (synced.replay.error or "")
    assert ours(twin, "s", "table t") == []


@pytest.mark.slow
def test_several_subscriptions_share_the_fence(twin: Twin) -> None:
    """One call, one decode: filters, policies and column lists of their own; a row that stands."""
    subscribed(twin)
    twin.publisher.run("""
        create publication wide for table t where (id > 3);
        create publication narrow for table t where (id > 100);
        create publication listed for table t (id, a) where (id > 10)
    """)
    for name, publication in {"wide": "wide", "narrow": "narrow", "listed": "listed"}.items():
        twin.subscribe(name, publication, tables=T)
    twin.subscribe("over", "p", tables=T, native=False, on_conflict="overwrite")
    twin.subscribe("skip", "p", tables=T, native=False, on_conflict="skip")
    twin.sync_ours()
    for name in ("s", "wide", "narrow", "listed"):
        twin.native(name).wait()
    for name in ("over", "skip"):
        twin.pairs[name].ours.run("insert into t values (20, 99, 'stands')")
    twin.publish("update t set id = 20 where id = 1;\nupdate t set id = 200 where id = 4")

    results = {result.subscription: result.replay for result in twin.sync_ours()}

    assert {result.error for result in results.values()} == {None}
    assert ours(twin, "s", "table t order by id") == [(20, 0, "a"), (200, 0, "d")]
    # R8.3: (200) was in id > 3 before, so its UPDATE keeps what is there.
    assert ours(twin, "wide", "table t order by id") == [(5, 0, "e"), (20, 0, "a"), (200, 0, "d")]
    assert ours(twin, "narrow", "table t") == [(200, 0, "d")]
    assert twin.rows("listed", "t") == [(20, 0, None), (200, 0, None)]
    assert ours(twin, "over", "table t order by id") == [(20, 0, "a"), (200, 0, "d")]
    assert ours(twin, "skip", "table t order by id") == [(20, 99, "stands"), (200, 0, "d")]
    assert results["over"].conflicts == results["skip"].conflicts == {"insert_exists": 1}


ROOT = """
    create table parts (id int, region text, body text, note text, primary key (id, region))
        partition by list (region)
"""
PARTS = f"""
    {ROOT};
    create table parts_n (note text, gone int, body text, region text not null, id int not null);
    alter table parts_n drop gone;
    alter table parts attach partition parts_n for values in ('n');
    create table parts_s partition of parts for values in ('s');
    alter table parts alter body set storage external;
    alter table parts_n alter body set storage external;
    alter table parts_s alter body set storage external
"""
ROOT_ONLY = "create table parts (id int, region text, body text, note text, primary key (id, region))"


@pytest.mark.parametrize(
    ("of_root", "of_leaf"), [("default", "default"), ("default", "full"), ("full", "default")]
)
def test_rows_of_partitions_enter_under_their_root(twin: Twin, of_root: str, of_leaf: str) -> None:
    """R1.6, R1.7: what is sent is decided by the leaf's identity, the letter K or O by the root's."""
    twin.publisher.run(f"""
        {PARTS};
        alter table parts replica identity {of_root};
        alter table parts_n replica identity {of_leaf};
        alter table parts_s replica identity {of_leaf};
        create publication p for table parts where (id > 10) with (publish_via_partition_root = true);
        insert into parts select n, 'n', {long("a")}, 'one' from generate_series(1, 3) n;
        insert into parts select n, 's', {long("b")}, 'two' from generate_series(4, 6) n
    """)
    twin.subscribe("s", "p", tables=ROOT_ONLY)
    twin.sync()

    # Key 22 of one partition goes to the other and enters there: DELETE and INSERT, with every value (R2.15).
    twin.publish(
        """
    update parts set id = id + 20 where id in (1, 4);
    update parts set region = 's' where id = 2;
    update parts set id = 22 where id = 2;
    update parts set id = 23, note = 'three' where id = 3;
    update parts set note = 'four' where id = 23
    """.strip()
    )
    twin.sync()

    query = "table parts order by id"
    expected = [(21, "n", "a", "one"), (22, "s", "a", "one"), (23, "n", "a", "four"), (24, "s", "b", "two")]
    assert ours(twin, "s", query) == expected
    if (of_root, of_leaf) == ("full", "default"):
        # The old tuple is a whole row by its letter, and a key by its content.
        assert [row[:2] for row in native(twin, "s", query)] == [row[:2] for row in expected]
    elif of_leaf == "full":
        assert native(twin, "s", query) == expected
    else:
        # Native gets the value of key 22 with the INSERT into the other partition only while it is outside.
        assert native(twin, "s", query) == [(id_, region, None, note) for id_, region, _, note in expected]


def test_root_with_identity_full_whose_leaf_sends_keys_only(twin: Twin) -> None:
    """R8.11: by the root's FULL identity native looks for whole rows, does not find them, and goes on.

    Without a key on the subscriber ours finds them by the key that the leaf does send; the value that is not
    sent again stays.
    """
    target = "create table parts (id int, region text, body text, note text)"
    twin.publisher.run(f"""
        {PARTS};
        alter table parts replica identity full;
        create publication p for table parts with (publish_via_partition_root = true);
        insert into parts values (1, 'n', {long("a")}, 'one')
    """)
    twin.subscribe("s", "p", tables=target)
    twin.sync()
    twin.publish("update parts set note = 'two'")

    twin.sync()

    assert native(twin, "s", "table parts") == [(1, "n", "a", "one")]
    assert ours(twin, "s", "table parts") == [(1, "n", "a", "two")]


def test_validation_that_replays_reads_at_its_own_fence(twin: Twin) -> None:
    """The window must end at the fence, or nothing could be compared there."""
    subscribed(twin, native=False)
    twin.publish("update t set id = 20 where id = 1")

    result = validate(twin.config, "s")

    assert (result.success, result.error) == (True, None)
    assert ours(twin, "s", "table t") == [(20, 0, "a")]


@pytest.mark.slow
def test_backfill_finds_unsent_values(twin: Twin) -> None:
    subscribed(twin, native=False)
    begin = twin.position()
    twin.publish("update t set id = 20 where id = 1;\nupdate t set id = 21 where id = 2")
    twin.sync_ours()
    end = twin.position()
    twin.sync_ours()
    target = twin.pairs["s"].ours
    target.run("delete from t where id = 20; update t set body = null where id = 21")

    backfill(twin.config, "s", str(begin), str(end))
    assert ours(twin, "s", "table t order by id") == [(20, 0, "a"), (21, 0, "b")]

    other = twin.database(T)
    backfill(twin.config, "s", str(begin), str(end), into=other.dsn)
    assert short(other.rows("table t order by id")) == [(20, 0, "a"), (21, 0, "b")]

    # What it was at the end of the range cannot be told any more.
    twin.publish(f"update t set body = {long('A')} where id = 20")
    twin.sync_ours()
    another = twin.database(T)
    with pytest.raises(UnchangedToastLost, match=r"R4\.6"):
        backfill(twin.config, "s", str(begin), str(end), into=another.dsn)
    assert another.rows("table t") == []


def test_unreachable_publisher_stops_the_window_and_parks_nothing(twin: Twin) -> None:
    """The error is transient: the next run applies the window."""
    subscribed(twin, native=False)
    twin.publish("update t set id = 20 where id = 1")
    capture(twin.config, "pub")
    content = yaml.safe_load(twin.file.read_text(encoding="utf-8"))
    content["publishers"]["pub"]["dsn"] = twin.publisher.cluster.dsn("no_such_database")
    unreachable = twin.folder / "unreachable.yaml"
    unreachable.write_text(yaml.safe_dump(content), encoding="utf-8")

    (result,) = replay(load_config(unreachable), ["s"])

    assert "no_such_database" in (result.error or "")
    assert ours(twin, "s", "table t") == []
    replayed(twin)
    assert ours(twin, "s", "table t") == [(20, 0, "a")]
