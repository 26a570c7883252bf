"""`cdc-replay plan` as a person runs it: exit codes, JSON, files that are none. It starts no Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.command_line import CommandLine
from fixtures.postgres import Database


@pytest.fixture
def cli(tmp_path: Path, publisher: Database, subscriber: Database) -> CommandLine:
    publisher.run(
        "create table t (id int primary key, a int); insert into t values (1, 1), (2, 2), (3, 3);"
        " create publication p for table t where (id > 1)"
    )
    command_line = CommandLine(tmp_path, publisher, subscriber)
    command_line.write("p")
    return command_line


def script(cli: CommandLine, text: str) -> str:
    file = cli.folder / "proposal.sql"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_effects_as_json_and_as_words(cli: CommandLine) -> None:
    file = script(cli, "\ufeffalter publication p set table t;")
    result = cli.succeeds("plan", "s", "--publications", file)
    [table] = result["tables"]
    assert table["rows"] == {"now": 2, "then": 3, "enter": 1, "leave": 0, "error": None}
    assert (result["refused"], result["log_error"]) == (None, "there is no change log yet")
    done = cli.run("plan", "s", "--publications", file)
    assert done.returncode == 0
    assert "1 row would enter, 0 would leave" in " ".join(done.stdout.split())


def test_a_script_from_standard_input(cli: CommandLine) -> None:
    done = cli.run("plan", "s", "--publications", "-", lines=["alter publication p", "drop table t"])
    assert done.returncode == 0, done.stderr
    assert "removed" in done.stdout


def test_what_postgresql_refuses_is_exit_code_1(cli: CommandLine) -> None:
    file = script(cli, "alter publication p set table t where (a > random())")
    done = cli.run("plan", "s", "--publications", file)
    assert done.returncode == 1
    assert "invalid publication WHERE expression" in done.stderr
    assert "line 1:" in done.stdout


def test_updates_that_would_fail_are_exit_code_1(cli: CommandLine) -> None:
    file = script(cli, "alter publication p set table t where (a > 1)")
    done = cli.run("plan", "s", "--publications", file)
    assert done.returncode == 1
    assert "would refuse every UPDATE of public.t, every DELETE of public.t" in done.stderr


@pytest.mark.parametrize(
    "text", ["drop table t", "alter publication p drop table t; drop table t", "", "\x00", "\\! id"]
)
def test_another_script_is_exit_code_2(cli: CommandLine, text: str) -> None:
    cli.fails(
        2, "plan", "s", "--publications", script(cli, text), says=["of the proposal", "Nothing was exec"]
    )
    assert cli.publisher.rows("select count(*) from t") == [(3,)]


def test_files_that_cannot_be_read_are_exit_code_2(cli: CommandLine) -> None:
    missing, binary = cli.folder / "missing.sql", cli.folder / "binary.sql"
    binary.write_bytes(b"\xff\xfe")
    cli.fails(2, "plan", "s", "--publications", str(missing), says=["cannot read"])
    cli.fails(2, "plan", "s", "--publications", str(binary), says=["not a text in UTF-8"])
    folder = cli.run("plan", "s", "--publications", str(cli.folder))
    assert folder.returncode == 2


def test_no_programs_for_a_throwaway_server(cli: CommandLine, tmp_path: Path) -> None:
    file = script(cli, "alter publication p drop table t")
    arguments = ("plan", "s", "--publications", file, "--throwaway", "--bin", str(tmp_path))
    cli.fails(1, *arguments, says=["the publisher cannot parse the proposal: it was asked for"])
