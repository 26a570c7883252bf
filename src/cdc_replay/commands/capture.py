"""`capture`: pull slot changes into the change log."""

from __future__ import annotations

from collections.abc import Callable

from cdc_replay.capture.pull import CaptureSource, capture_changes
from cdc_replay.commands.results import CaptureResult
from cdc_replay.config import Config
from cdc_replay.model.lsn import Lsn


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
