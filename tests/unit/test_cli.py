"""Help, version, completion and suggestions, at 80 columns."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cdc_replay.cli import app, main

CONFIGURATION = """
publishers: {shop: {dsn: "host=db1", change_log: ./log}}
subscriptions:
  nsw: {publisher: shop, publications: [p], dsn: "host=db2"}
  vic: {publisher: shop, publications: [p], dsn: "host=db2"}
"""
QUICK_COMMANDS = (
    "status",
    "setup",
    "capture",
    "snapshot",
    "replay",
    "sync",
    "backfill",
    "refresh",
    "why",
    "doctor",
)
COLUMNS = {"COLUMNS": "80", "TERM": "dumb"}


def run(*arguments: str, **environment: str) -> str:
    return CliRunner().invoke(app, arguments, env=COLUMNS | environment, prog_name="cdc-replay").output


def ends(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code, capsys.readouterr().err


def test_help_is_whole_and_in_groups() -> None:
    shown = run("--help")
    assert max(map(len, shown.splitlines())) <= 80
    assert "..." not in shown.replace("[ARGS]...", "")
    groups = ["Set up", "Replicate", "Repair", "Look and prove", "Remove", "Scripts"]
    assert sorted(groups, key=shown.index) == groups


def test_version_is_that_of_the_package() -> None:
    assert run("--version") == f"cdc-replay {importlib.metadata.version('cdc-replay')}\n"


def test_nearest_command_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = ends(capsys, "stauts")
    assert (code, "Did you mean 'status'?" in shown) == (2, True)


@pytest.mark.parametrize("option", ["--from", "--to"])
def test_timestamp_without_a_zone_is_refused(capsys: pytest.CaptureFixture[str], option: str) -> None:
    given = {"--from": "0/1", "--to": "0/2"} | {option: "2026-01-31T12:00"}
    code, shown = ends(capsys, "backfill", "s", *(word for pair in given.items() for word in pair))
    assert (code, "Give 2026-01-31T12:00:00Z for UTC" in shown) == (2, True)


def test_names_of_the_configuration_are_completed(tmp_path: Path) -> None:
    file = tmp_path / "cdc_replay.yaml"
    file.write_text(CONFIGURATION, encoding="utf-8")
    asked = {"_CDC_REPLAY_COMPLETE": "complete_bash", "COMP_WORDS": "cdc-replay replay n", "COMP_CWORD": "2"}
    assert run(**asked, CDC_REPLAY_CONFIG=str(file)).split() == ["nsw"]
    assert run(**asked, CDC_REPLAY_CONFIG="/nonexistent").strip() == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--due", "--tables", "public.t"], "--due chooses the tables"),
        (["--sample", "5"], "not a share"),
        (["--sample", "0%"], "not a share"),
        (["--max-bytes", "much"], "not a size"),
        (["--max-seconds", "-1"], "'--max-seconds'"),
        (["--dry-run"], "--dry-run needs --repair"),
    ],
)
def test_a_validation_is_not_limited_by_nonsense(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["validate", "nsw", *arguments])
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


STRICT = {"PYTHONIOENCODING": "utf-8:strict"}
"""As in most locales; in that of C, Python lets pass what is no UTF-8."""


def program(*arguments: str | bytes, lines: bytes = b"", **environment: str) -> tuple[int, list[str], str]:
    """Exit code, the errors in the objects on standard output, and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "cdc_replay.cli", *arguments],
        env=os.environ | STRICT | environment,
        input=lines,
        capture_output=True,
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, [answer["error"] for answer in answers], done.stderr.decode()


@pytest.fixture
def configured(tmp_path: Path) -> str:
    file = tmp_path / "cdc_replay.yaml"
    file.write_text(CONFIGURATION, encoding="utf-8")
    return str(file)


def test_an_argument_that_is_no_text_is_an_error_in_json(configured: str) -> None:
    code, [error], shown = program("status", b"\xff", "--json", CDC_REPLAY_CONFIG=configured)
    assert (code, error.split("\n")[0]) == (2, 'subscription "\udcff" is not configured')
    assert "Traceback" not in shown


def test_a_line_that_is_no_text_ends_no_batch(configured: str) -> None:
    lines = b"status \xff\nstatus nobody\n"
    code, errors, shown = program("batch", lines=lines, CDC_REPLAY_CONFIG=configured)
    assert code == 0, shown
    assert ['"\udcff"' in errors[0], '"nobody"' in errors[1]] == [True, True]


def test_no_command_of_a_batch_reads_its_lines(configured: str) -> None:
    lines = b"plan nsw --publications -\nplan nsw --publications -\nstatus nobody\n"
    code, errors, shown = program("batch", lines=lines, CDC_REPLAY_CONFIG=configured)
    assert code == 0, shown
    assert errors[0] == errors[1]
    assert '"nobody"' in errors[2]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("target", ["/dev/full", "pipe"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_result_that_cannot_be_written_is_a_failure_with_a_reason(
    configured: str, options: tuple[str, ...], target: str, unbuffered: str
) -> None:
    """A disk without room, a program that reads no further: a traceback is no reason."""
    if target == "pipe":
        reader, output = os.pipe()
        os.close(reader)
    else:
        output = os.open(target, os.O_WRONLY)
    done = subprocess.run(
        [sys.executable, "-m", "cdc_replay.cli", "status", *options],
        env=os.environ | {"CDC_REPLAY_CONFIG": configured, "PYTHONUNBUFFERED": unbuffered},
        stdout=output,
        stderr=subprocess.PIPE,
        check=False,
        text=True,
    )
    os.close(output)
    reason = {"pipe": "Broken pipe", "/dev/full": "No space left on device"}[target]
    expected = f"cdc-replay: the result cannot be written to standard output: {reason}\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_a_command_without_standard_streams_runs(configured: str) -> None:
    """As some supervisors start programs."""
    script = f'exec "{sys.executable}" -m cdc_replay.cli status --json <&- >&- 2>&-'
    done = subprocess.run(
        ["/bin/sh", "-c", script], env=os.environ | {"CDC_REPLAY_CONFIG": configured}, check=False
    )
    assert done.returncode == 0


def test_commands_start_without_pandas_and_great_expectations() -> None:
    """Arrow loads pandas for a scalar or an array of Python values: a quarter of a second at each start."""
    modules = ", ".join(f"cdc_replay.commands.{command}" for command in QUICK_COMMANDS)
    program = f"import sys, cdc_replay.cli, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert not {"pandas", "great_expectations"} & {*done.stdout.split()}
