"""Runs a capture: pulls up to an LSN, compacts the log, and enforces the limit of retained WAL."""

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
    """Pull until `to_lsn` (default: the publisher's current WAL position), in bounded, durable steps.

    Then small segments of the log are merged, if there are enough. A slot that retains more than
    `max_retained_wal` after the capture, successful or not, is dropped.

    Raises:
        ChangeLogMissing, SlotMissing: before `setup`.
        SlotActive: if another process captures.
        SlotLost: if the slot no longer has the changes after the log's end.
        SlotDroppedOverLimit: if the slot was dropped because it retained too much WAL.
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
    """Make sure that the log holds everything up to `to_lsn`.

    If another process captures, such as a scheduled run, wait for it.

    Raises:
        SlotActive: if the other process keeps the slot for `PATIENCE_SECONDS` and the log does not grow.
    """
    deadline, last_end = time.monotonic() + PATIENCE_SECONDS, ZERO
    while True:
        try:
            return capture_to(source, to_lsn, progress=progress)
        except SlotActive:
            log_end = ChangeLog.open(source.change_log).end_lsn
            if log_end >= to_lsn:
                return CaptureResult(source.publisher, log_end, log_end, 0.0, 0, 0, 0, 0)
            if log_end > last_end:
                deadline, last_end = time.monotonic() + PATIENCE_SECONDS, log_end
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
        # Another process uses the slot, or the slot is not ours.
        raise
    except CdcReplayError as failure:
        enforce_after_failure(limit, failure)
        raise
    enforce_after_capture(limit, lambda: capture_changes(source))
    return outcome
