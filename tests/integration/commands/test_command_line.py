"""The program end to end: one JSON object on standard output, logs beside it, tables for a person, batch."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cdc_replay.cli import run_line
from cdc_replay.commands.capture import capture
from fixtures.command_line import PROGRAM, CommandLine, one_object
from fixtures.native import wait_for
from fixtures.postgres import Database
from fixtures.twin import Twin

TABLES = "create table t (id int primary key, a int)"
RESULT = {"subscription", "from_lsn", "to_lsn", "seconds"}
REPLAY = RESULT | {
    "changes_read", "transactions", "filtered_out", "updates_to_insert", "updates_to_delete", "applied",
    "conflicts",
}  # fmt: skip


@pytest.fixture
def cli(tmp_path: Path, publisher: Database, subscriber: Database) -> CommandLine:
    publisher.run(f"{TABLES}; create publication p for table t where (id > 1)")
    publisher.run("insert into t values (1, 1), (2, 2)")
    subscriber.run(TABLES)
    command_line = CommandLine(tmp_path, publisher, subscriber, environment={})
    command_line.write("p")
    return command_line


def run_here(
    twin: Twin, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int | str | None, str, str]:
    """Run in this process, on its Spark session: exit code, standard output, standard error."""
    from cdc_replay.cli import main

    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--config", str(twin.file), "--json"])
    output = capsys.readouterr()
    return ended.value.code, output.out, output.err


def test_an_interrupted_command_has_failed(cli: CommandLine) -> None:
    """R1.35: creating the slot waits for the open transaction."""
    waiting = (
        "select from pg_stat_activity where wait_event_type = 'Lock' and backend_type = 'client backend'"
    )
    with cli.publisher.connect() as idle:
        idle.execute("begin; insert into t values (3, 3)")
        command = [str(PROGRAM), "setup", "pub", "--json", "--config", str(cli.file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            wait_for(lambda: bool(cli.publisher.rows(waiting)) or running.poll() is not None, "the slot")
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=300)
        idle.execute("rollback")
    assert (running.returncode, one_object(out)) == (1, {"error": "interrupted"})
    assert "Traceback" not in err


def test_an_interrupted_batch_ends(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cdc_replay.commands.status.repeated_status", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_line(f"status --config {shlex.quote(str(cli.file))}")


@pytest.mark.spark
def test_a_day_at_the_command_line(cli: CommandLine) -> None:
    """Every answer to --json is one object with the promised fields; the exit code says whether it holds."""
    planned = cli.succeeds("setup", "pub", "--dry-run")
    assert planned["dry_run"]
    assert any("pg_create_logical_replication_slot" in statement for statement in planned["statements"])
    assert not cli.change_log.exists()
    cli.succeeds("setup", "pub")
    first = cli.succeeds("sync", "s")
    assert first.keys() >= RESULT | {"snapshot", "capture", "replay"}
    assert first["replay"].keys() >= REPLAY
    assert (first["snapshot"]["rows"], cli.subscriber.rows("table t")) == (1, [(2, 2)])

    cli.publisher.run("""
        insert into t values (3, 3); update t set id = 10 where id = 1; update t set id = 0 where id = 2
    """)
    captured = cli.succeeds("capture", "pub")
    assert captured.keys() >= {"publisher", "from_lsn", "to_lsn", "seconds"}
    assert (captured["transactions"], captured["messages"]) == (1, 3)
    replayed = cli.succeeds("replay", "s")
    assert replayed.keys() >= REPLAY
    assert (replayed["updates_to_insert"], replayed["updates_to_delete"]) == (1, 1)
    assert replayed["applied"] == {"insert": 2, "update": 0, "delete": 1, "truncate": 0}
    assert (replayed["changes_read"], replayed["transactions"], replayed["conflicts"]) == (3, 1, {})
    # What follows has nothing to apply: it needs no Spark.
    cli.environment = {"JAVA_HOME": "/nonexistent"}
    assert cli.succeeds("explain", "s")["tables"][0]["insert"] == "(id > 1)"
    assert cli.succeeds("validate", "s")["success"]
    cli.subscriber.run("update t set a = -3 where id = 3")
    assert "different id=3" in cli.fails(1, "validate", "s", says=["public.t"])
    # For a person: aligned tables on standard output, log lines beside it.
    status = cli.run("status", "s")
    assert (status.returncode, "public.t" in status.stdout) == (0, True)
    assert "not consistent at" in status.stdout
    cli.publisher.run("insert into t values (4, 4)")
    again = cli.run("capture", "pub", "--log-level", "info")
    assert "captured pub up to" in again.stdout
    assert (" INFO " in again.stderr, " INFO " in again.stdout) == (True, False)
    removed = {"subscription": "s", "removed": ["state of subscription s"]}
    assert cli.succeeds("teardown", "s").items() >= removed.items()
    assert cli.succeeds("teardown", "pub")["removed"][0] == f"replication slot {cli.slot}"


@pytest.mark.spark
def test_a_batch_serves_many_configurations_and_outlives_bad_lines(cli: CommandLine) -> None:
    """One process and one Spark session; one object per line, in order; a comment is none."""
    other = cli.folder / "other.yaml"
    other.write_text(cli.file.read_text().replace("- p", "- missing").replace(cli.slot, f"{cli.slot}_2"))
    lines = [
        "setup pub",
        "# a comment",
        "",
        f"setup pub --config {shlex.quote(str(other))}",
        "sync s",
        "rewind",
        "replay s --to-lsn 1",
        "replay 's",
        "batch",
        "replay --help",
        "replay s --json",
        "sync nobody",
        "status",
    ]
    cli.environment["CDC_REPLAY_CONFIG"] = "/nonexistent"
    done = cli.run("batch", "--json", "--config", str(cli.file), lines=lines)

    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [entry["command"] for entry in answers] == [
        line for line in lines if line and not line.startswith("#")
    ]
    ok = [True, False, True, False, False, False, False, True, True, False, True]
    assert [entry["ok"] for entry in answers] == ok
    assert "do not exist: missing" in answers[1]["error"]
    assert answers[2]["result"]["snapshot"]["rows"] == 1
    assert "No such command 'rewind'" in answers[3]["error"]
    assert 'subscription "nobody" is not configured' in answers[9]["error"]
    assert cli.subscriber.rows("table t") == [(2, 2)]


def test_the_log_level_of_a_batch_is_that_of_its_lines(cli: CommandLine) -> None:
    quiet = cli.run("batch", "--log-level", "warning", lines=["setup pub", "capture pub"])
    assert [json.loads(line)["ok"] for line in quiet.stdout.splitlines()] == [True, True], quiet.stdout
    assert " INFO " not in quiet.stderr

    cli.publisher.run("insert into t values (3, 3)")
    chatty = cli.run("batch", "--log-level", "warning", lines=["capture pub --log-level info"])
    assert " INFO captured pub" in chatty.stderr


@pytest.mark.spark
def test_several_subscriptions_give_a_list_and_any_failure_is_exit_code_1(
    twin: Twin, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where only Spark sees the damage of a segment. Naming one of them twice changes nothing."""
    run = partial(run_here, twin, capsys)
    twin.publisher.run(f"{TABLES}; create publication p for table t")
    for name in ("one", "two"):
        twin.subscribe(name, "p", tables=TABLES, native=False)
    for command in ("sync", "replay"):
        code, out, _ = run(command, "two", "one", "two")
        assert code == 0
        assert [entry["subscription"] for entry in one_object(out)["results"]] == ["two", "one"]
    assert one_object(run("replay", "one", "one")[1])["subscription"] == "one"

    twin.publisher.run("insert into t select n, n from generate_series(1, 2000) n")
    capture(twin.config, "pub")
    twin.pairs["two"].ours.run("drop table t")
    code, out, err = run("replay", "one", "two")
    assert code == 1
    results = one_object(out)["results"]
    assert [entry["error"] is None for entry in results] == [True, False]
    assert "two: " in err
    assert twin.pairs["one"].ours.rows("select count(*) from t") == [(2000,)]

    twin.publisher.run("update t set a = a + 1")
    capture(twin.config, "pub")
    newest = max((twin.change_log / "changes").glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
    content = bytearray(newest.read_bytes())
    third = len(content) // 3
    content[third : third + 64] = bytes(byte ^ 0xFF for byte in content[third : third + 64])
    newest.write_bytes(content)
    code, out, err = run("replay", "one")
    assert code == 1
    assert newest.name in str(one_object(out)["error"])
    assert "HINT" in err
    assert twin.pairs["one"].ours.rows("select sum(a - id) from t") == [(0,)]


@pytest.mark.spark
def test_command_in_the_error_resumes_the_parked_subscription(
    twin: Twin, capsys: pytest.CaptureFixture[str]
) -> None:
    run = partial(run_here, twin, capsys)
    twin.publisher.run(f"{TABLES}; create publication p for table t")
    twin.subscribe("one", "p", tables=TABLES, native=False)
    assert run("sync", "one")[0] == 0
    code, _, err = run("resume", "one")
    assert (code, 'subscription "one" is not parked' in err) == (1, True)

    twin.pairs["one"].ours.run("insert into t values (1, 100)")
    twin.publisher.run("insert into t values (1, 1), (2, 2)")
    twin.publisher.run("insert into t values (3, 3)")
    code, _, err = run("sync", "one")
    assert code == 1
    named = re.search(r"cdc-replay (resume one --skip (\S+/[0-9A-F]+))", err)
    assert named is not None, err
    assert "is parked before" in run("resume", "one", "--skip", "0/1")[2]
    code, out, _ = run(*named[1].split())
    assert code == 0
    assert one_object(out)["to_lsn"] == named[2]
    assert run("replay", "one")[0] == 0
    assert twin.pairs["one"].ours.rows("table t order by id") == [(1, 100), (3, 3)]


@pytest.mark.spark
def test_failed_spark_task_is_reported_without_stack_traces(cli: CommandLine) -> None:
    """But for those who ask for more with --log-level debug."""
    cli.succeeds("setup", "pub")
    cli.succeeds("sync", "s")
    before = set((cli.change_log / "changes").glob("*.parquet"))
    cli.publisher.run("insert into t values (3, 3)")
    cli.succeeds("capture", "pub")
    (segment,) = set((cli.change_log / "changes").glob("*.parquet")) - before
    # Only executors read the messages.
    group = pq.read_metadata(segment).row_group(0)
    (message,) = (c for n in range(group.num_columns) if (c := group.column(n)).path_in_schema == "message")
    content = bytearray(segment.read_bytes())
    content[message.data_page_offset + message.total_compressed_size - 1] ^= 0xFF
    segment.write_bytes(content)

    plain, more = cli.run("replay", "s"), cli.run("replay", "s", "--log-level", "debug")

    assert (plain.returncode, more.returncode) == (1, 1)
    for entry in (plain, more):
        assert f'cdc-replay: s: segment "{segment}" of the change log is damaged or missing' in entry.stderr
    assert "Exception in task" not in plain.stderr
    assert "Traceback" not in plain.stderr
    assert "\tat " not in plain.stderr
    assert "Exception in task" in more.stderr


def test_the_program_needs_a_command_and_shows_its_help(cli: CommandLine) -> None:
    bare, shown = cli.run(), cli.run("--help")
    assert (bare.returncode, shown.returncode) == (2, 0)
    assert "backfill" in bare.stderr + bare.stdout
    assert "backfill" in shown.stdout
