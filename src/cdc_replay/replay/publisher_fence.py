"""Fences: where the publisher's rows and the log that has led to them can be looked at together.

    F        the publisher's position after the snapshot was taken; the log is captured up to it
    unseen   commits up to F that the snapshot does not hold: they were not visible yet, or came in between

Where all unseen commits are the last ones, F is put before them. Nobody is waited for but transactions whose
commit is in the window already and is not visible yet.
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

_HOPEFUL_TRIES: Final = 5
"""So often a snapshot is taken again because a commit that it does not hold is before one that it holds."""
_PAUSE_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class PublisherFence:
    """A snapshot of the publisher, and the position up to which the log has all transactions in it.

    A transaction is in the snapshot if and only if its commit LSN is at or below `upto` and not in `unseen`.
    """

    snapshot: SharedSnapshot
    upto: Lsn
    unseen: frozenset[Lsn] = frozenset()

    @property
    def complete_upto(self) -> Lsn:
        """The snapshot has every transaction up to here."""
        return Lsn(min(self.unseen).value - 1) if self.unseen else self.upto


@dataclass(slots=True)
class FenceProvider:
    """Gives fences as long as its context is open: one for all who need it, none if nobody does."""

    _source: CaptureSource
    _stack: contextlib.ExitStack
    _opened: ExportedSnapshot | None
    _kept: tuple[CurrentSnapshot, Lsn] | None = field(default=None)

    def of(self, window: Window) -> PublisherFence:
        """A fence whose snapshot has all transactions of `window`, or is the one that the caller had opened.

        Its `unseen` commits are those behind the beginning of the window.

        Raises:
            PublisherNotReady, ServerUnavailable, MissingPrivilege: if the publisher cannot be read.
        """
        if self._opened is not None:
            ensure_captured(self._source, self._opened.consistent_point)
            return PublisherFence(self._opened, self._opened.consistent_point)
        if self._kept is not None and _fits(fence := self._fence(*self._kept, window), window):
            return fence
        logger.info("publisher %s: opening a fence to read values that were not sent", self._source.publisher)
        for number in itertools.count(1):
            with contextlib.ExitStack() as attempt:
                kept = self._taken(attempt)
                fence = self._fence(*kept, window)
                if _fits(fence, window) and (not fence.unseen or number > _HOPEFUL_TRIES):
                    self._stack.push(attempt.pop_all())
                    self._kept = kept
                    return fence
            if number == _HOPEFUL_TRIES and not _fits(fence, window):
                logger.info(
                    "publisher %s: waiting for a commit behind %s, which is in the log and not visible yet",
                    *(self._source.publisher, fence.complete_upto),
                )
            time.sleep(_PAUSE_SECONDS)
        raise AssertionError("counting does not end")

    def _taken(self, stack: contextlib.ExitStack) -> tuple[CurrentSnapshot, Lsn]:
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


def _fits(fence: PublisherFence, window: Window) -> bool:
    return fence.complete_upto >= window.upto


@contextlib.contextmanager
def open_fences(source: CaptureSource, opened: ExportedSnapshot | None = None) -> Iterator[FenceProvider]:
    """Fences of the publisher; where the caller has opened a snapshot already, it is that one."""
    with contextlib.ExitStack() as stack:
        yield FenceProvider(source, stack, opened)
