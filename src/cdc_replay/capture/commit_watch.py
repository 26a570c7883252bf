"""Watches a publisher for commits that the change log lacks, at the cost of a query every half second.

| the publisher's WAL position                    | then                                                    |
|-------------------------------------------------|---------------------------------------------------------|
| is confirmed to the slot, or known to be empty  | nothing                                                 |
| is beyond, but what was announced last is not   | nothing, until `greatest_seconds` have passed: its      |
| captured yet                                    | capture runs, or waits to be run                        |
| is beyond, but somebody follows the publisher   | the same as if it was announced: it is captured         |
| is beyond all that is known                     | a peek, bounded to one transaction, looks for a change; |
|                                                 | if there is one, or too much to decode before it, the   |
|                                                 | position is announced                                   |

WAL without a captured change (of other tables and databases, of vacuum and checkpoints) is retained by the
slot, and decoded again by each peek. So the watch itself captures such a range, which holds nothing, once it
is `MOVE_BYTES` long or `MOVE_SECONDS` old: that moves the end of the log, and the slot.

Everything is known again after a look or two, so a watch may be ended and begun at any time. At worst it
announces twice.
"""

from __future__ import annotations

import contextlib
import enum
import time
from dataclasses import dataclass, field
from typing import Final

import psycopg

from cdc_replay.capture.followers import has_follower
from cdc_replay.capture.pull import CaptureSource, capture_changes
from cdc_replay.capture.slot_continuity import reachable_lsn
from cdc_replay.errors import SlotActive, SlotMissing
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.postgres.connection import CUT_FACTOR, Connection, connect, cut_after
from cdc_replay.postgres.peek import PeekOptions, has_changes
from cdc_replay.postgres.slot import slot_status
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS

MOVE_SECONDS: Final = 300.0
MOVE_BYTES: Final = 16 << 20


class Step(enum.Enum):
    """What a look at the publisher requires."""

    NOTHING = "nothing"
    PEEK = "peek"
    MOVE = "move"
    """Capture the range that is known to be empty."""


@dataclass(slots=True)
class WatchState:
    """What is known of the WAL after the slot's position. Seconds are those of a monotonic clock."""

    least_seconds: float
    """Between two announcements, so that commits in a burst share a capture."""
    greatest_seconds: float
    """Until what was announced, and is not captured, is announced again."""
    moved_at: float
    """When the slot was last seen to move."""
    confirmed: Lsn = ZERO
    empty_to: Lsn = ZERO
    announced: Lsn = ZERO
    announced_at: float = float("-inf")

    def next_step(self, now: float, position: Lsn, confirmed: Lsn) -> Step:
        """The step for this WAL position, and this position of the slot."""
        if confirmed != self.confirmed:
            self.confirmed, self.moved_at = confirmed, now
        if position < self.empty_to:
            # Another server has taken over, which did not have the end of the WAL.
            self.empty_to = ZERO
        if position > max(confirmed, self.empty_to) and self._may_announce(now):
            return Step.PEEK
        if self.empty_to > confirmed:
            is_long = self.empty_to.value - confirmed.value >= MOVE_BYTES
            if is_long or now >= self.moved_at + MOVE_SECONDS:
                return Step.MOVE
        return Step.NOTHING

    def announce(self, now: float, position: Lsn) -> None:
        """There is a change up to `position`."""
        self.announced, self.announced_at = position, now

    def _may_announce(self, now: float) -> bool:
        is_pending = self.announced > self.confirmed
        wait_seconds = max(self.least_seconds, self.greatest_seconds if is_pending else 0.0)
        return now >= self.announced_at + wait_seconds


@dataclass
class CommitWatch:
    """A publisher under watch, by one connection. Use it from one thread at a time."""

    source: CaptureSource
    state: WatchState
    answer_seconds: float
    """How long the publisher may take to answer, or to look for a change."""
    _connected: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _connection: Connection | None = None

    def look(self) -> Lsn | None:
        """The publisher's position, if it has committed something that a capture should fetch now.

        A publisher without a slot needs one, which a capture creates.

        Raises:
            CdcReplayError, psycopg.Error: if it does not answer, or its slot cannot be read; the next look
                connects again.
        """
        try:
            connection = self._connect()
            with cut_after(connection, CUT_FACTOR * self.answer_seconds):
                step, position = self._ask(connection)
            if step is Step.MOVE:
                capture_changes(self.source, self.state.empty_to)
            return self._announce(position) if step is Step.PEEK else None
        except SlotActive:
            return None  # a capture is reading it
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._connection = None
        self._connected.close()

    def _connect(self) -> Connection:
        if self._connection is None:
            self._connection = self._connected.enter_context(
                connect(
                    self.source.dsn,
                    purpose=f"watch {self.source.publisher}",
                    answer_seconds=self.answer_seconds,
                )
            )
        return self._connection

    def _ask(self, connection: Connection) -> tuple[Step, Lsn]:
        """The step to take, and the publisher's position; `PEEK` has found a change."""
        position, state = reachable_lsn(connection, None), self.state
        try:
            confirmed = slot_status(connection, self.source.slot).confirmed_flush
        except SlotMissing:
            is_due = state.next_step(_now(), position, ZERO) is Step.PEEK
            return Step.PEEK if is_due else Step.NOTHING, position
        step = state.next_step(_now(), position, confirmed)
        if step is not Step.PEEK:
            return step, position
        if has_follower(connection, self.source):
            state.announce(_now(), position)
            return Step.NOTHING, position
        if self._has_changes(connection, position):
            return Step.PEEK, position
        state.empty_to = position
        return state.next_step(_now(), position, confirmed), position

    def _has_changes(self, connection: Connection, position: Lsn) -> bool:
        """Whether there is a change up to `position`, or too much WAL for a look, but not for a capture."""
        options = PeekOptions(self.source.slot, tuple(CAPTURE_PUBLICATIONS.values()))
        try:
            return has_changes(connection, options, upto_lsn=position)
        except psycopg.errors.QueryCanceled:  # after `answer_seconds`
            return True

    def _announce(self, position: Lsn) -> Lsn:
        self.state.announce(_now(), position)
        return position


def _now() -> float:
    return time.monotonic()
