"""A replay that goes on for a while: what is committed meanwhile is captured and replayed at once.

A task in Airflow takes seconds to start, so one that goes on makes changes visible much sooner than one for
each of them. It takes the slot and the subscriptions for a moment at a time, as any capture and replay does.
Any trouble ends it early: the next task meets that again, and handles it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

import psycopg

from cdc_replay.capture.capture_to import capture_to
from cdc_replay.capture.followers import connect_follower
from cdc_replay.capture.pull import CaptureSource
from cdc_replay.capture.slot_continuity import reachable_lsn
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.replay import replay
from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError, SlotActive
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.results import ReplayResult
from cdc_replay.opening import common_source
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.subscriber import recorded_results

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.2


def replay_and_follow(
    config: Config,
    subscriptions: Sequence[str],
    *,
    to_lsn: Lsn | None = None,
    seconds: float,
    report: Report = unreported,
) -> tuple[ReplayResult, ...]:
    """Replay up to `to_lsn`, then what is committed within `seconds`; one result for each subscription.

    Raises:
        CdcReplayError: as `replay`, of its first range.
    """
    until = time.monotonic() + seconds
    results = {
        result.subscription: result for result in replay(config, subscriptions, to_lsn=to_lsn, report=report)
    }
    source = common_source(config, subscriptions)
    rounds, after = 0, min(result.to_lsn for result in results.values())
    try:
        with connect_follower(source) as publisher:
            while all(result.error is None for result in results.values()):
                if (end := _capture_next(publisher, source, after, until)) is None:
                    break
                for result in replay(config, subscriptions, to_lsn=end):
                    results[result.subscription] = results[result.subscription].followed_by(result)
                rounds, after = rounds + 1, end
    except (CdcReplayError, psycopg.Error) as error:
        logger.warning("publisher %s is not followed any more: %s", source.publisher, error)
    if rounds:
        _record(config, results)
        logger.info("publisher %s: followed, %d more rounds", source.publisher, rounds)
    return tuple(results.values())


def _capture_next(publisher: Connection, source: CaptureSource, after: Lsn, until: float) -> Lsn | None:
    """Wait until something is written after a position, and capture it; the log's end, or None in time."""
    while time.monotonic() < until:
        position = reachable_lsn(publisher, None)
        if position > after:
            try:
                end = capture_to(source, position).to_lsn
            except SlotActive:  # another capture, whose changes are as welcome
                end = ChangeLog.open(source.change_log).end_lsn
            if end > after:
                return end
        time.sleep(POLL_SECONDS)
    return None


def _record(config: Config, results: dict[str, ReplayResult]) -> None:
    """Record all rounds as the one result of a subscription: reports tell the whole task."""
    for name, result in results.items():
        dsn = config.dsn_of(config.subscription(name))
        with connect(dsn, purpose=f"replay {name}") as connection, connection.transaction():
            recorded_results.record_result(connection, name, "replay", result.to_dict())
