"""Killed at any point and run again, `refresh` has the result of an undisturbed run; nothing is partial."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.replay import replay
from cdc_replay.failpoints import FAILPOINTS, VARIABLE
from cdc_replay.model.table_state import Pending, Ready
from cdc_replay.subscriber import subscription_tables
from embedded.java import spark_environment
from fixtures.native import wait_for
from fixtures.postgres import Database
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLES = "create table t (id int primary key, a int); create table notes (n int, note text)"
SESSIONS = """
    select application_name from pg_stat_activity
    where datname = current_database() and application_name like 'cdc_replay %'
        and application_name <> 'cdc_replay test'
"""
OURS = (
    "select relname::text from pg_class where relname ~ '^(reconcile|present|wanted|surplus|missing|pairs)'"
)
POINTS = [name for name in FAILPOINTS if name.startswith("reconcile.")]
LAST = "reconcile.before_commit"
"""The step of the ordinary run: all is done, and nothing is durable."""
EACH_TABLE = {"reconcile.after_digests", "reconcile.mid_merge"}


def killed(twin: Twin, failpoint: str, *arguments: str) -> None:
    """Run a command in a process that dies at the failpoint, and wait until its sessions end."""
    process = subprocess.run(
        [sys.executable, "-m", "cdc_replay.cli", *arguments, "--config", str(twin.file)],
        env=spark_environment() | os.environ | {VARIABLE: failpoint},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    databases = [twin.publisher, *(pair.ours for pair in twin.pairs.values())]
    wait_for(lambda: not any(database.rows(SESSIONS) for database in databases), f"the end of {arguments}")


def content(database: Database) -> list[list[tuple[object, ...]]]:
    return [database.rows(f"select x::text from {name} x order by 1") for name in ("t", "notes")]


@pytest.mark.parametrize(
    "failpoint",
    [pytest.param(point, marks=() if point == LAST else pytest.mark.slow) for point in POINTS],
)
def test_killed_reconciliation_is_all_or_nothing(twin: Twin, failpoint: str) -> None:
    """R8.17: rows and states are one commit; the next run completes it, or finds it done."""
    twin.publisher.run(TABLES)
    twin.publisher.run("insert into t select i, i from generate_series(1, 50) i")
    twin.publisher.run("insert into notes select i % 5, 'note' from generate_series(1, 50) i")
    twin.publisher.run("create publication p for table t where (id <= 30), notes where (n <= 3)")
    twin.publisher.run("alter table notes replica identity full; alter table t replica identity full")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    twin.publish("alter publication p set table t where (id > 10), notes where (n <> 1)")
    twin.publish("update t set a = -a where id = 20")
    ours = twin.pairs["s"].ours
    before, states = content(ours), twin.states("s")

    # Once at the first table; at points that each table reaches, at the second one too.
    reached = ("@1", "@2") if failpoint in EACH_TABLE else ("@1",)
    for turn in reached:
        killed(twin, failpoint + turn, "refresh", "s", "--reconcile")
        assert ours.rows(OURS) == []
        if failpoint == "reconcile.after_commit":
            assert content(ours) != before
        else:
            assert (content(ours), twin.states("s")) == (before, states)

    result = refresh(twin.config, "s", reconcile=True)
    is_done = failpoint == "reconcile.after_commit"
    # t: 31 to 50 enter, 1 to 10 leave, 20 differs; notes: ten 4 enter, ten 1 leave
    assert (result.inserted, result.updated, result.deleted) == ((0, 0, 0) if is_done else (30, 1, 20))
    assert ours.rows(
        "select count(*), min(id), max(id) from t where a = case id when 20 then -20 else id end"
    ) == [(40, 11, 50)]
    assert ours.rows("select n, count(*) from notes group by n order by n") == [(n, 10) for n in (0, 2, 3, 4)]
    twin.publish("insert into t values (60, 60), (5, 5000) on conflict do nothing")
    (synced,) = twin.sync_ours()
    assert synced.replay.error is None
    assert twin.pairs["s"].ours.rows("select id from t where id > 50 or id < 11") == [(60,)]


def test_killed_refresh_is_completed_by_the_next(twin: Twin) -> None:
    """R7.12, R7.13: tables that entered and were not copied wait, and nothing passes them by."""
    twin.publisher.run(f"{TABLES}; insert into t values (1, 1); insert into notes values (1, 'one')")
    twin.publisher.run("alter table notes replica identity full; create publication p for table t")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    twin.publish("alter publication p set table notes")

    killed(twin, "snapshot.after_export", "refresh", "s")
    assert twin.states("s") == {"notes": Pending()}
    twin.publish("insert into notes values (2, 'two');\ninsert into t values (2, 2)")
    result = refresh(twin.config, "s")
    assert (result.added, result.removed, result.snapshot.rows) == ((), (), 2)
    twin.publish("insert into notes values (3, 'three')")
    twin.sync_ours()
    ours = twin.pairs["s"].ours
    assert ours.rows("select n from notes order by n") == [(1,), (2,), (3,)]
    assert ours.rows("table t") == [(1, 1)]
    assert {type(state) for state in twin.states("s").values()} == {Ready}


@pytest.mark.parametrize(
    ("command", "failpoint"),
    [
        pytest.param("replay", "replay.before_commit", marks=pytest.mark.slow),
        pytest.param("replay", "replay.after_commit", marks=pytest.mark.slow),
        pytest.param("sync", "reconcile.after_staging", marks=pytest.mark.slow),
        ("sync", LAST),
        pytest.param("snapshot", "reconcile.after_commit", marks=pytest.mark.slow),
    ],
)
def test_killed_values_of_a_rewritten_table_are_compared_by_the_next_run(
    twin: Twin, command: str, failpoint: str
) -> None:
    """R11.9, R8.17: the mark commits with the position after the rewrite, and is removed with the values."""
    twin.publisher.run(TABLES)
    twin.publisher.run("insert into t values (1, 1), (2, 2); create publication p for table t")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    ours = twin.pairs["s"].ours
    ours.run("insert into t values (50, 50)")
    twin.publish("insert into t values (3, 3);\nalter table t alter a type int using a * 10")
    capture(twin.config, "pub")
    if command == "snapshot":
        replay(twin.config, ["s"])

    killed(twin, failpoint, command, "s")

    assert ours.rows(OURS) == []
    values = [row[1] for row in ours.rows("select * from t order by id")]
    with ours.connect() as connection:
        is_marked = bool(subscription_tables.rewritten_tables(connection, "s"))
    if failpoint == "replay.before_commit":
        assert (values, is_marked) == ([1, 2, 50], False)
    elif failpoint == "reconcile.after_commit":
        assert (values, is_marked) == ([10, 20, 30, 50], False)
    else:
        assert (values, is_marked) == ([1, 2, 3, 50], True)
    twin.sync_ours()
    assert ours.rows("select * from t order by id") == [(1, 10), (2, 20), (3, 30), (50, 50)]
