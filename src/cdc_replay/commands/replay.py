"""`replay`: apply the change log to subscribers, one transaction per subscription and window."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from cdc_replay.config import Config
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.results import ReplayResult
from cdc_replay.opening import common_source, open_subscriptions
from cdc_replay.replay.engine import replay_sessions


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
    with contextlib.ExitStack() as stack:
        sessions, failures = open_subscriptions(config, subscriptions, "replay", stack, report)
        results = {result.subscription: result for result in replay_sessions(source, sessions, to_lsn)}
    for name, error in failures.items():
        results[name] = ReplayResult(name, ZERO, ZERO, 0.0).failed_with(error)
    return tuple(results[name] for name in subscriptions)
