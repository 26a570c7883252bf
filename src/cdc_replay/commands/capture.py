"""`capture`: pull slot changes into the change log."""

from __future__ import annotations

import time

from cdc_replay.capture.capture_to import PAUSE_SECONDS, capture_to
from cdc_replay.config import Config
from cdc_replay.errors import SlotActive
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.results import CaptureResult
from cdc_replay.opening import capture_source


def capture(
    config: Config,
    publisher: str,
    *,
    to_lsn: Lsn | None = None,
    patience_seconds: float = 0.0,
    report: Report = unreported,
) -> CaptureResult:
    """Pull until `to_lsn` (default: the publisher's WAL position now), in bounded, durable steps.

    A slot that another session reads is waited for during `patience_seconds`: `watch_commits` reads it for
    moments.

    Raises:
        CdcReplayError: as `capture_to`.
    """
    source, deadline = capture_source(config, publisher, report), time.monotonic() + patience_seconds
    while True:
        try:
            return capture_to(source, to_lsn)
        except SlotActive:
            if time.monotonic() >= deadline:
                raise
        time.sleep(PAUSE_SECONDS)
