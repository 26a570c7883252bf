"""When the DAGs run."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import Final

CAPTURE_SCHEDULE: Final = "CDC_REPLAY_CAPTURE_SCHEDULE"
EVERY_MINUTE: Final = "60"

START: Final = datetime(2020, 1, 1, tzinfo=UTC)
"""Before any run; without catch-up only the latest interval counts."""


def capture_schedule() -> str | timedelta | None:
    """How often the slots are read: seconds, a cron expression, a preset or, for `none`, None.

    A cron expression that is none is refused by Airflow, as an import error of the DAG.
    """
    text = os.environ.get(CAPTURE_SCHEDULE, "").strip() or EVERY_MINUTE
    if text == "none":
        return None
    return timedelta(seconds=int(text)) if text.isdigit() else text
