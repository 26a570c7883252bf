"""`capture`: pull slot changes into the change log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cdc_replay.capture.pull import CaptureSource, capture_changes
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.results import CaptureResult
from cdc_replay.config import Config
from cdc_replay.errors import SlotActive
from cdc_replay.model.lsn import Lsn

PATIENCE_SECONDS: Final = 60
PAUSE_SECONDS: Final = 0.5


def capture(
    config: Config,
    publisher: str,
    *,
    to_lsn: Lsn | None = None,
    progress: Callable[[Lsn, Lsn], None] | None = None,
) -> CaptureResult:
    """Pull until `to_lsn` (default: the publisher's WAL position now), in bounded, durable steps.

    Raises:
        ChangeLogMissing, SlotMissing: before `setup`.
        SlotActive: if another process captures.
        SlotLost: if the slot cannot give what the log still needs.
    """
    found = config.publisher(publisher)
    source = CaptureSource(
        publisher=found.name,
        dsn=config.dsn_of(found),
        slot=found.slot,
        change_log=found.change_log,
        streaming=found.streaming,
        two_phase=found.two_phase,
        max_changes_per_pull=found.max_changes_per_pull,
    )
    outcome = capture_changes(source, to_lsn, progress=progress)
    return CaptureResult(
        publisher=publisher,
        from_lsn=outcome.from_lsn,
        to_lsn=outcome.to_lsn,
        seconds=outcome.seconds,
        pulls=outcome.pulls,
        transactions=outcome.transactions,
        messages=outcome.messages,
        bytes=outcome.bytes,
    )


def captured_up_to(config: Config, publisher: str, to_lsn: Lsn) -> CaptureResult:
    """Make sure that the log holds everything up to `to_lsn`, whoever captures it.

    Another process may hold the slot, such as a scheduled capture: then its pull is waited for, and this one
    has nothing left to do.

    Raises:
        SlotActive: if the other process keeps the slot for a minute without reaching `to_lsn`.
    """
    change_log = config.publisher(publisher).change_log
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return capture(config, publisher, to_lsn=to_lsn)
        except SlotActive:
            end = ChangeLog.open(change_log).end_lsn
            if end >= to_lsn:
                return CaptureResult(publisher, end, end, 0.0, 0, 0, 0, 0)
            if time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_SECONDS)
