"""A watch for commits of a publisher that its change log lacks; a trigger of Airflow looks through it."""

from __future__ import annotations

import time

from cdc_replay.capture.commit_watch import CommitWatch, WatchState
from cdc_replay.config import Config
from cdc_replay.opening import capture_source


def watch_commits(
    config: Config, publisher: str, *, least_seconds: float, greatest_seconds: float
) -> CommitWatch:
    """A watch of the publisher, which is not asked yet; the caller closes it.

    Args:
        config: the configuration.
        publisher: its name there.
        least_seconds: between two announcements.
        greatest_seconds: until what is announced and not captured is announced again.
    """
    return CommitWatch(
        capture_source(config, publisher),
        WatchState(least_seconds, greatest_seconds, moved_at=time.monotonic()),
        config.timeouts.answer.total_seconds(),
    )
