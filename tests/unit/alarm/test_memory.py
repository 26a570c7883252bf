"""Each state is told once to each channel, again when it is worse, and once when it is over."""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from cdc_replay.alarm.memory import FileMemory, Ledger
from cdc_replay.alarm.tell import Telling
from cdc_replay.commands.alarms import alarms as look_once
from cdc_replay.config import load_config
from cdc_replay.errors import AlarmsNotRemembered, ChannelFailed
from cdc_replay.model.alarm import Alarm, AlarmKey, AlarmKind, AlarmsResult, Notice, Observed, Severity
from cdc_replay.model.lsn import Lsn

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
MINUTE = dt.timedelta(minutes=1)
PATIENCE = 2 * MINUTE


def alarm(kind: AlarmKind, severity: Severity = Severity.WARNING, part: str = "") -> Alarm:
    key = AlarmKey("subscription nsw", kind.value, part)
    return Alarm(key, severity, f"{kind.value} of nsw", "do something", lsn=Lsn(7))


LAG = alarm(AlarmKind.LAG)
DOWN = alarm(AlarmKind.NO_ANSWER, Severity.CRITICAL)
PARKED = alarm(AlarmKind.PARKED, part="public.t")


@dataclass
class FakeChannel:
    """Keeps what it is sent."""

    name: str = "mail"
    fails: bool = False
    error: Exception = field(default_factory=lambda: ChannelFailed("no"))
    sent: list[Notice] = field(default_factory=list)

    def send(self, notice: Notice) -> None:
        if self.fails:
            raise self.error
        self.sent.append(notice)

    @property
    def kinds(self) -> list[tuple[list[str], list[str]]]:
        """Of each notice: the kinds that are raised, and that are resolved."""
        return [
            ([entry.key.kind for entry in sent.raised], [entry.key.kind for entry in sent.resolved])
            for sent in self.sent
        ]


@dataclass
class KeptText:
    """A memory that a test can lose."""

    text: str | None = None
    is_broken: bool = False

    def read(self) -> str | None:
        return self.text

    def write(self, text: str) -> None:
        if self.is_broken:
            raise AlarmsNotRemembered("broken")
        self.text = text


@dataclass
class Watcher:
    """Looks every minute."""

    channels: tuple[FakeChannel, ...]
    memory: KeptText = field(default_factory=KeptText)
    now: dt.datetime = START

    def look(self, *alarms: Alarm, unknown: AlarmKind | None = None, times: int = 1) -> None:
        hidden = frozenset() if unknown is None else frozenset({("subscription nsw", unknown)})
        for _ in range(times):
            Telling(self.channels, self.memory, PATIENCE).tell(Observed(alarms, hidden), self.now)
            self.now += MINUTE


@pytest.fixture
def mail() -> FakeChannel:
    return FakeChannel()


@pytest.fixture
def watcher(mail: FakeChannel) -> Watcher:
    return Watcher((mail,))


def test_told_once_while_it_lasts_and_once_when_it_is_over(watcher: Watcher, mail: FakeChannel) -> None:
    watcher.look(LAG, times=30)
    assert mail.kinds == [(["lag"], [])]
    watcher.look(times=30)
    assert mail.kinds == [(["lag"], []), ([], ["lag"])]
    assert watcher.memory.text == "[]"
    watcher.look(LAG, times=3)
    assert mail.kinds[2:] == [(["lag"], [])]


def test_told_again_only_if_it_is_worse(watcher: Watcher, mail: FakeChannel) -> None:
    worse = replace(LAG, severity=Severity.CRITICAL)
    for seen in (LAG, worse, LAG, worse, LAG):
        watcher.look(seen, times=2)
    assert [[entry.severity for entry in sent.raised] for sent in mail.sent] == [
        [Severity.WARNING],
        [Severity.CRITICAL],
    ]
    watcher.look(times=5)
    assert mail.kinds[2:] == [([], ["lag"])]


def test_what_passes_by_itself_is_not_told(watcher: Watcher, mail: FakeChannel) -> None:
    watcher.look(DOWN, times=2)
    watcher.look(times=5)
    assert mail.sent == []
    watcher.look(DOWN, times=10)
    assert mail.kinds == [(["no answer"], [])]
    assert mail.sent[0].raised[0].since == "2026-01-01T00:07:00+00:00"


def test_a_short_absence_is_no_end(watcher: Watcher, mail: FakeChannel) -> None:
    for _ in range(10):
        watcher.look(LAG)
        watcher.look()
    assert mail.kinds == [(["lag"], [])]


def test_what_a_look_cannot_see_is_neither_told_nor_over(watcher: Watcher, mail: FakeChannel) -> None:
    watcher.look(PARKED, LAG)
    watcher.look(PARKED, DOWN, unknown=AlarmKind.LAG, times=10)
    assert mail.kinds == [(["lag", "parked"], []), (["no answer"], [])]
    watcher.look(PARKED, times=5)
    assert mail.kinds[2:] == [([], ["lag", "no answer"])]


def test_each_table_is_an_alarm_of_its_own(watcher: Watcher, mail: FakeChannel) -> None:
    other = alarm(AlarmKind.PARKED, part="public.u")
    watcher.look(PARKED)
    watcher.look(PARKED, other, times=3)
    watcher.look(other, times=5)
    assert [[entry.key.part for entry in sent.raised] for sent in mail.sent] == [
        ["public.t"],
        ["public.u"],
        [],
    ]
    assert [entry.key.part for entry in mail.sent[2].resolved] == ["public.t"]


def test_a_channel_that_fails_is_told_later_and_the_others_only_once(mail: FakeChannel) -> None:
    chat = FakeChannel("chat", fails=True)
    watcher = Watcher((chat, mail))
    watcher.look(LAG, times=3)
    assert (mail.kinds, chat.kinds) == ([(["lag"], [])], [])
    chat.fails = False
    watcher.look(LAG, times=3)
    assert (len(mail.sent), chat.kinds) == (1, [(["lag"], [])])
    chat.fails = True
    watcher.look(times=5)
    assert (mail.kinds[1:], len(chat.sent)) == ([([], ["lag"])], 1)
    chat.fails = False
    watcher.look()
    assert chat.kinds[1:] == [([], ["lag"])]
    assert watcher.memory.text == "[]"


def test_what_was_never_told_is_not_resolved(mail: FakeChannel, watcher: Watcher) -> None:
    mail.fails = True
    watcher.look(LAG, times=3)
    mail.fails = False
    watcher.look(times=5)
    assert mail.sent == []
    assert watcher.memory.text == "[]"


def test_without_a_memory_nothing_is_sent(mail: FakeChannel, watcher: Watcher) -> None:
    """It would be sent by every look."""
    watcher.memory.is_broken = True
    with pytest.raises(AlarmsNotRemembered):
        watcher.look(LAG)
    assert mail.sent == []


def test_a_memory_that_others_read_is_written_when_all_is_told(mail: FakeChannel) -> None:
    """Another process would find an alarm that is just being told, and tell it, too."""
    memory = KeptText()
    seen = []

    class Spy(FakeChannel):
        def send(self, notice: Notice) -> None:
            seen.append(memory.text)
            super().send(notice)

    channels = (mail, Spy("spy"))
    for alarms in ((LAG,), (LAG,), (), ()):
        sent = Telling(channels, memory, dt.timedelta(), writes_first=False)
        sent.tell(Observed(alarms), START)
    assert seen[0] is None
    assert '"absent_since":null,"sent":{"mail":"warning","spy":"warning"}' in str(seen[1])
    assert (len(seen), len(mail.sent), memory.text) == (2, 2, "[]")


SLOW = replace(alarm(AlarmKind.NO_CAPTURE, part="0/9"), told_after_seconds=180.0)


def test_an_alarm_that_has_to_last_is_told_and_shown_then(watcher: Watcher, mail: FakeChannel) -> None:
    watcher.look(SLOW, times=3)
    ledger = Ledger.from_text(watcher.memory.read(), watcher.now - MINUTE, PATIENCE)
    assert (mail.sent, ledger.present()) == ([], ())
    watcher.look(SLOW, times=2)
    assert mail.kinds == [(["no capture"], [])]
    assert mail.sent[0].raised[0].since == START.isoformat()
    watcher.look(times=3)
    assert mail.kinds[1:] == [([], ["no capture"])]


def test_an_alarm_that_has_to_last_is_another_one_for_each_end_of_the_log(
    watcher: Watcher, mail: FakeChannel
) -> None:
    for end in range(20):
        watcher.look(replace(SLOW, key=replace(SLOW.key, part=f"0/{end}")), times=2)
    assert mail.sent == []


def test_an_alarm_that_has_to_last_does_not_while_nobody_can_see_it(
    watcher: Watcher, mail: FakeChannel
) -> None:
    watcher.look(SLOW, times=2)
    watcher.look(unknown=AlarmKind.NO_CAPTURE, times=9)
    watcher.look(SLOW, times=3)
    assert mail.sent == []
    watcher.look(SLOW)
    watcher.look(unknown=AlarmKind.NO_CAPTURE, times=9)
    assert mail.kinds == [(["no capture"], [])]


def test_no_error_of_a_channel_keeps_others_from_being_told(caplog: pytest.LogCaptureFixture) -> None:
    broken, mail = FakeChannel("broken", fails=True, error=RuntimeError("s3cret")), FakeChannel()
    result = Telling((broken, mail), KeptText(), PATIENCE).tell(Observed((LAG,)), START)
    assert (len(mail.sent), result.sent) == (1, {"mail": 1})
    assert result.error == 'channel "broken" failed: RuntimeError'
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("text", ["", "{", "null", "[1, {}]", '[{"subject": 3}]', "[[[["])
def test_a_damaged_memory_is_an_empty_one(text: str) -> None:
    assert Ledger.from_text(text, START, PATIENCE).entries == {}


def test_a_clock_that_is_set_back_delays_no_alarm() -> None:
    """Else what was first seen in the years to come would be told when they have."""
    memory, mail = KeptText(), FakeChannel()

    def look(at: dt.datetime, *alarms: Alarm) -> None:
        Telling((mail,), memory, PATIENCE).tell(Observed(alarms), at)

    years = dt.timedelta(days=1500)
    look(START + years, DOWN)
    look(START, DOWN)
    look(START + PATIENCE, DOWN)
    assert mail.kinds == [(["no answer"], [])]
    look(START + years)
    look(START)
    look(START + PATIENCE)
    assert mail.kinds[1:] == [([], ["no answer"])]


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(AlarmsNotRemembered, match="no home") as failed:
        FileMemory.of(tmp_path / "cdc_replay.yaml")
    assert "XDG_STATE_HOME" in str(failed.value.hint)


def test_the_memory_is_read_as_it_was_written() -> None:
    hostile = replace(PARKED, message='a\n"b"\ud800 \u202e', key=AlarmKey("s", "parked", "\x00'\n"))
    seen = Ledger({}, START, PATIENCE).see(Observed((LAG, SLOW, hostile)), ["mail"])
    sent = seen.tell("mail", seen.news("mail"))
    assert Ledger.from_text(sent.to_text(), START, PATIENCE) == sent


def test_the_file_is_private_and_another_users_is_not_read(tmp_path: Path) -> None:
    memory = FileMemory(tmp_path / "state" / "cdc_replay" / "alarms.json")
    with memory.exclusive() as is_free:
        assert is_free
        assert memory.read() is None
        memory.write("[]")
        assert memory.read() == "[]"
    assert (memory.path.stat().st_mode & 0o777, memory.path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    if os.geteuid() == 0:
        os.chown(memory.path, 65534, 65534)
        assert memory.read() is None


def test_a_file_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = FileMemory(tmp_path / "file" / "alarms.json")
    with pytest.raises(AlarmsNotRemembered, match="cannot be written") as failed, memory.exclusive():
        pytest.fail("nothing may be sent")
    assert "XDG_STATE_HOME" in str(failed.value.hint)


def test_a_look_beside_another_one_ends_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "cdc_replay.yaml"
    notify = [{"webhook": {"conn_id": "ops"}}]
    publishers = {"shop": {"dsn": "host=127.0.0.1 port=1 dbname=x", "change_log": "./log"}}
    file.write_text(json.dumps({"publishers": publishers, "alarms": {"notify": notify}}), encoding="utf-8")
    memory = FileMemory.of(load_config(file).path)
    caplog.set_level(logging.INFO)
    with memory.exclusive() as is_free, memory.exclusive() as is_free_again:
        assert (is_free, is_free_again) == (True, False)
        assert look_once(load_config(file)) == AlarmsResult(())
    assert "another look is at work" in caplog.text
    assert memory.read() is None
