"""`sync`: snapshot where needed, capture, replay.

On return the subscribers equal the publisher's filtered state as of one LSN.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from cdc_replay.capture.pull import current_position
from cdc_replay.commands.capture import captured_up_to
from cdc_replay.commands.opened import opened
from cdc_replay.commands.replay import common_publisher, replay_opened
from cdc_replay.commands.results import SyncResult
from cdc_replay.commands.snapshot import snapshot_lsn, snapshot_opened
from cdc_replay.config import Config
from cdc_replay.model.lsn import Lsn


def sync(
    config: Config, subscriptions: Sequence[str], *, to_lsn: Lsn | None = None
) -> tuple[SyncResult, ...]:
    """Bring subscriptions of one publisher to `to_lsn` (default: the publisher's WAL position at the start).

    A table that is copied on the way is copied as of a later LSN; all are brought to that one then.

    Raises:
        CdcReplayError: from snapshot or capture. A replay that fails is in its result.
    """
    began = time.monotonic()
    publisher = common_publisher(config, subscriptions)
    target = to_lsn or current_position(config.dsn_of(publisher))
    with contextlib.ExitStack() as stack:
        at_work = [stack.enter_context(opened(config, name, "sync")) for name in subscriptions]
        snapshots = [snapshot_opened(config, each) for each in at_work]
        target = max(target, *(snapshot_lsn(each, target) for each in snapshots))
        captured = captured_up_to(config, publisher.name, target)
        replays = replay_opened(config, publisher, at_work, target)
    return tuple(
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
