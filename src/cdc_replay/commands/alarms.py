"""`alarms`: look once, and tell the configured channels what is new, worse or over."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from cdc_replay.alarm.channel_connection import ChannelConnection
from cdc_replay.alarm.channels import Channel, EmailChannel, Resolver, WebhookChannel
from cdc_replay.alarm.memory import FileMemory
from cdc_replay.alarm.observe import AlarmBounds, observe
from cdc_replay.alarm.tell import Telling, send_test
from cdc_replay.changelog.storage import Location, check_put_if_absent, storage_write_errors
from cdc_replay.commands.status import ServerAnswers, status_of
from cdc_replay.config import Config
from cdc_replay.doctor.folders import check_folder
from cdc_replay.errors import CdcReplayError, InvalidConfiguration
from cdc_replay.model.alarm import AlarmKey, AlarmsResult, Observed
from cdc_replay.model.check import Check, Verdict, failed_check

logger = logging.getLogger(__name__)


def alarms(config: Config) -> AlarmsResult:
    """Look at everything that the configuration names, and tell what is new.

    The result is empty if another look is at work: it tells the same.

    Raises:
        InvalidConfiguration: if no channel is configured.
        AlarmsNotRemembered: if the memory, a private file of this user, cannot be used; nothing is sent.
    """
    channels = channels_of(config, ChannelConnection.from_environment)
    memory = FileMemory.of(config.path)
    with memory.exclusive() as is_free:
        if not is_free:
            logger.info("nothing is looked at: another look is at work")
            return AlarmsResult(())
        observed = look(config, config.publishers, config.subscriptions, lambda _: config.alarms.link or "")
        return Telling(channels, memory, config.alarms.patience).tell(observed, dt.datetime.now(dt.UTC))


def try_channels(config: Config) -> AlarmsResult:
    """Send a test to every channel.

    Raises:
        InvalidConfiguration: if no channel is configured.
    """
    return send_test(channels_of(config, ChannelConnection.from_environment), config.alarms.link or "")


def channels_of(config: Config, resolve: Resolver) -> tuple[Channel, ...]:
    """The configured channels; their connections are resolved when a notice is sent.

    Raises:
        InvalidConfiguration: if there is none.
    """
    if not config.alarms.notify:
        raise InvalidConfiguration(
            "no channel of alarms is configured", hint="Give `alarms.notify` an email or a webhook."
        )
    return tuple(
        WebhookChannel(channel.conn_id, channel.is_chat, resolve)
        if not channel.to
        else EmailChannel(channel.conn_id, channel.to, channel.sender, resolve)
        for channel in config.alarms.notify
    )


def look(
    config: Config,
    publishers: Collection[str],
    subscriptions: Collection[str],
    link: Callable[[AlarmKey], str],
) -> Observed:
    """The alarms of these publishers and subscriptions, each with its `link`."""
    with ServerAnswers(config.timeouts.answer.total_seconds()) as answers:
        status = status_of(config, answers, publishers, subscriptions)
    bounds = AlarmBounds(
        {name: config.subscription(name).alarm_bounds for name in subscriptions},
        {name: config.publisher(name).alarm_retained_wal for name in publishers},
    )
    checks = {name: _check_log(name, config.publisher(name).change_log) for name in publishers}
    observed = observe(status, bounds, dt.datetime.now(dt.UTC), checks)
    return replace(observed, alarms=tuple(replace(seen, link=link(seen.key)) for seen in observed.alarms))


def _check_log(publisher: str, uri: str) -> Check:
    """Whether a capture could write to the change log."""
    subject = f"publisher {publisher}"
    try:
        location = Location.parse(uri)
        if not location.is_local:
            with storage_write_errors(uri):
                check_put_if_absent(location)
            return Check(subject, Verdict.OK, "")
    except (CdcReplayError, OSError) as error:
        return failed_check(subject, error)
    root = Path(location.path)
    if not root.exists():
        return Check(subject, Verdict.OK, "")  # setup creates it
    changes = root / "changes"
    checks = [
        check_folder(subject, "change log", folder) for folder in (root, changes, changes / "_delta_log")
    ]
    return next((check for check in checks if check.verdict is Verdict.FAILED), checks[0])
