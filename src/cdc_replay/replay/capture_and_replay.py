"""Capture and replay at the same time: while the publisher is read, captured changes are applied.

Each pull of the capture ends between two transactions, so a window can end there too. Reading the slot takes
one core of the publisher and little here; replay has the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.capture.capture_to import ensure_captured
from cdc_replay.capture.pull import CaptureSource
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.model.results import CaptureResult, ReplayResult
from cdc_replay.replay.engine import replay_up_to_each
from cdc_replay.spark.errors import translated_spark_errors
from cdc_replay.spark.session import has_session, spark_session
from cdc_replay.subscriber.session import SubscriptionSession

BACKLOG_BYTES: Final = 16 << 20
"""From this much uncaptured WAL on, there is usually something to replay: start Spark meanwhile."""


class _CaptureCancelled(Exception):
    """Nothing waits for the capture any more."""


@dataclass(slots=True)
class _LogGrowth:
    """The end of the log, as reported by the capture's thread."""

    end: Lsn = ZERO
    is_done: bool = False
    has_failed: bool = False
    is_stopped: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def report_pull(self, end: Lsn, _target: Lsn) -> None:
        """A pull has ended."""
        with self._changed:
            self.end = end
            self._changed.notify()
            if self.is_stopped:
                raise _CaptureCancelled

    def finish(self, capture: Future[CaptureResult]) -> None:
        """The capture has ended, with or without an error."""
        with self._changed:
            self.is_done, self.has_failed = True, capture.exception() is not None
            self._changed.notify()

    def stop(self) -> None:
        """Nothing waits any more: the next pull is the last."""
        with self._changed:
            self.is_stopped = True

    def ends(self, target: Lsn) -> Iterator[Lsn]:
        """The log's end, each time that it has grown; finally the target, if the capture reaches it."""
        reached: Lsn | None = ZERO
        while reached is not None and reached < target:
            reached = self._beyond(reached, target)
            if reached is not None:
                yield reached

    def _beyond(self, lsn: Lsn, target: Lsn) -> Lsn | None:
        """Wait until the log ends after `lsn`; its end, or None if the capture has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_done or self.end > lsn)
            if not self.is_done:
                return min(self.end, target)
            return None if self.has_failed else target


def capture_and_replay(
    source: CaptureSource, sessions: Sequence[SubscriptionSession], upto: Lsn
) -> tuple[CaptureResult, tuple[ReplayResult, ...]]:
    """Capture up to `upto`, and replay it; one result per subscription, over all its windows.

    The caller holds the subscriptions' locks. A subscription stops at its first window that fails.

    Raises:
        CdcReplayError: from the capture. What it had captured by then is applied.
    """
    progress = _LogGrowth()
    with ThreadPoolExecutor(1, thread_name_prefix=f"capture {source.publisher}") as threads:
        capture = threads.submit(ensure_captured, source, upto, progress=progress.report_pull)
        capture.add_done_callback(progress.finish)
        try:
            if not has_session() and _uncaptured_bytes(source, upto) > BACKLOG_BYTES:
                with translated_spark_errors(f"sync from {source.publisher}"):
                    spark_session("cdc-replay")
            replayed = replay_up_to_each(source, sessions, progress.ends(upto))
        except BaseException:
            progress.stop()
            raise
        return capture.result(), replayed


def _uncaptured_bytes(source: CaptureSource, upto: Lsn) -> int:
    return upto.value - ChangeLog.open(source.change_log).end_lsn.value
