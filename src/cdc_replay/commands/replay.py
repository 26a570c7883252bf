"""`replay`: apply the change log to subscribers, one transaction per subscription and window."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import psycopg

from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.results import ReplayResult
from cdc_replay.opening import common_source, open_subscription
from cdc_replay.replay.engine import replay_sessions
from cdc_replay.subscriber.session import SubscriptionSession

logger = logging.getLogger(__name__)


def replay(
    config: Config,
    subscriptions: Sequence[str],
    *,
    to_lsn: Lsn | None = None,
    report: Report = unreported,
) -> tuple[ReplayResult, ...]:
    """Apply the log up to `to_lsn` (default: its end); one result per subscription, in the given order.

    A subscription that is named twice is replayed once.

    Raises:
        InvalidConfiguration: if the subscriptions have different publishers.
        ChangeLogMissing: if there is no log, or it ends before `to_lsn`.
    """
    subscriptions = tuple(dict.fromkeys(subscriptions))  # twice, one would deadlock on its own lock
    source = common_source(config, subscriptions, report)
    results: dict[str, ReplayResult] = {}
    with contextlib.ExitStack() as stack:
        sessions: list[SubscriptionSession] = []
        for name in subscriptions:
            try:
                session = open_subscription(config, name, "replay", report=report)
                sessions.append(stack.enter_context(session))
            except (CdcReplayError, psycopg.Error) as error:
                logger.info("subscription %s is left out: %s", name, error)
                results[name] = ReplayResult(name, Lsn(0), Lsn(0), 0.0).failed_with(error)
        replayed = replay_sessions(source, sessions, to_lsn)
        results |= {result.subscription: result for result in replayed}
    return tuple(results[name] for name in subscriptions)
