"""When the DAGs run."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import Final

CAPTURE_SCHEDULE: Final = "CDC_REPLAY_CAPTURE_SCHEDULE"
CAPTURE_SECONDS: Final = 60
WATCH_SCHEDULE: Final = "CDC_REPLAY_WATCH_SCHEDULE"
WATCH_SECONDS: Final = 30
"""With runs of some seconds, a lagging subscription is replayed within a minute."""

START: Final = datetime(2020, 1, 1, tzinfo=UTC)
"""Before any run; without catch-up only the latest interval matters."""


def capture_schedule() -> str | timedelta | None:
    """How often the slots are read."""
    return _schedule(CAPTURE_SCHEDULE, CAPTURE_SECONDS)


def watch_schedule() -> str | timedelta | None:
    """How often subscriptions are checked for lag."""
    return _schedule(WATCH_SCHEDULE, WATCH_SECONDS)


def _schedule(variable: str, default_seconds: int) -> str | timedelta | None:
    """The variable's value: seconds, a cron expression, a preset or, for `none`, None.

    Airflow rejects an invalid cron expression as an import error of the DAG.
    """
    text = os.environ.get(variable, "").strip() or str(default_seconds)
    if text == "none":
        return None
    return timedelta(seconds=int(text)) if text.isdigit() else text
