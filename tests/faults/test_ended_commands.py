"""Asked to end (SIGTERM) or killed (SIGKILL) anywhere, a command is over, and the next one completes it.

A command stands still at a named point; the signal comes; it goes on. Within ten seconds it and all that it
has started are gone, no session of it is left on a server, and nothing of it is half done: run again, it ends
where an undisturbed one does. Asked to end, it says so in one line and exits with 143, whatever thread is at
the point, and also while a server works for it.

| points                | the command                                 | what is compared afterwards         |
|-----------------------|---------------------------------------------|-------------------------------------|
| capture, compaction   | capture                                     | the log (`verify-log`), a replay    |
| prune                 | prune                                       | likewise                            |
| snapshot              | snapshot                                    | rows with what is published         |
| replay                | replay; backfill into another database      | rows with what is published         |
| reconcile             | refresh --reconcile                         | rows with what is published         |
| validate              | validate                                    | the result                          |
| parking, resume       | replay of what is refused; resume           | rows, and what is parked            |
| teardown              | teardown, of both sides                     | nothing of ours is there            |
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Final

import pytest

from benchmarks.memory import descendants
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.backfill import backfill
from cdc_replay.commands.capture import capture
from cdc_replay.commands.prune import prune
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.replay import replay
from cdc_replay.commands.resume import resume
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.teardown import teardown
from cdc_replay.commands.validate import validate
from cdc_replay.commands.verify_log import verify_log
from cdc_replay.failpoints import FAILPOINTS
from faults.ending import LIMIT_SECONDS, SESSIONS, check_nothing_is_left, end, run_and_end, send, start, state
from fixtures.native import wait_for
from fixtures.postgres import Database, our_origins
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLES: Final = "create table t (id int primary key, a int)"
PUBLISHED: Final = f"""
    {TABLES};
    alter table t replica identity full;
    create publication p for table t where (a > 10);
    insert into t select n, n from generate_series(1, 3000) n
"""
TRAFFIC: Final = """
    insert into t values (5001, 5), (5002, 50);
    update t set a = a + 5 where id between 5 and 20;
    delete from t where id > 2990 and id < 3001
"""
LONG: Final = "create table long (id int primary key, body text)"
EXPECTED: Final = "select * from t where a > 10 order by id"
IN_WORKERS: Final = ("snapshot.mid_copy", "snapshot.after_chunk", "replay.mid_staging")
SIGNALS: Final = (signal.SIGTERM, signal.SIGKILL)
OURS_ON_PUBLISHER: Final = """
    select pubname::text from pg_publication where pubname ~ '^cdc_replay'
    union all select evtname::text from pg_event_trigger
    union all select nspname::text from pg_namespace where nspname ~ '^cdc_replay'
    union all select slot_name::text from pg_replication_slots where database = current_database()
"""


def points(*prefixes: str) -> list[str]:
    return [name for name in FAILPOINTS if name.startswith(prefixes)]


def check_equal(twin: Twin, database: Database) -> None:
    assert database.rows("select * from t order by id") == twin.publisher.rows(EXPECTED)


@pytest.fixture
def synced(twin: Twin) -> Twin:
    """A subscription with its rows, and changes that are captured and not replayed."""
    set_up(twin)
    return twin


@pytest.fixture
def synced_on_storage(on_storage: Twin) -> Twin:
    """The same, with the log on a disk and in an object store."""
    set_up(on_storage)
    return on_storage


def set_up(twin: Twin) -> None:
    twin.publisher.run(PUBLISHED)
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    twin.publish(TRAFFIC)
    capture(twin.config, "pub")


@pytest.mark.parametrize(
    "signal_number",
    [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)],
    ids=["SIGTERM", "SIGKILL"],
)
def test_capture_that_is_ended_loses_and_doubles_nothing(
    on_storage: Twin, signal_number: signal.Signals
) -> None:
    twin = on_storage
    twin.publisher.run(PUBLISHED)
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    for turn, failpoint in enumerate(points("capture.")):
        twin.publish(f"insert into t values ({6000 + turn}, 20)")
        if failpoint == "capture.after_roots":
            continue  # only with a TRUNCATE of a partitioned table; tests of captures go there
        run_and_end(twin, signal_number, failpoint, "capture", "pub")
    capture(twin.config, "pub")
    verify_log(twin.config, "pub")
    (result,) = replay(twin.config, ["s"])
    assert (result.error, result.applied["insert"]) == (None, len(points("capture.")))
    check_equal(twin, twin.pairs["s"].ours)


def test_replay_that_waits_for_a_lock_ends_when_it_is_asked_to(synced: Twin) -> None:
    """The server works for a thread of the command, which does not hear of the signal."""
    ours = synced.pairs["s"].ours
    waiting = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with ours.connect() as connection, connection.transaction():
        connection.execute("lock table t in share mode")
        process = start(synced, "none", "replay", "s")
        wait_for(lambda: bool(ours.rows(waiting)), "the replay to wait for the lock")
        end(synced, process, signal.SIGTERM)
        assert ours.rows(waiting) == []
    (result,) = replay(synced.config, ["s"])
    assert result.error is None
    check_equal(synced, ours)


def test_following_sync_finishes_its_window_when_it_is_asked_to_end(synced: Twin) -> None:
    process = start(synced, "replay.mid_merge=stop", "sync", "--follow", "s")
    wait_for(lambda: state(process.pid) == "T", "the merge of the first window")
    family = descendants(process.pid)
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGCONT)

    _, error_text = process.communicate(timeout=300)

    assert process.returncode == 0, error_text
    check_nothing_is_left(synced, family)
    check_equal(synced, synced.pairs["s"].ours)


@pytest.mark.slow
def test_statement_of_a_killed_command_does_not_go_on(synced: Twin) -> None:
    """The server looks after its client: SIGKILL leaves no session that waits, and then writes."""
    ours = synced.pairs["s"].ours
    with ours.connect() as connection, connection.transaction():
        connection.execute("lock table t in share mode")
        synced.change("s", lock_timeout=0)
        process = start(synced, "none", "replay", "s")
        waiting = (
            "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        wait_for(lambda: bool(ours.rows(waiting)), "the replay to wait for the lock")
        end(synced, process, signal.SIGKILL)
    replay(synced.config, ["s"])
    check_equal(synced, ours)


@pytest.mark.parametrize(
    "failpoint", ["replay.mid_staging", pytest.param("replay.after_staging", marks=pytest.mark.slow)]
)
def test_killed_jvm_is_reported(synced: Twin, failpoint: str) -> None:
    """While a worker stages, and between staging and merge; as the kernel does where memory runs out."""
    process = start(synced, f"{failpoint}=stop", "replay", "s")
    output = kill_jvm(process, failpoint)
    # What is staged already needs no JVM any more.
    assert process.returncode == int(failpoint == "replay.mid_staging"), output
    assert ("cdc-replay: s: Spark ended: replay of" in output) is (failpoint == "replay.mid_staging"), output
    assert "Errno" not in output
    (result,) = replay(synced.config, ["s"])
    assert result.error is None
    check_equal(synced, synced.pairs["s"].ours)


@pytest.mark.slow
def test_jvm_killed_during_a_copy_is_reported(synced: Twin) -> None:
    process = start(synced, "snapshot.mid_copy=stop", "snapshot", "s", "--table", "public.t")
    output = kill_jvm(process, "snapshot.mid_copy")
    assert process.returncode == 1, output
    assert 'cdc-replay: Spark ended: snapshot of subscription "s" was not completed' in output
    assert "Errno" not in output
    assert "Traceback" not in output
    replay(synced.config, ["s"])
    check_equal(synced, synced.pairs["s"].ours)


def kill_jvm(process: subprocess.Popen[str], failpoint: str) -> str:
    """Kill the JVM of a command whose worker has stopped at a failpoint; the command's output."""
    wait_for(lambda: any(state(pid) == "T" for pid in descendants(process.pid)), f"{failpoint}")
    family = descendants(process.pid)
    (jvm, *_) = [pid for pid in family if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8") == "java\n"]
    os.kill(jvm, signal.SIGKILL)
    send(family, signal.SIGCONT)
    _, output = process.communicate(timeout=300)
    wait_for(lambda: not any(state(pid) not in {"", "Z"} for pid in family), "the workers to end")
    return output


SOON: Final = ("replay.mid_merge", signal.SIGTERM)
"""The case of the ordinary run; all others take too long."""


def of_points(*prefixes: str) -> list[object]:
    return [
        pytest.param(
            name,
            signal_number,
            marks=() if (name, signal_number) == SOON else pytest.mark.slow,
            id=f"{name}-{signal_number.name}",
        )
        for name in points(*prefixes)
        for signal_number in SIGNALS
    ]


@pytest.mark.parametrize(("failpoint", "signal_number"), of_points("replay."))
def test_replay_that_is_ended_is_applied_exactly_once(
    synced_on_storage: Twin, failpoint: str, signal_number: signal.Signals
) -> None:
    synced = synced_on_storage
    run_and_end(synced, signal_number, failpoint, "replay", "s")
    (result,) = replay(synced.config, ["s"])
    assert result.error is None
    if signal_number is signal.SIGKILL:
        # Asked to end, a thread that is about to commit may do so.
        assert (sum(result.applied.values()) == 0) is (failpoint == "replay.after_commit")
    check_equal(synced, synced.pairs["s"].ours)
    # What a killed run staged is dropped by the next one that applies something.
    synced.publish("update t set a = 13 where id = 100")
    capture(synced.config, "pub")
    replay(synced.config, ["s"])
    check_equal(synced, synced.pairs["s"].ours)
    assert synced.pairs["s"].ours.rows("select from pg_class where relname ~ '^stage'") == []


@pytest.mark.parametrize(("failpoint", "signal_number"), of_points("fill."))
def test_replay_that_is_ended_while_it_reads_unsent_values_has_them_in_the_end(
    synced: Twin, failpoint: str, signal_number: signal.Signals
) -> None:
    """R4.6: a row moves into the filter, and its long value did not come with the change."""
    synced.publisher.run(LONG + "; alter table long alter body set storage external")
    synced.publisher.run("insert into long select n, repeat('x', 3000) from generate_series(1, 20) n")
    synced.publisher.run("create publication l for table long where (id > 1000)")
    synced.subscribe("l", "l", tables=LONG, native=False)
    synced.sync_ours("l")
    synced.publish("update long set id = id + 1000 where id < 11")
    capture(synced.config, "pub")
    run_and_end(synced, signal_number, failpoint, "replay", "l")
    (result,) = replay(synced.config, ["l"])
    assert result.error is None
    moved = "select * from long where id > 1000 order by id"
    assert synced.pairs["l"].ours.rows(moved) == synced.publisher.rows(moved)


@pytest.mark.parametrize(("failpoint", "signal_number"), of_points("snapshot."))
def test_snapshot_that_is_ended_is_completed(
    synced: Twin, failpoint: str, signal_number: signal.Signals
) -> None:
    synced.subscribe("new", "p", tables=TABLES, native=False, snapshot_chunk="64kB")
    if failpoint == "snapshot.after_late":  # a copy that goes on, with rows that have changed meanwhile
        run_and_end(synced, signal_number, "snapshot.before_swap", "snapshot", "new")
        synced.publish("update t set a = a + 1 where id = 30")
    run_and_end(synced, signal_number, failpoint, "snapshot", "new")
    snapshot(synced.config, "new")
    for result in synced.sync_ours():
        assert result.replay.error is None
    check_equal(synced, synced.pairs["new"].ours)


@pytest.mark.parametrize(("failpoint", "signal_number"), of_points("reconcile."))
def test_reconciliation_that_is_ended_is_completed(
    synced: Twin, failpoint: str, signal_number: signal.Signals
) -> None:
    synced.pairs["s"].ours.run("delete from t where id < 30")
    run_and_end(synced, signal_number, failpoint, "refresh", "s", "--reconcile", "--yes")
    refresh(synced.config, "s", reconcile=True)
    check_equal(synced, synced.pairs["s"].ours)


@pytest.mark.parametrize(("failpoint", "signal_number"), of_points("validate."))
def test_validation_that_is_ended_is_done_again(
    synced: Twin, failpoint: str, signal_number: signal.Signals
) -> None:
    run_and_end(synced, signal_number, failpoint, "validate", "s")
    result = validate(synced.config, "s")
    assert (result.success, result.error) == (True, None)


@pytest.mark.parametrize(
    ("failpoint", "signal_number"),
    of_points(
        "backfill.", "replay.mid_staging", "replay.after_staging", "replay.before", "replay.after_commit"
    ),
)
def test_backfill_that_is_ended_is_done_again(
    synced: Twin, failpoint: str, signal_number: signal.Signals
) -> None:
    """Into another database, which keeps no state of it."""
    window = ChangeLog.open(str(synced.change_log))
    into = synced.database(TABLES)
    range_ = ("--from", str(window.start_lsn), "--to", str(window.end_lsn))
    run_and_end(synced, signal_number, failpoint, "backfill", "s", *range_, "--into", into.dsn)
    wait_for(lambda: not into.rows(SESSIONS), "sessions to end", LIMIT_SECONDS)
    backfill(synced.config, "s", str(window.start_lsn), str(window.end_lsn), into=into.dsn)
    changed = "select * from t where a > 10 and (id between 5 and 20 or id > 5000) order by id"
    assert into.rows(changed) == synced.publisher.rows(changed)
    assert into.rows("select from pg_namespace where nspname = 'cdc_replay'") == []


@pytest.mark.parametrize(("failpoint", "signal_number"), of_points("parking."))
def test_replay_that_is_ended_while_it_parks_has_parked(
    synced: Twin, failpoint: str, signal_number: signal.Signals
) -> None:
    ours = synced.pairs["s"].ours
    ours.run("alter table t add constraint small check (id < 5000)")
    run_and_end(synced, signal_number, failpoint, "replay", "s")
    (result,) = replay(synced.config, ["s"])
    assert "is parked before the transaction" in (result.error or "")
    ours.run("alter table t drop constraint small")
    (result,) = replay(synced.config, ["s"])
    assert result.error is None
    check_equal(synced, ours)


@pytest.mark.parametrize(("failpoint", "signal_number"), of_points("resume."))
def test_resume_that_is_ended_has_resumed_or_not(
    synced: Twin, failpoint: str, signal_number: signal.Signals
) -> None:
    ours = synced.pairs["s"].ours
    ours.run("alter table t add constraint small check (id < 5000)")
    replay(synced.config, ["s"])
    ours.run("alter table t drop constraint small")
    run_and_end(synced, signal_number, failpoint, "resume", "s")
    parked = "select from cdc_replay.subscription where parked_at is not null"
    assert bool(ours.rows(parked)) is (failpoint == "resume.before_commit")
    if ours.rows(parked):
        resume(synced.config, "s")
    (result,) = replay(synced.config, ["s"])
    assert result.error is None
    check_equal(synced, ours)


@pytest.mark.parametrize(("failpoint", "signal_number"), of_points("compaction.", "prune."))
def test_maintenance_that_is_ended_leaves_a_whole_log(
    synced_on_storage: Twin, failpoint: str, signal_number: signal.Signals
) -> None:
    """A pull for each of two hundred transactions, so that there is something to compact."""
    synced = synced_on_storage
    synced.options["max_changes_per_pull"] = 1
    synced.publish(";\n".join(f"insert into t values ({n}, {n})" for n in range(7000, 7210)))
    if failpoint.startswith("compaction."):
        run_and_end(synced, signal_number, failpoint, "capture", "pub")
    else:
        capture(synced.config, "pub")
        replay(synced.config, ["s"])
        run_and_end(synced, signal_number, failpoint, "prune", "pub", "--keep-hours", "0", "--yes")
        prune(synced.config, "pub", keep_hours=0)
    synced.publish("update t set a = 12 where id = 7000")
    capture(synced.config, "pub")
    verify_log(synced.config, "pub")
    (result,) = replay(synced.config, ["s"])
    assert result.error is None
    check_equal(synced, synced.pairs["s"].ours)


@pytest.mark.parametrize(("failpoint", "signal_number"), of_points("teardown."))
def test_teardown_that_is_ended_is_completed(
    synced: Twin, failpoint: str, signal_number: signal.Signals
) -> None:
    name = "pub" if failpoint in {"teardown.after_slot", "teardown.after_publications"} else "s"
    replay(synced.config, ["s"])
    run_and_end(synced, signal_number, failpoint, "teardown", name)
    teardown(synced.config, "pub")
    teardown(synced.config, "s")
    ours = synced.pairs["s"].ours
    assert synced.publisher.rows(OURS_ON_PUBLISHER) == []
    assert ours.rows("select from pg_namespace where nspname = 'cdc_replay'") == []
    assert our_origins(ours) == []
    assert ChangeLog.exists(str(synced.change_log))
