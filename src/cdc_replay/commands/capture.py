"""`capture`: pull slot changes into the change log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cdc_replay.capture.pull import CaptureOutcome, CaptureSource, capture_changes
from cdc_replay.capture.slot_retention import RetainedWalLimit, enforce_after_capture, enforce_after_failure
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.maintenance import compacted
from cdc_replay.config import Config
from cdc_replay.errors import CdcReplayError, ChangeLogMismatch, SlotActive
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.results import CaptureResult

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

    Where many small segments have gathered in the log, they are merged afterwards. A slot that retains more
    than `max_retained_wal` even then, or because the capture failed, is dropped.

    Raises:
        ChangeLogMissing, SlotMissing: before `setup`.
        SlotActive: if another process captures.
        SlotLost: if the slot cannot give what the log still needs.
        SlotGivenUp: if the slot was dropped because of what it retained.
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
        origin_none=config.wants_origin_none(found.name),
    )
    outcome = _captured_within_limit(source, found.max_retained_wal, to_lsn, progress)
    compacted(found)
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


def _captured_within_limit(
    source: CaptureSource,
    limit_bytes: int | None,
    to_lsn: Lsn | None,
    progress: Callable[[Lsn, Lsn], None] | None,
) -> CaptureOutcome:
    if limit_bytes is None:
        return capture_changes(source, to_lsn, progress=progress)
    limit = RetainedWalLimit(source.publisher, source.dsn, source.slot, limit_bytes)
    try:
        outcome = capture_changes(source, to_lsn, progress=progress)
    except (SlotActive, ChangeLogMismatch):
        # Somebody else is at work, or this is not our slot.
        raise
    except CdcReplayError as failure:
        enforce_after_failure(limit, failure)
        raise
    enforce_after_capture(limit, lambda: capture_changes(source))
    return outcome


def captured_up_to(
    config: Config,
    publisher: str,
    to_lsn: Lsn,
    *,
    progress: Callable[[Lsn, Lsn], None] | None = None,
) -> CaptureResult:
    """Make sure that the log holds everything up to `to_lsn`, whoever captures it.

    Another process may hold the slot, such as a scheduled capture: then its pull is waited for, and this one
    has nothing left to do.

    Raises:
        SlotActive: if the other process keeps the slot for a minute and the log does not grow.
    """
    change_log = config.publisher(publisher).change_log
    deadline, reached = time.monotonic() + PATIENCE_SECONDS, ZERO
    while True:
        try:
            return capture(config, publisher, to_lsn=to_lsn, progress=progress)
        except SlotActive:
            end = ChangeLog.open(change_log).end_lsn
            if end >= to_lsn:
                return CaptureResult(publisher, end, end, 0.0, 0, 0, 0, 0)
            if end > reached:
                deadline, reached = time.monotonic() + PATIENCE_SECONDS, end
            elif time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_SECONDS)
