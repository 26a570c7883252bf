"""`sync`: snapshot where needed, then capture and replay, side by side.

On return the subscribers equal the publisher's filtered state as of one LSN. What replay cannot bring there,
because the publisher has rewritten a table without sending its rows (R11.9), it leaves to a snapshot: then
all three steps are done again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Final

from cdc_replay.capture.pull import current_position
from cdc_replay.commands.catch_up import caught_up
from cdc_replay.commands.opened import Opened, opened
from cdc_replay.commands.replay import common_publisher
from cdc_replay.commands.results import SyncResult
from cdc_replay.commands.rewritten import waiting_for_copy
from cdc_replay.commands.snapshot import snapshot_lsn, snapshot_opened
from cdc_replay.config import Config
from cdc_replay.model.lsn import Lsn

ROUNDS: Final = 5
"""A table that is rewritten again and again is left to the next sync after that many copies."""


def sync(
    config: Config, subscriptions: Sequence[str], *, to_lsn: Lsn | None = None
) -> tuple[SyncResult, ...]:
    """Bring subscriptions of one publisher to `to_lsn` (default: the publisher's WAL position at the start).

    A table that is copied on the way is copied as of a later LSN; all are brought to that one then.

    Raises:
        CdcReplayError: from snapshot or capture. A replay that fails is in its result.
    """
    publisher = common_publisher(config, subscriptions)
    target = to_lsn or current_position(config.dsn_of(publisher))
    with contextlib.ExitStack() as stack:
        at_work = [stack.enter_context(opened(config, name, "sync")) for name in subscriptions]
        results, is_done = _round(config, at_work, target)
        for _ in range(ROUNDS - 1):
            if is_done:
                break
            again, is_done = _round(config, at_work, target)
            results = tuple(first.followed_by(later) for first, later in zip(results, again, strict=True))
    return results


def _round(config: Config, at_work: Sequence[Opened], target: Lsn) -> tuple[tuple[SyncResult, ...], bool]:
    """The three steps, once; and whether replay has left no table to another snapshot."""
    began = time.monotonic()
    publisher = common_publisher(config, [each.subscription.name for each in at_work])
    snapshots = [snapshot_opened(config, each) for each in at_work]
    upto = max(target, *(snapshot_lsn(each, target) for each in snapshots))
    waiting = [waiting_for_copy(each) for each in at_work]
    captured, replays = caught_up(config, publisher, at_work, upto)
    is_done = all(waiting_for_copy(each) <= known for each, known in zip(at_work, waiting, strict=True))
    results = tuple(
        SyncResult(
            subscription=replayed.subscription,
            from_lsn=replayed.from_lsn,
            to_lsn=replayed.to_lsn,
            seconds=time.monotonic() - began,
            snapshot=copied,
            capture=captured,
            replay=replayed,
        )
        for copied, replayed in zip(snapshots, replays, strict=True)
    )
    return results, is_done
