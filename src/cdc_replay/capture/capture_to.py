"""Capture as a whole: pull up to an LSN, keep the log compact, and keep the slot within its limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeAlias

from cdc_replay.capture.pull import CaptureOutcome, CaptureSource, capture_changes
from cdc_replay.capture.slot_retention import RetainedWalLimit, enforce_after_capture, enforce_after_failure
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.maintenance import compact_log
from cdc_replay.errors import CdcReplayError, ChangeLogMismatch, SlotActive
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.results import CaptureResult

PATIENCE_SECONDS: Final = 60
PAUSE_SECONDS: Final = 0.5

Progress: TypeAlias = Callable[[Lsn, Lsn], None]
"""Called after each pull with the end of the log and the target."""


def capture_to(
    source: CaptureSource, to_lsn: Lsn | None = None, *, progress: Progress | None = None
) -> CaptureResult:
    """Pull until `to_lsn` (default: the publisher's WAL position now), in bounded, durable steps.

    Small segments of the log are merged afterwards, once enough have gathered. A slot that retains more than
    `max_retained_wal` even then, or because the capture failed, is dropped.

    Raises:
        ChangeLogMissing, SlotMissing: before `setup`.
        SlotActive: if another process captures.
        SlotLost: if the slot cannot give what the log still needs.
        SlotGivenUp: if the slot was dropped because of what it retained.
    """
    outcome = _capture_within_limit(source, to_lsn, progress)
    compact_log(source.change_log, source.publisher)
    return CaptureResult(
        publisher=source.publisher,
        from_lsn=outcome.from_lsn,
        to_lsn=outcome.to_lsn,
        seconds=outcome.seconds,
        pulls=outcome.pulls,
        transactions=outcome.transactions,
        messages=outcome.messages,
        bytes=outcome.bytes,
    )


def ensure_captured(source: CaptureSource, to_lsn: Lsn, *, progress: Progress | None = None) -> CaptureResult:
    """Make sure that the log holds everything up to `to_lsn`, whoever captures it.

    Another process may hold the slot, such as a scheduled capture: then its pull is waited for, and this one
    has nothing left to do.

    Raises:
        SlotActive: if the other process keeps the slot for a minute and the log does not grow.
    """
    deadline, reached = time.monotonic() + PATIENCE_SECONDS, ZERO
    while True:
        try:
            return capture_to(source, to_lsn, progress=progress)
        except SlotActive:
            end = ChangeLog.open(source.change_log).end_lsn
            if end >= to_lsn:
                return CaptureResult(source.publisher, end, end, 0.0, 0, 0, 0, 0)
            if end > reached:
                deadline, reached = time.monotonic() + PATIENCE_SECONDS, end
            elif time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_SECONDS)


def _capture_within_limit(
    source: CaptureSource, to_lsn: Lsn | None, progress: Progress | None
) -> CaptureOutcome:
    if source.max_retained_wal is None:
        return capture_changes(source, to_lsn, progress=progress)
    limit = RetainedWalLimit(source.publisher, source.dsn, source.slot, source.max_retained_wal)
    try:
        outcome = capture_changes(source, to_lsn, progress=progress)
    except (SlotActive, ChangeLogMismatch):
        # Another process holds the slot, or it is not ours.
        raise
    except CdcReplayError as failure:
        enforce_after_failure(limit, failure)
        raise
    enforce_after_capture(limit, lambda: capture_changes(source))
    return outcome
