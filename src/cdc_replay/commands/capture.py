"""`capture`: pull slot changes into the change log."""

from __future__ import annotations

from cdc_replay.capture.capture_to import capture_to
from cdc_replay.commands.opening import capture_source
from cdc_replay.config import Config
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.results import CaptureResult


def capture(
    config: Config, publisher: str, *, to_lsn: Lsn | None = None, report: Report = unreported
) -> CaptureResult:
    """Pull until `to_lsn` (default: the publisher's WAL position now), in bounded, durable steps.

    Raises:
        CdcReplayError: as `capture_to`.
    """
    return capture_to(capture_source(config, publisher, report), to_lsn)
