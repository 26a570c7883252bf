"""When the DAGs run.

Captures follow a clock, or the publisher's commits (`CDC_REPLAY_CAPTURE_EVENTS`). Then a triggerer watches
the publisher and the lag of its subscriptions, and the clocks, which are slower, are what is left when none
runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow.sdk import Asset, AssetOrTimeSchedule, CronTriggerTimetable, DeltaTriggerTimetable

from cdc_replay.airflow import assets
from cdc_replay.errors import InvalidConfiguration

CAPTURE_SCHEDULE: Final = "CDC_REPLAY_CAPTURE_SCHEDULE"
CAPTURE_SECONDS: Final = 60
WATCH_SCHEDULE: Final = "CDC_REPLAY_WATCH_SCHEDULE"
WATCH_SECONDS: Final = 30
"""With runs of some seconds, a lagging subscription is replayed within a minute."""

CAPTURE_EVENTS: Final = "CDC_REPLAY_CAPTURE_EVENTS"
FALLBACK_SECONDS: Final = 3600
"""Of the clocks of captures and of watches, if captures follow events."""

ALARM_SECONDS: Final = 300
"""Of the clock of watches if captures follow events, and alarms are configured: no event tells of most."""

START: Final = datetime(2020, 1, 1, tzinfo=UTC)
"""Before any run; without catch-up only the latest interval matters."""


def capture_schedule(publisher: str) -> Any:  # noqa: ANN401 - all that a DAG accepts
    """When the slot of a publisher is read."""
    if (intervals := event_intervals()) is None:
        return _schedule(CAPTURE_SCHEDULE, CAPTURE_SECONDS)
    commits = assets.commits(publisher, least_seconds=intervals[0], greatest_seconds=intervals[1])
    return _on_events(commits, _schedule(CAPTURE_SCHEDULE, FALLBACK_SECONDS))


def watch_schedule(publisher: str, subscriptions: Sequence[str], *, tells_alarms: bool = False) -> Any:  # noqa: ANN401 - as above
    """When these subscriptions of a publisher are checked for lag, and alarms are looked for."""
    if event_intervals() is None or not subscriptions:
        return _schedule(WATCH_SCHEDULE, WATCH_SECONDS)
    seconds = ALARM_SECONDS if tells_alarms else FALLBACK_SECONDS
    return _on_events(assets.lag(publisher, subscriptions, WATCH_SECONDS), _schedule(WATCH_SCHEDULE, seconds))


def _on_events(asset: Asset, clock: str | timedelta | None) -> Any:  # noqa: ANN401 - as above
    """On each event of the asset, and by the clock."""
    if clock is None:
        return [asset]
    timetable = (
        DeltaTriggerTimetable(clock)
        if isinstance(clock, timedelta)
        else CronTriggerTimetable(clock, timezone="UTC")
    )
    return AssetOrTimeSchedule(assets=[asset], timetable=timetable)


def event_intervals() -> tuple[float, float] | None:
    """The least and the greatest interval of events, in seconds; None if captures follow the clock alone.

    Raises:
        InvalidConfiguration: if the variable is neither empty, nor two numbers like `1-60`.
    """
    text = os.environ.get(CAPTURE_EVENTS, "").strip()
    if text in {"", "none"}:
        return None
    try:
        least, greatest = (float(part) for part in text.split("-"))
    except ValueError:
        least = greatest = 0.0
    if not 0 < least <= greatest:
        raise InvalidConfiguration(
            f'{CAPTURE_EVENTS} is "{text}"',
            hint="Give the least and the greatest interval in seconds, as in 1-60; or none.",
        )
    return least, greatest


def _schedule(variable: str, default_seconds: int) -> str | timedelta | None:
    """The variable's value: seconds, a cron expression, a preset or, for `none`, None.

    Airflow rejects an invalid cron expression as an import error of the DAG.
    """
    text = os.environ.get(variable, "").strip() or str(default_seconds)
    if text == "none":
        return None
    return timedelta(seconds=int(text)) if text.isdigit() else text
