"""Fences: where the publisher's rows and the log up to them can be compared.

    F        the publisher's position after the snapshot was taken; the log is captured up to it
    unseen   commits up to F that are not in the snapshot: not visible yet when it was taken, or later

If only the newest commits are unseen, F is set before them. We wait only for transactions that committed
inside the window but are not visible yet.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.capture.capture_to import ensure_captured
from cdc_replay.capture.pull import CaptureSource, current_position
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.postgres.current_snapshot import CurrentSnapshot, export_current_snapshot
from cdc_replay.postgres.exported_snapshot import ExportedSnapshot, SharedSnapshot

logger = logging.getLogger(__name__)

_MAX_RETAKES: Final = 5
"""Snapshots are retaken this often if an unseen commit precedes a seen one."""
_PAUSE_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class PublisherFence:
    """A snapshot of the publisher, and the position up to which the log has all of its transactions.

    A transaction is in the snapshot if and only if its commit LSN is at or below `upto` and not in `unseen`.
    """

    snapshot: SharedSnapshot
    upto: Lsn
    unseen: frozenset[Lsn] = frozenset()

    @property
    def complete_upto(self) -> Lsn:
        """The snapshot has every transaction up to this position."""
        return Lsn(min(self.unseen).value - 1) if self.unseen else self.upto


@dataclass(slots=True)
class FenceProvider:
    """Opens fences while its context is open: at most one, when one is requested."""

    _source: CaptureSource
    _stack: contextlib.ExitStack
    _given_snapshot: ExportedSnapshot | None
    _reusable: tuple[CurrentSnapshot, Lsn] | None = field(default=None)

    def fence_for(self, window: Window) -> PublisherFence:
        """The caller's snapshot, if there is one; else a fence with all transactions of `window`.

        Its `unseen` commits are those after the start of the window.

        Raises:
            PublisherNotReady, ServerUnavailable, MissingPrivilege: if the publisher cannot be read.
        """
        if self._given_snapshot is not None:
            ensure_captured(self._source, self._given_snapshot.consistent_point)
            return PublisherFence(self._given_snapshot, self._given_snapshot.consistent_point)
        if self._reusable is not None and _covers(fence := self._fence(*self._reusable, window), window):
            return fence
        logger.info("publisher %s: opening a fence to read unsent values", self._source.publisher)
        for try_number in itertools.count(1):
            with contextlib.ExitStack() as attempt:
                taken_snapshot = self._take_snapshot(attempt)
                fence = self._fence(*taken_snapshot, window)
                if _covers(fence, window) and (not fence.unseen or try_number > _MAX_RETAKES):
                    self._stack.push(attempt.pop_all())
                    self._reusable = taken_snapshot
                    return fence
            if try_number == _MAX_RETAKES and not _covers(fence, window):
                logger.info(
                    "publisher %s: waiting for a commit after %s, which is in the log and not visible yet",
                    *(self._source.publisher, fence.complete_upto),
                )
            time.sleep(_PAUSE_SECONDS)
        raise AssertionError("counting does not end")

    def _take_snapshot(self, stack: contextlib.ExitStack) -> tuple[CurrentSnapshot, Lsn]:
        snapshot = stack.enter_context(export_current_snapshot(self._source.dsn))
        upto = current_position(self._source.dsn)
        ensure_captured(self._source, upto)
        failpoint("fill.after_fence")
        return snapshot, upto

    def _fence(self, snapshot: CurrentSnapshot, upto: Lsn, window: Window) -> PublisherFence:
        commits = ChangeLog.open(self._source.change_log).commits(Window(window.after, upto))
        last_seen, unseen = window.after, set()
        for commit in commits:
            if snapshot.transactions.sees(commit.xid):
                last_seen = commit.commit_lsn
            else:
                unseen.add(commit.commit_lsn)
        fence = PublisherFence(snapshot, upto, frozenset(unseen))
        return fence if last_seen > fence.complete_upto else PublisherFence(snapshot, fence.complete_upto)


def _covers(fence: PublisherFence, window: Window) -> bool:
    return fence.complete_upto >= window.upto


@contextlib.contextmanager
def open_fences(
    source: CaptureSource, given_snapshot: ExportedSnapshot | None = None
) -> Iterator[FenceProvider]:
    """Fences of the publisher; `given_snapshot` is a snapshot that the caller has opened already."""
    with contextlib.ExitStack() as stack:
        yield FenceProvider(source, stack, given_snapshot)
