"""`init`, `doctor` and `status` as a new user meets them; nothing here starts Spark."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.cli import app, main
from cdc_replay.commands.capture import capture
from cdc_replay.commands.setup import setup, subscriber_script
from cdc_replay.config import load_config
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import state_schema, subscription_records, subscription_tables
from cdc_replay.terminal.setup_view import to_script
from fixtures.command_line import one_object
from fixtures.postgres import Database, run_as_administrator
from fixtures.screen import joined

TABLES = "create table t (id int primary key, a int); create table u (id int primary key)"
SCRIPT = "-- Run this with psql as a superuser"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "cdc_replay.yaml"
    monkeypatch.setenv("CDC_REPLAY_CONFIG", str(file))
    return file


@pytest.fixture
def roles(publisher: Database, subscriber: Database) -> Iterator[tuple[str, str]]:
    """DSNs of two roles that may only log in; the subscriber lacks one of the tables."""
    publisher.run(f"{TABLES}; create publication nsw_orders for table t where (a > 1), u")
    subscriber.run("create role owner_of_t; create table t (id int primary key, a int)")
    subscriber.run("alter table t owner to owner_of_t")
    names = [f"poor_{database.name}" for database in (publisher, subscriber)]
    for database, name in zip((publisher, subscriber), names, strict=True):
        database.run(f"create role {name} login")
    yield publisher.cluster.dsn(publisher.name, names[0]), subscriber.cluster.dsn(subscriber.name, names[1])
    for database, name in zip((publisher, subscriber), names, strict=True):
        database.run(f"drop owned by {name} cascade; drop role {name}")
    subscriber.run("drop owned by owner_of_t cascade; drop role owner_of_t")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str]:
    """The program in this process: exit code, and all that it prints, with lines joined."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    output = capsys.readouterr()
    return ended.value.code, joined(output.out + output.err)


def checks(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The messages of `doctor` by verdict."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    result: dict[str, Any] = one_object(capsys.readouterr().out)
    found: dict[str, list[str]] = {"ok": [], "warning": [], "failed": []}
    for check in result["checks"]:
        found[check["verdict"]].append(f"{check['subject']}: {check['message']} → {check['remedy']}")
    assert ended.value.code == (1 if found["failed"] else 0)
    assert all(text.strip().endswith((".", "`")) for text in found["failed"])
    return found


def test_init_and_doctor_lead_to_a_publisher_that_is_set_up(
    capsys: pytest.CaptureFixture[str],
    config: Path,
    roles: tuple[str, str],
    publisher: Database,
    subscriber: Database,
) -> None:
    sides = ("--publisher-dsn", roles[0], "--subscriber-dsn", roles[1], "--subscription-name", "s")
    code, told = run(capsys, "init", *sides, "--publication", "nsw_order")
    assert (code, "Did you mean nsw_orders?" in told) == (1, True)
    code, told = run(capsys, "init", *sides, "--publisher-name", "pub")
    assert (code, "missing on the subscriber: public.u" in told) == (0, True)
    assert told.endswith("cdc-replay setup pub cdc-replay sync s cdc-replay validate s cdc-replay status")
    assert config.stat().st_mode & 0o777 == 0o600
    assert run(capsys, "init", *sides)[0] == 2
    assert load_config(config).subscription("s").subscription.publications == ("nsw_orders",)

    publisher.run("alter table u replica identity nothing")
    found = checks(capsys)
    failed = " ".join(found["failed"])
    assert "table public.u has no replica identity" in " ".join(found["warning"])
    publisher.run("alter table u replica identity default")
    assert "lacks the attribute REPLICATION" in failed
    assert 'grant select on table "public"."t"' in failed
    assert "publisher pub: there is no change log yet" in " ".join(found["ok"])
    assert "in psql what `cdc-replay setup pub --dry-run --subscription s` prints" in failed
    assert '"public"."u": the table does not exist' in failed

    subscriber.run("create table u (id int primary key); alter table u owner to owner_of_t")
    script = to_script(setup(load_config(config), "pub", dry_run=True))
    assert SCRIPT in script
    assert "\n-- Capture publications" in script
    run_as_administrator(publisher, script)
    script = to_script(subscriber_script(load_config(config), "pub", "s"))
    assert "\n-- The schema of the subscriptions' state." in script
    run_as_administrator(subscriber, script)
    assert [text.partition(" → ")[0] for text in checks(capsys)["warning"]] == [
        "publisher pub: setup has not run, or has something to add"
    ]
    code, told = run(capsys, "setup", "pub")
    assert (code, "publisher pub is set up: nothing was missing" in told) == (0, True)
    found = checks(capsys)
    assert (found["warning"], found["failed"]) == ([], [])


@pytest.mark.usefixtures("config")
def test_init_names_no_publication_that_would_be_replaced_by_a_variable(
    capsys: pytest.CaptureFixture[str], roles: tuple[str, str], publisher: Database
) -> None:
    publisher.run('create publication "${HOME}" for table u')

    code, told = run(capsys, "init", "--publisher-dsn", roles[0], "--subscriber-dsn", roles[1])

    assert (code, 'publication "${HOME}" cannot be named' in told) == (2, True)


def test_doctor_without_a_configuration_or_java_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/proc/nowhere")
    failed = " ".join(checks(capsys)["failed"])
    assert "Java cannot be started" in failed
    assert "Spark's folder /proc/nowhere is not writable" in failed
    assert f'configuration file "{config}" does not exist' in failed
    config.write_text(
        "publishers: {p: {dsn: 'host=127.0.0.1 port=1', change_log: /proc/log}}", encoding="utf-8"
    )
    failed = " ".join(checks(capsys)["failed"])
    assert "change log /proc/log is not writable" in failed
    assert "publisher p: cannot connect" in failed


def test_init_asks_on_a_terminal_and_keeps_the_password_out_of_the_file(
    config: Path, publisher: Database, subscriber: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_replay.terminal.init_dialog.is_interactive", lambda: True)
    publisher.run(
        "create table t (id int primary key); create publication p for table t; create publication q"
    )
    answers = [publisher.dsn, "it's secret", "", subscriber.dsn, "", "dwh", "p"]
    done = CliRunner().invoke(app, ["init"], input="\n".join([*answers, ""]), prog_name="cdc-replay")
    assert done.exit_code == 0, done.output
    text = config.read_text(encoding="utf-8")
    assert ("secret" in text, f"{publisher.name.upper()}_PASSWORD" in text) == (False, True)
    assert "publications: [p]" in text
    again = CliRunner().invoke(app, ["init"], input="n\n", prog_name="cdc-replay")
    assert (again.exit_code, config.read_text(encoding="utf-8")) == (1, text)


@dataclass
class Sides:
    """A configuration `pub`, `s` of two databases, and a subscriber without Spark's work."""

    file: Path
    publisher: Database
    subscriber: Database

    def write(self, **changed: str) -> None:
        publisher = {"dsn": self.publisher.dsn, "slot": f"first_{self.publisher.name}", "change_log": "./log"}
        subscription = {"publisher": "pub", "publications": ["p"], "dsn": self.subscriber.dsn} | changed
        content = {"publishers": {"pub": publisher}, "subscriptions": {"s": subscription}}
        self.file.write_text(json.dumps(content), encoding="utf-8")

    def copy(self) -> Lsn:
        """As if both tables had been copied at the start of the log."""
        setup(load_config(self.file), "pub")
        header = ChangeLog.open(str(self.file.parent / "log")).header
        with connect(self.subscriber.dsn, purpose="test") as connection:
            state_schema.install(connection)
            subscription_records.bind_subscription(
                connection, "s", header.system_identifier, ["p"], header.database
            )
            for name in ("t", "u"):
                table = QualifiedName("public", name)
                subscription_tables.set_table_state(connection, "s", table, Ready(header.start_lsn))
        return header.start_lsn

    def park(self, at: Lsn) -> None:
        reason = "refused\nDETAIL: Key (id)=(7) exists.\nHINT: Delete it."
        with connect(self.subscriber.dsn, purpose="test") as connection:
            subscription_records.park(connection, "s", at, reason, Lsn(at.value + 8))


@pytest.fixture
def sides(config: Path, publisher: Database, subscriber: Database) -> Sides:
    publisher.run(f"{TABLES}; create publication p for table t, u")
    subscriber.run(TABLES)
    made = Sides(config, publisher, subscriber)
    made.write()
    return made


def test_check_fails_for_what_is_wrong_only(capsys: pytest.CaptureFixture[str], sides: Sides) -> None:
    code, told = run(capsys, "status", "--check")
    assert code == 1
    assert "publisher pub: is not set up → Run `cdc-replay setup pub`." in told
    assert "subscription s: waits for its first snapshot → Run `cdc-replay sync s`." in told
    start = sides.copy()
    assert run(capsys, "status", "--check", "--max-lag", "1GB") == (0, "")
    code, told = run(capsys, "status", "--check", "--max-proof-age", "24h")
    assert (code, "it was never validated" in told) == (1, True)
    sides.park(start)
    code, told = run(capsys, "status")
    assert (code, "s parked 0 s" in told) == (0, True)
    assert "refused: Key (id)=(7) exists. → Delete it. Then `cdc-replay replay s`" in told
    assert run(capsys, "status", "s", "--check")[0] == 1


def test_check_fails_while_nothing_is_captured(
    capsys: pytest.CaptureFixture[str], sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = ("status", "--check", "--max-lag", "5min")
    sides.copy()
    sides.publisher.run("insert into t values (1)")
    assert run(capsys, *probe) == (0, "")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 16 * 60)
    code, told = run(capsys, *probe)
    assert (code, "publisher pub: nothing was captured for 16 min" in told) == (1, True)
    assert run(capsys, "status", "--check") == (0, "")
    capture(load_config(sides.file), "pub")
    assert "nothing was captured" not in run(capsys, *probe)[1]


def test_last_answers_are_shown_while_a_side_is_down(
    capsys: pytest.CaptureFixture[str], sides: Sides
) -> None:
    start = sides.copy()
    sides.park(start)
    code, told = run(capsys, "status", "s")
    assert (code, f"public.u ready {start}" in told) == (0, True)
    sides.write(dsn="postgresql://me:secret@127.0.0.1:1/none")
    code, told = run(capsys, "status", "s")
    assert (code, "s down" in told, f"public.u ready {start}" in told) == (0, True, True)
    assert "subscription s: does not answer" in told
    (kept,) = (sides.file.parent / "state" / "cdc_replay").iterdir()
    assert not [word for word in ("secret", "127.0.0.1", "(7)") if word in kept.read_text(encoding="utf-8")]
    code, told = run(capsys, "status", "t")
    assert (code, 'subscription "t" is not configured' in told) == (2, True)
