"""`sync`: snapshot where needed, then capture and replay, side by side."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from cdc_replay.capture.pull import current_position
from cdc_replay.config import Config
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.results import SyncResult
from cdc_replay.opening import common_source, open_subscriptions, snapshot_options
from cdc_replay.snapshot.sync import SyncRequest, sync_sessions


def sync(
    config: Config,
    subscriptions: Sequence[str],
    *,
    to_lsn: Lsn | None = None,
    report: Report = unreported,
) -> tuple[SyncResult, ...]:
    """Bring subscriptions of one publisher to `to_lsn` (default: the publisher's WAL position at the start).

    A table that is copied or compared by then has a later LSN; all are brought to that one. A subscription
    that is named twice is synced once.

    Raises:
        CdcReplayError: as `sync_sessions`. Other failures of one subscription are in its result.
    """
    subscriptions = tuple(dict.fromkeys(subscriptions))  # twice, one would deadlock on its own lock
    source = common_source(config, subscriptions, report)
    options = {
        name: dataclasses.replace(snapshot_options(config, name), release_lock=False)
        for name in subscriptions
    }
    request = SyncRequest(source, to_lsn or current_position(source.dsn), options)
    with contextlib.ExitStack() as stack:
        sessions, failures = open_subscriptions(config, subscriptions, "sync", stack, report)
        results = sync_sessions(request, sessions, failures)
    return tuple(results[name] for name in subscriptions)
