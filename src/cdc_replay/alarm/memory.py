"""What was seen and told, so that nothing is told twice while it lasts.

An alarm's life, for one channel:

    seen ──(lasts `patience`)──▶ told ──(worse)──▶ told again
                                  └──(gone for `patience`)──▶ told that it is over, once ──▶ forgotten

An alarm that comes back before it is over was never gone; one that comes back later is a new one. Kinds that
do not often pass by themselves are told at once. A channel that could not be told is told by the next look.
An alarm that was never told to a channel is not told to be over there.

The memory is read before and written after each channel, so a crash in between tells that channel once more.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from cdc_replay.errors import AlarmsNotRemembered
from cdc_replay.model.alarm import PASSING, Alarm, AlarmKey, AlarmKind, Notice, Observed, Severity
from cdc_replay.model.lsn import Lsn
from cdc_replay.private_files import FILE_MODE, make_folder

MOST_REMEMBERED: Final = 5000
"""A bound of the memory; more alarms at once are told, but may be told again."""

LARGEST_FILE: Final = 16 << 20


class Memory(Protocol):
    """Where the text of `Ledger` is kept between two looks."""

    def read(self) -> str | None:
        """What was written last; None if there is nothing.

        Raises:
            AlarmsNotRemembered: if it cannot be read.
        """

    def write(self, text: str) -> None:
        """Replace it.

        Raises:
            AlarmsNotRemembered: if it cannot be written.
        """


@dataclass(frozen=True, slots=True)
class Entry:
    """An alarm, when it was first seen, since when it is gone, and what each channel was told of it."""

    alarm: Alarm
    first_seen: dt.datetime
    absent_since: dt.datetime | None = None
    sent: dict[str, Severity] = field(default_factory=dict)

    def is_due(self, now: dt.datetime, patience: dt.timedelta) -> bool:
        """Whether it is there, and has lasted long enough to be told."""
        if self.absent_since is not None:
            return False
        is_passing = AlarmKind(self.alarm.key.kind) in PASSING
        return self.has_lasted(now) and (not is_passing or now - self.first_seen >= patience)

    def has_lasted(self, now: dt.datetime) -> bool:
        """Whether it is one that is an alarm at once, or has become one."""
        return (now - self.first_seen).total_seconds() >= self.alarm.told_after_seconds

    def is_over(self, now: dt.datetime, patience: dt.timedelta) -> bool:
        """Whether it is gone for good."""
        return self.absent_since is not None and now - self.absent_since >= patience


@dataclass(frozen=True, slots=True)
class Ledger:
    """All entries, after a look at `now`."""

    entries: dict[AlarmKey, Entry]
    now: dt.datetime
    patience: dt.timedelta

    def see(self, observed: Observed, channels: Iterable[str]) -> Ledger:
        """The memory after a look; channels that are configured no more are forgotten."""
        known = frozenset(channels)
        seen = {alarm.key: alarm for alarm in observed.alarms}
        entries = {}
        for key, entry in self.entries.items():
            if key in seen:
                kept = replace(entry, alarm=self._dated(seen[key], entry.first_seen), absent_since=None)
            elif entry.absent_since is None and not observed.is_unknown(key):
                kept = replace(entry, absent_since=self.now)
            elif observed.is_unknown(key) and not entry.has_lasted(self.now):
                continue  # its time begins again: it may end while nobody can see it
            else:
                kept = entry
            kept = replace(kept, sent={name: at for name, at in kept.sent.items() if name in known})
            if kept.sent or not kept.is_over(self.now, self.patience):
                entries[key] = kept
        for key, alarm in seen.items():
            if key not in entries:
                entries[key] = Entry(self._dated(alarm, self.now), self.now)
        return replace(self, entries=entries)

    @staticmethod
    def _dated(alarm: Alarm, first_seen: dt.datetime) -> Alarm:
        return replace(alarm, since=alarm.since or first_seen.isoformat(timespec="seconds"))

    def news(self, channel: str) -> Notice:
        """What this channel has not been told yet."""
        raised, resolved = [], []
        for entry in self.entries.values():
            sent = entry.sent.get(channel)
            if entry.is_over(self.now, self.patience):
                if sent is not None:
                    resolved.append(entry.alarm)
            elif (
                entry.is_due(self.now, self.patience)
                and (0 if sent is None else sent.rank) < entry.alarm.severity.rank
            ):
                raised.append(entry.alarm)
        raised.sort(key=lambda alarm: (-alarm.severity.rank, alarm.key))
        return Notice(tuple(raised), tuple(sorted(resolved, key=lambda alarm: alarm.key)))

    def tell(self, channel: str, notice: Notice) -> Ledger:
        """The memory after the channel was told."""
        entries = dict(self.entries)
        for alarm in notice.raised:
            entry = entries[alarm.key]
            entries[alarm.key] = replace(entry, sent=entry.sent | {channel: alarm.severity})
        for alarm in notice.resolved:
            entry = entries[alarm.key]
            sent = {name: at for name, at in entry.sent.items() if name != channel}
            if sent:
                entries[alarm.key] = replace(entry, sent=sent)
            else:
                del entries[alarm.key]
        return replace(self, entries=entries)

    def present(self) -> tuple[Alarm, ...]:
        """The alarms that hold now, also those that are not due yet."""
        there = (
            entry.alarm
            for entry in self.entries.values()
            if entry.absent_since is None and entry.has_lasted(self.now)
        )
        return tuple(sorted(there, key=lambda alarm: (-alarm.severity.rank, alarm.key)))

    def to_text(self) -> str:
        """As JSON, which `from_text` reads."""
        entries = [_to_json(entry) for entry in list(self.entries.values())[:MOST_REMEMBERED]]
        return json.dumps(entries, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str | None, now: dt.datetime, patience: dt.timedelta) -> Ledger:
        """The memory of an earlier look; entries that cannot be read are forgotten.

        What was seen after `now` was seen now: the clock was set back since, and nothing may wait for it.
        """
        try:
            listed = json.loads(text or "[]")
        except ValueError:
            listed = []
        entries: dict[AlarmKey, Entry] = {}
        for form in listed if isinstance(listed, list) else ():
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                entry = _from_json(form)
                absent_since = None if entry.absent_since is None else min(entry.absent_since, now)
                seen = min(entry.first_seen, now)
                entries[entry.alarm.key] = replace(entry, first_seen=seen, absent_since=absent_since)
        return cls(entries, now, patience)


def _to_json(entry: Entry) -> dict[str, object]:
    alarm = entry.alarm
    return {
        "subject": alarm.key.subject,
        "kind": alarm.key.kind,
        "part": alarm.key.part,
        "severity": alarm.severity.value,
        "message": alarm.message,
        "hint": alarm.hint,
        "since": alarm.since,
        "lsn": None if alarm.lsn is None else str(alarm.lsn),
        "link": alarm.link,
        "told_after_seconds": alarm.told_after_seconds,
        "first_seen": entry.first_seen.isoformat(),
        "absent_since": None if entry.absent_since is None else entry.absent_since.isoformat(),
        "sent": {name: severity.value for name, severity in entry.sent.items()},
    }


def _from_json(form: dict[str, object]) -> Entry:
    lsn, absent_since, sent = form["lsn"], form["absent_since"], form["sent"]
    alarm = Alarm(
        key=AlarmKey(str(form["subject"]), AlarmKind(form["kind"]).value, str(form["part"])),
        severity=Severity(form["severity"]),
        message=str(form["message"]),
        hint=str(form["hint"]),
        since=str(form["since"]),
        lsn=None if lsn is None else Lsn.parse(str(lsn)),
        link=str(form["link"]),
        told_after_seconds=float(str(form.get("told_after_seconds", 0.0))),
    )
    if not isinstance(sent, dict):
        raise TypeError(sent)
    return Entry(
        alarm,
        dt.datetime.fromisoformat(str(form["first_seen"])),
        None if absent_since is None else dt.datetime.fromisoformat(str(absent_since)),
        {str(name): Severity(severity) for name, severity in sent.items()},
    )


@dataclass(frozen=True, slots=True)
class FileMemory:
    """A private file of this user, for looks without Airflow."""

    path: Path

    @classmethod
    def of(cls, config_file: Path) -> FileMemory:
        """The file for a configuration file, in `$XDG_STATE_HOME/cdc_replay`.

        Raises:
            AlarmsNotRemembered: if this user has neither that nor a home.
        """
        try:
            base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        except RuntimeError:
            raise AlarmsNotRemembered(
                "there is no place for the memory of alarms: this user has no home",
                hint="Set XDG_STATE_HOME to a folder that this user can write.",
            ) from None
        name = hashlib.sha256(os.fsencode(config_file)).hexdigest()[:16]
        return cls(Path(base) / "cdc_replay" / f"alarms-{name}.json")

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Let one look at a time use the file; whether this one may.

        Nobody waits: what cron starts every minute would pile up behind one that a channel keeps waiting.

        Raises:
            AlarmsNotRemembered: if the file's folder cannot be written: nothing is told then.
        """
        try:
            make_folder(self.path.parent)
            descriptor = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, FILE_MODE)
        except OSError as error:
            raise self._failure("written", error) from None
        with os.fdopen(descriptor, "w") as lock:
            try:
                # Released with the file, also when the process dies.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            except BlockingIOError:
                is_free = False
            yield is_free

    def read(self) -> str | None:
        """See `Memory`; a file of another user is none."""
        try:
            status = self.path.stat()
            if status.st_uid != os.geteuid() or status.st_size > LARGEST_FILE:
                return None
            return self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failure("read", error) from None

    def write(self, text: str) -> None:
        """See `Memory`."""
        partial = self.path.with_suffix(f".{os.getpid()}")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as stream:
                stream.write(text)
            partial.replace(self.path)
        except OSError as error:
            raise self._failure("written", error) from None

    def _failure(self, verb: str, error: OSError) -> AlarmsNotRemembered:
        return AlarmsNotRemembered(
            f'the memory of alarms "{self.path}" cannot be {verb}: {error.strerror}',
            hint="Set XDG_STATE_HOME to a folder that this user can write, or free some space.",
        )
