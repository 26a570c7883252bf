"""Killed at any named point and run again, every command ends where an undisturbed native subscription does.

Three tables show what goes wrong: `t` is filtered and moves rows in and out; `notes` has no key, so that a
row that comes twice is there twice; `big` is copied in several chunks.

| point      | who dies                                                                             |
|------------|--------------------------------------------------------------------------------------|
| capture.*  | the process                                                                          |
| replay.*   | the driver, and the executors with it                                                |
| snapshot.* | the driver                                                                           |
| both       | where rows are copied the Spark worker, which fails the whole job                    |
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.failpoints import FAILPOINTS, VARIABLE
from cdc_replay.model.lsn import Window
from cdc_replay.model.table_state import Ready
from embedded.java import spark_environment
from fixtures.native import wait_for
from fixtures.postgres import Database
from fixtures.twin import Twin

pytestmark = [pytest.mark.spark, pytest.mark.slow]

TABLES = """
    create table t (id int primary key, a int);
    create table notes (n int, note text);
    create table big (id int, pad text)
"""
PUBLISHED = f"""
    {TABLES};
    alter table t replica identity full;
    create publication p for table t where (a > 10);
    create publication q for table notes, big with (publish = 'insert, truncate');
    insert into t values (1, 1), (2, 20), (3, 30);
    insert into notes values (0, 'before');
    insert into big select n, repeat('x', 100) from generate_series(1, 3000) n
"""
TRAFFIC = """
    insert into t values ({n}00, 50), ({n}01, 5);
    update t set a = 100 - a where id <= 3;
    insert into notes values ({n}, 'one'), ({n}, 'one');
    begin;
    update t set id = id + 1000 where id = {n}00;
    insert into notes values ({n}, 'two');
    insert into big values ({n}, 'small');
    commit
"""
NAMES = ("t", "notes", "big")
IN_WORKERS = {"snapshot.mid_copy", "snapshot.after_chunk", "snapshot.after_table", "replay.mid_staging"}
"""Points that Spark workers reach: the command fails, and its process ends by itself."""
OF_RESUMED_COPIES = "snapshot.after_late"
"""Reached only by a copy that goes on; test_snapshot_command.py is killed there."""
STAGING = "select relname::text from pg_class where relname ~ '^(stage|snapshot)_?'"


def points(command: str) -> list[str]:
    return [name for name in FAILPOINTS if name.startswith(f"{command}.")]


def killed(twin: Twin, failpoint: str, *arguments: str) -> None:
    """Run a command in a process that dies at the failpoint, and wait until the servers know."""
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("cdc-replay")),
            *arguments,
            "--config",
            str(twin.file),
        ],
        env=spark_environment() | os.environ | {VARIABLE: failpoint},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == (1 if failpoint in IN_WORKERS else -signal.SIGKILL), done.stderr
    databases = [twin.publisher, *(pair.ours for pair in twin.pairs.values())]
    wait_for(lambda: not any(map(sessions, databases)), f"the servers to see that {arguments} is gone")


def sessions(database: Database) -> list[str]:
    """The commands that still have a session there."""
    query = """
        select application_name from pg_stat_activity
        where datname = current_database() and application_name like 'cdc_replay %'
            and application_name <> 'cdc_replay test'
    """
    return [name for (name,) in database.rows(query)]


def check_nothing_is_left(twin: Twin) -> None:
    """Our one slot, the natives', no staging."""
    slots = "select slot_name::text from pg_replication_slots where database = current_database() order by 1"
    expected = [
        twin.slot,
        *(twin.native(name).name for name, pair in twin.pairs.items() if has_native(pair.native)),
    ]
    assert [name for (name,) in twin.publisher.rows(slots)] == sorted(expected)
    for name, pair in twin.pairs.items():
        assert pair.ours.rows(STAGING) == [], name


def has_native(database: Database) -> bool:
    here = "(select oid from pg_database where datname = current_database())"
    return bool(database.rows(f"select from pg_subscription where subdbid = {here}"))


def content(database: Database) -> dict[str, Counter[str]]:
    return {
        name: Counter(text for (text,) in database.rows(f"select x::text from {name} x")) for name in NAMES
    }


def test_a_killed_capture_loses_and_doubles_nothing(twin: Twin) -> None:
    """Killed at one point after the other, with new changes each time; captured completely after each."""
    twin.publisher.run(PUBLISHED)
    twin.subscribe("s", "p", "q", tables=TABLES)
    twin.sync()
    capture(twin.config, "pub")
    begin = ChangeLog.open(str(twin.change_log)).end_lsn
    for ordinal, failpoint in enumerate(points("capture"), start=1):
        twin.publish(TRAFFIC.format(n=ordinal))
        killed(twin, failpoint, "capture", "pub")
        capture(twin.config, "pub")
        log = ChangeLog.open(str(twin.change_log))
        commits = Counter(commit.xid for commit in log.commits(Window(begin, log.end_lsn)))
        # Four transactions of traffic each.
        assert (len(commits), set(commits.values())) == (4 * ordinal, {1}), failpoint
    twin.sync()
    for name in NAMES:
        twin.rows("s", name)
    assert content(twin.pairs["s"].ours)["notes"]["(1,one)"] == 2
    check_nothing_is_left(twin)


def test_killed_snapshot_is_repeated_and_replay_continues_from_it(twin: Twin) -> None:
    """A subscription per point; changes arrive between the kill and the next run."""
    twin.publisher.run(PUBLISHED)
    twin.subscribe("native", "p", "q", tables=TABLES)
    twin.sync("native")
    names = {
        failpoint: failpoint.replace(".", "_")
        for failpoint in points("snapshot")
        if failpoint != OF_RESUMED_COPIES
    }
    for ordinal, (failpoint, name) in enumerate(names.items(), start=1):
        twin.subscribe(name, "p", "q", tables=TABLES, native=False, snapshot_chunk="64kB")
        killed(twin, failpoint, "snapshot", name)
        states = twin.states(name)
        if failpoint != "snapshot.after_table":
            # A table shows all of its rows with its state, or none.
            for table, state in states.items():
                rows = twin.pairs[name].ours.rows(f"select count(*) from {table}")
                assert (rows == [(0,)]) is not isinstance(state, Ready), (failpoint, table)
        twin.publish(TRAFFIC.format(n=ordinal))
        snapshot(twin.config, name)
        assert {type(state) for state in twin.states(name).values()} == {Ready}, failpoint
    twin.publish(TRAFFIC.format(n=9))
    for result in twin.sync_ours():
        assert result.replay.error is None
    twin.native("native").wait()
    expected = content(twin.pairs["native"].native)
    for name in twin.pairs:
        assert content(twin.pairs[name].ours) == expected, name
    check_nothing_is_left(twin)


def test_a_killed_replay_is_applied_exactly_once(twin: Twin) -> None:
    """A subscription per point, all with the same window."""
    twin.publisher.run(PUBLISHED)
    names = {failpoint: failpoint.replace(".", "_") for failpoint in points("replay")}
    for failpoint, name in names.items():
        twin.subscribe(name, "p", "q", tables=TABLES, native=failpoint == "replay.after_staging")
    twin.sync_ours()
    for ordinal in (1, 2):
        twin.publish(TRAFFIC.format(n=ordinal))
    capture(twin.config, "pub")
    end = ChangeLog.open(str(twin.change_log)).end_lsn
    before = content(twin.pairs[names["replay.after_staging"]].ours)

    for failpoint, name in names.items():
        killed(twin, failpoint, "replay", name)
        is_applied = failpoint == "replay.after_commit"
        assert (content(twin.pairs[name].ours) == before) is not is_applied, failpoint
        assert all((state == Ready(end)) is is_applied for state in twin.states(name).values()), failpoint

    results = replay(twin.config, list(names.values()))
    assert [result.error for result in results] == [None] * len(names)
    again = {result.subscription: sum(result.applied.values()) for result in results}
    assert [name for name, count in again.items() if count == 0] == [names["replay.after_commit"]]
    # What the window that was committed left behind goes with the next one.
    twin.publish(TRAFFIC.format(n=3))
    twin.sync_ours()
    twin.native(names["replay.after_staging"]).wait()
    expected = content(twin.pairs[names["replay.after_staging"]].native)
    assert expected["notes"]["(2,one)"] == 2
    for name in names.values():
        assert content(twin.pairs[name].ours) == expected, name
    check_nothing_is_left(twin)


def test_a_replay_that_is_killed_while_it_reads_unsent_values_is_done_again(twin: Twin) -> None:
    """R4.6: it has read, and perhaps captured; nothing of its window is applied, and nothing is left open."""
    tables = "create table t (id int primary key, body text)"
    twin.publisher.run(f"""
        {tables};
        alter table t alter body set storage external;
        create publication p for table t where (id > 10);
        insert into t select n, repeat('x', 3000) from generate_series(1, 3) n
    """)
    names = {failpoint: failpoint.replace(".", "_") for failpoint in points("fill")}
    for name in names.values():
        twin.subscribe(name, "p", tables=tables, native=False)
    twin.sync_ours()
    twin.publish("update t set id = id + 20")
    end = capture(twin.config, "pub").to_lsn

    for failpoint, name in names.items():
        killed(twin, failpoint, "replay", name)
        assert twin.pairs[name].ours.rows("table t") == [], failpoint
        assert all(
            isinstance(table_state, Ready) and table_state.applied_lsn < end
            for table_state in twin.states(name).values()
        )

    results = replay(twin.config, list(names.values()), to_lsn=end)
    for result, name in zip(results, names.values(), strict=True):
        assert result.error is None
        assert twin.pairs[name].ours.rows("select id, length(body) from t order by id") == [
            (21, 3000),
            (22, 3000),
            (23, 3000),
        ]
    check_nothing_is_left(twin)
