"""Planted faults and their alarms: each is told once while it lasts, and once when it is over.

Real servers, a real SMTP server and a real webhook; each look is the command that cron runs.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cdc_replay.alarm.memory import FileMemory
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.cli import main
from cdc_replay.commands.capture import capture
from cdc_replay.commands.setup import setup
from cdc_replay.config import load_config
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proof import BUCKETS, Evidence
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Parked, Ready, TableState
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber import (
    proofs,
    recorded_results,
    state_schema,
    subscription_records,
    subscription_tables,
)
from cdc_replay.subscriber.proofs import TableSeen
from fixtures.alarm_sinks import SmtpSink, WebhookSink
from fixtures.command_line import PROGRAM, one_object
from fixtures.native import wait_for
from fixtures.postgres import Database

VALUE = "Mary-7"
"""A value of a row, which no alarm may have."""

REFUSED = (
    f"cannot apply: {VALUE}\nDETAIL: Key (name)=({VALUE}) exists.\nHINT: Delete the row of the subscriber."
)
PAGE = "https://ops.example.com/cdc"


@dataclass
class Planted:
    """A configuration of two databases whose subscriber was not made by Spark, and what was told."""

    folder: Path
    publisher: Database
    subscriber: Database
    smtp: SmtpSink
    webhook: WebhookSink
    bounds: dict[str, str] = field(default_factory=dict)
    publisher_dsn: str | None = None
    subscriber_dsn: str | None = None

    @property
    def file(self) -> Path:
        return self.folder / "cdc_replay.yaml"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def has_released_wal(self) -> bool:
        """Capture, and tell whether the slot retains little: an open transaction of another test holds it."""
        self.publisher.run("checkpoint")
        self.capture()
        query = (
            "select pg_current_wal_lsn() - restart_lsn < 500000 from pg_replication_slots where slot_name = "
        )
        return self.publisher.rows(f"{query}'alarms_{self.publisher.name}'") == [(True,)]

    def write(self) -> None:
        alarms = {
            "notify": [
                {"email": {"to": ["ops@example.com"], "from": "cdc@example.com", "conn_id": "mail"}},
                {"webhook": {"conn_id": "hook"}},
            ],
            "patience": "0",
            "link": PAGE,
            **self.bounds,
        }
        publisher = {
            "dsn": self.publisher_dsn or self.publisher.dsn,
            "slot": f"alarms_{self.publisher.name}",
            "change_log": "./log",
        }
        subscription = {
            "publisher": "shop",
            "publications": ["p"],
            "dsn": self.subscriber_dsn or self.subscriber.dsn,
        }
        content = {
            "publishers": {"shop": publisher},
            "subscriptions": {"nsw": subscription},
            "alarms": alarms,
        }
        self.file.write_text(json.dumps(content), encoding="utf-8")

    def look(self) -> list[tuple[str, str]]:
        """What the webhook was told by this look: (raised or resolved, subject and kind)."""
        self.write()
        posts = len(self.webhook.posts)
        with pytest.raises(SystemExit) as ended:
            main(["alarms", "--json", "--log-level", "error"])
        assert ended.value.code == 0
        assert len(self.smtp.mails) == len(self.webhook.posts)
        return [
            (verb, f"{told['subject']}: {told['kind']} {told['part'] or ''}".rstrip())
            for post in self.webhook.posts[posts:]
            for verb in ("raised", "resolved")
            for told in post[verb]
        ]

    def check_once(self, what: str) -> dict[str, Any]:
        """The fault is told by the next look, and not again; returns the alarm."""
        assert self.look() == [("raised", what)]
        (alarm,) = self.webhook.posts[-1]["raised"]
        assert [self.look(), self.look()] == [[], []]
        body = self.smtp.body()
        for shown in (alarm["subject"], alarm["message"], alarm["since"], alarm["hint"], PAGE):
            assert shown in body
        assert VALUE not in body + json.dumps(self.webhook.posts)
        return dict(alarm)

    def check_resolved(self, what: str) -> None:
        """The end is told by the next look, and not again."""
        assert self.look() == [("resolved", what)]
        assert "resolved" in str(self.smtp.mails[-1]["Subject"])
        assert [self.look(), self.look()] == [[], []]

    def pass_minutes(self, minutes: int) -> None:
        """What is remembered was seen so much earlier."""
        memory = FileMemory.of(load_config(self.file).path)
        entries = json.loads(memory.read() or "[]")
        for entry in entries:
            seen = dt.datetime.fromisoformat(entry["first_seen"]) - dt.timedelta(minutes=minutes)
            entry["first_seen"] = seen.isoformat()
        memory.write(json.dumps(entries))

    def subscriber_session(self) -> Connection:
        return connect(self.subscriber.dsn, purpose="test")

    def set_table(self, state: TableState) -> None:
        with self.subscriber_session() as connection:
            subscription_tables.set_table_state(connection, "nsw", QualifiedName("public", "t"), state)

    def capture(self) -> Lsn:
        return capture(load_config(self.file), "shop").to_lsn


@pytest.fixture
def planted(
    tmp_path: Path,
    publisher: Database,
    subscriber: Database,
    smtp_sink: SmtpSink,
    webhook_sink: WebhookSink,
    monkeypatch: pytest.MonkeyPatch,
) -> Planted:
    """Everything is well, and a first look has told nothing."""
    made = Planted(tmp_path, publisher, subscriber, smtp_sink, webhook_sink)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CDC_REPLAY_CONFIG", str(made.file))
    extra = {"disable_ssl": True, "disable_tls": True}
    mail = {"conn_type": "smtp", "host": "127.0.0.1", "port": smtp_sink.port, "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_MAIL", json.dumps(mail))
    monkeypatch.setenv("AIRFLOW_CONN_HOOK", f"http://:t0ken@127.0.0.1:{webhook_sink.port}/alarms")
    table = "create table t (id int primary key, name text)"
    publisher.run(f"{table}; create publication p for table t")
    subscriber.run(table)
    made.write()
    setup(load_config(made.file), "shop")
    made.capture()
    header = ChangeLog.open(str(made.log)).header
    with made.subscriber_session() as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(
            connection, "nsw", header.system_identifier, ["p"], header.database
        )
    made.set_table(Ready(made.capture()))
    assert made.look() == []
    assert webhook_sink.posts == []
    return made


def test_a_parked_table(planted: Planted) -> None:
    position = planted.capture()
    planted.set_table(Parked(position, REFUSED, Lsn(position.value + 8)))
    what = "subscription nsw: parked public.t"
    alarm = planted.check_once(what)
    assert alarm["message"] == f"table public.t is parked, before transaction {Lsn(position.value + 8)}"
    assert alarm["lsn"] == str(Lsn(position.value + 8))
    assert alarm["hint"].startswith("Delete the row of the subscriber. Then `cdc-replay resume nsw --table")
    assert alarm["severity"] == "warning"
    planted.set_table(Ready(position))
    planted.check_resolved(what)
    planted.set_table(Parked(position, REFUSED, Lsn(position.value + 8)))
    planted.check_once(what)


def test_a_parked_subscription(planted: Planted) -> None:
    position = planted.capture()
    with planted.subscriber_session() as connection:
        subscription_records.park(connection, "nsw", position, REFUSED, Lsn(position.value + 8))
    alarm = planted.check_once("subscription nsw: parked")
    assert (alarm["severity"], alarm["link"]) == ("critical", PAGE)
    assert f"--skip {Lsn(position.value + 8)}" in alarm["hint"]
    with planted.subscriber_session() as connection:
        subscription_records.unpark(connection, "nsw")
    planted.check_resolved("subscription nsw: parked")


def test_a_replay_that_failed_is_told_without_the_words_of_the_server(planted: Planted) -> None:
    def record(error: str | None) -> None:
        with planted.subscriber_session() as connection, connection.transaction():
            result = {"to_lsn": "0/1", "error": error}
            recorded_results.record_result(connection, "nsw", "replay", result)

    # As psycopg shows a server's hint: after two blanks.
    record(f"{VALUE}\nDETAIL:  {VALUE}\nHINT:  {VALUE}")
    alarm = planted.check_once("subscription nsw: replay failed")
    assert alarm["hint"] == "Run `cdc-replay replay nsw`."
    record(None)
    planted.check_resolved("subscription nsw: replay failed")


def test_a_lag_over_the_bound_and_then_a_worse_one(planted: Planted) -> None:
    planted.bounds = {"max_lag": "1MB"}
    planted.set_table(Ready(planted.capture()))
    assert planted.look() == []
    grow = "insert into t select g, repeat('x', 1000) from generate_series({}, {}) g"
    planted.publisher.run(grow.format(1, 2000))
    alarm = planted.check_once("subscription nsw: lag")
    assert "at most 1024 kB are allowed" in alarm["message"]
    assert (alarm["severity"], alarm["hint"]) == ("warning", "Run `cdc-replay sync nsw`.")
    planted.publisher.run(grow.format(2001, 8000))
    assert planted.check_once("subscription nsw: lag")["severity"] == "critical"
    planted.set_table(Ready(planted.capture()))
    planted.check_resolved("subscription nsw: lag")


def test_a_capture_that_comes_no_more(planted: Planted) -> None:
    planted.bounds = {"max_lag": "5min"}
    planted.publisher.run("insert into t values (1, '')")
    assert planted.look() == []
    planted.pass_minutes(14)
    assert planted.look() == []
    planted.pass_minutes(2)
    end = ChangeLog.open(str(planted.log)).end_lsn
    what = f"publisher shop: no capture {end}"
    alarm = planted.check_once(what)
    assert (alarm["severity"], alarm["lsn"]) == ("critical", str(end))
    planted.set_table(Ready(planted.capture()))
    planted.check_resolved(what)


def test_a_publisher_without_changes_whose_captures_run(planted: Planted) -> None:
    planted.bounds = {"max_lag": "5min"}
    for table in ("a", "b", "c"):
        planted.publisher.run(f"create table {table} (id int); insert into {table} values (1)")
        assert planted.look() == []
        planted.pass_minutes(14)
        assert planted.look() == []
        planted.set_table(Ready(planted.capture()))


def test_retained_wal_over_the_bound(planted: Planted) -> None:
    planted.bounds = {"max_retained_wal": "1MB"}
    # After a checkpoint, autovacuum of the new rows would log each page whole: more than the bound.
    planted.publisher.run("alter table t set (autovacuum_enabled = false); checkpoint")
    planted.capture()
    planted.set_table(Ready(planted.capture()))
    planted.publisher.run("insert into t select g, repeat('x', 1000) from generate_series(1, 3000) g")
    alarm = planted.check_once("publisher shop: retained WAL")
    assert "of WAL, at most 1024 kB are allowed" in alarm["message"]
    assert alarm["lsn"] is not None
    wait_for(planted.has_released_wal, "the slot to release its WAL")
    planted.check_resolved("publisher shop: retained WAL")


def test_a_proof_that_is_too_old_and_one_that_failed(planted: Planted) -> None:
    table, everything = QualifiedName("public", "t"), frozenset(range(BUCKETS))

    def validated(success: bool, age: dt.timedelta) -> None:
        at, lsn = dt.datetime.now(dt.UTC) - age, Lsn.parse("0/16B3748")
        evidence = Evidence("d", 1, lsn, at, everything, frozenset() if success else everything)
        with planted.subscriber_session() as connection:
            result = {"success": success, "to_lsn": str(lsn)}
            recorded_results.record_result(connection, "nsw", "validate", result)
            seen = TableSeen(table, 1, 0, 1, 1.0, evidence)
            proofs.record_proofs(connection, "nsw", lsn, [seen], published=[table], owed={})

    planted.bounds = {"max_proof_age": "24h"}
    validated(True, dt.timedelta(hours=30))
    alarm = planted.check_once("subscription nsw: proof age")
    assert alarm["message"] == "its proof is 30 h old, at most 24 h are allowed"
    validated(True, dt.timedelta(hours=1))
    planted.check_resolved("subscription nsw: proof age")
    validated(False, dt.timedelta(hours=1))
    assert planted.check_once("subscription nsw: not consistent")["lsn"] == "0/16B3748"
    validated(True, dt.timedelta(minutes=1))
    planted.check_resolved("subscription nsw: not consistent")


def test_a_side_that_is_down_raises_its_own_alarm_and_keeps_the_others(planted: Planted) -> None:
    position = planted.capture()
    planted.set_table(Parked(position, REFUSED, Lsn(position.value + 8)))
    planted.check_once("subscription nsw: parked public.t")
    planted.subscriber_dsn = "postgresql://me:s3cret@127.0.0.1:1/none"
    alarm = planted.check_once("subscription nsw: no answer")
    assert "its subscriber does not answer" in alarm["message"]
    planted.publisher_dsn = "postgresql://me:s3cret@127.0.0.1:1/none"
    planted.check_once("publisher shop: no answer")
    planted.subscriber_dsn = planted.publisher_dsn = None
    assert planted.look() == [
        ("resolved", "publisher shop: no answer"),
        ("resolved", "subscription nsw: no answer"),
    ]
    assert "s3cret" not in json.dumps(planted.webhook.posts) + "".join(map(str, planted.smtp.raw))


def test_a_slot_that_is_gone(planted: Planted) -> None:
    planted.publisher.run(f"select pg_drop_replication_slot('alarms_{planted.publisher.name}')")
    alarm = planted.check_once("publisher shop: slot")
    assert alarm["message"] == f"replication slot alarms_{planted.publisher.name} is missing"


def test_a_log_that_cannot_be_written(planted: Planted) -> None:
    """By a process without privileges: for root every folder is writable."""
    unprivileged = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []

    def look() -> list[str]:
        posts = len(planted.webhook.posts)
        command = [*unprivileged, str(PROGRAM), "alarms", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert isinstance(one_object(done.stdout)["alarms"], list)
        return [
            f"{verb} {alarm['message']}"
            for post in planted.webhook.posts[posts:]
            for verb in ("raised", "resolved")
            for alarm in post[verb]
        ]

    folder = planted.log / "changes" / "_delta_log"
    assert look() == []
    folder.chmod(0o555)
    try:
        message = f"change log {folder} is not writable: Permission denied"
        assert [look(), look()] == [[f"raised {message}"], []]
    finally:
        folder.chmod(0o755)
    assert [look(), look()] == [[f"resolved {message}"], []]


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_log_that_is_missing_or_damaged_hides_the_lag(planted: Planted, is_missing: bool) -> None:
    planted.bounds = {"max_lag": "1s"}
    commits = planted.log / "changes" / "_delta_log"
    hidden = planted.folder / "hidden"
    commits.rename(hidden)
    if not is_missing:
        commits.mkdir()
        for file in hidden.iterdir():
            (commits / file.name).write_bytes(b"{")
    try:
        planted.check_once("publisher shop: log not readable")
    finally:
        if not is_missing:
            shutil.rmtree(commits)
        hidden.rename(commits)
    planted.check_resolved("publisher shop: log not readable")


def test_a_channel_that_fails_is_an_error_and_is_tried_again(
    planted: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    planted.smtp.refuses, planted.webhook.status = True, 500
    planted.subscriber_dsn = "postgresql://127.0.0.1:1/none"
    planted.write()
    with pytest.raises(SystemExit) as ended:
        main(["alarms"])
    assert ended.value.code == 1
    output = capsys.readouterr()
    assert 'channel "webhook hook" failed: status 500' in output.err
    assert "subscription nsw: its subscriber does not answer" in " ".join(output.out.split())
    planted.smtp.refuses, planted.webhook.status = False, 200
    planted.check_once("subscription nsw: no answer")


def test_a_test_message_goes_to_every_channel(planted: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        with pytest.raises(SystemExit) as ended:
            main(["alarms", "--test"])
        assert ended.value.code == 0
        assert (len(planted.smtp.mails), len(planted.webhook.posts)) == (number, number)
    assert planted.webhook.headers[0]["Authorization"] == "Bearer t0ken"
    assert "told webhook hook" in capsys.readouterr().out


def test_without_a_channel_the_command_says_so(planted: Planted) -> None:
    planted.write()
    planted.file.write_text(planted.file.read_text().replace('"notify"', '"patience": "0", "notify_"'))
    with pytest.raises(SystemExit) as ended:
        main(["alarms"])
    assert ended.value.code == 2
