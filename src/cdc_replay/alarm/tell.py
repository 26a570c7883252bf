"""Tell every channel what it has not been told yet."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from cdc_replay.alarm.channels import Channel
from cdc_replay.alarm.memory import Ledger, Memory
from cdc_replay.errors import ChannelFailed, InvalidConfiguration
from cdc_replay.model.alarm import Alarm, AlarmKey, AlarmKind, AlarmsResult, Notice, Observed, Severity

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Telling:
    """Who is told, what was told, and what may pass without a word.

    Without `writes_first` the memory is written once, at the end: for a memory that another process may read
    meanwhile, which must not find an alarm that is just being told.
    """

    channels: Sequence[Channel]
    memory: Memory
    patience: dt.timedelta
    writes_first: bool = True

    def tell(self, observed: Observed, now: dt.datetime) -> AlarmsResult:
        """Send what is new; a channel that fails is logged, and told by the next look.

        Raises:
            AlarmsNotRemembered: if the memory cannot be used; then nothing was sent, or one notice.
        """
        before = self.memory.read()
        ledger = Ledger.from_text(before, now, self.patience)
        ledger = ledger.see(observed, [channel.name for channel in self.channels])
        if self.writes_first:  # without a memory it would be sent again and again
            self._write(ledger, before)
        sent: dict[str, int] = {}
        resolved: dict[str, int] = {}
        errors = []
        for channel in self.channels:
            notice = ledger.news(channel.name)
            if not notice:
                continue
            if (error := _send(channel, notice)) is not None:
                errors.append(error)
                continue
            ledger = ledger.tell(channel.name, notice)
            if self.writes_first:
                self.memory.write(ledger.to_text())
            sent[channel.name], resolved[channel.name] = len(notice.raised), len(notice.resolved)
        if not self.writes_first:
            self._write(ledger, before)
        return AlarmsResult(ledger.present(), sent, resolved, "\n".join(errors) or None)

    def _write(self, ledger: Ledger, before: str | None) -> None:
        text = ledger.to_text()
        if text != (before or "[]"):
            self.memory.write(text)


def _send(channel: Channel, notice: Notice) -> str | None:
    """Send it; the error, if it was not taken."""
    try:
        channel.send(notice)
    except (ChannelFailed, InvalidConfiguration) as error:
        return _not_told(str(error))
    except Exception as error:  # noqa: BLE001 - the other channels are told all the same
        # Not its text, which may have a secret of the connection.
        return _not_told(f'channel "{channel.name}" failed: {type(error).__name__}')
    logger.info("channel %s: %d alarms, %d resolved", channel.name, len(notice.raised), len(notice.resolved))
    return None


def _not_told(error: str) -> str:
    logger.warning("alarms are not told: %s", error)
    return error


def send_test(channels: Sequence[Channel], link: str) -> AlarmsResult:
    """Send a message of kind `test` to every channel, whatever was told before."""
    alarm = Alarm(
        AlarmKey("cdc-replay", AlarmKind.TEST.value),
        Severity.WARNING,
        "this is a test of the channel",
        "Nothing has to be done.",
        link=link,
    )
    notice = Notice(raised=(alarm,))
    errors = {channel.name: _send(channel, notice) for channel in channels}
    failed = [error for error in errors.values() if error is not None]
    sent = {name: 1 for name, error in errors.items() if error is None}
    return AlarmsResult((), sent, error="\n".join(failed) or None)
