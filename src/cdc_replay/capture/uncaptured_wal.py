"""Since when a publisher has WAL that no capture has read.

Neither side knows: WAL has no times without decoding it, and a capture that finds no new WAL writes nothing.
But every capture that finds some moves the end of the log. So the first status with WAL beyond the end is
kept from one look to the next: as long as the log still ends there, nothing was captured.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import Final, Self, TypeVar

from cdc_replay.model.status import PublisherState, PublisherStatus

_T = TypeVar("_T")

_KEY: Final = "uncaptured "


@dataclass(slots=True)
class UncapturedWal:
    """The first status of each publisher with WAL beyond the present end of its log, and its time."""

    _first: dict[str, tuple[PublisherStatus, float]] = field(default_factory=dict)

    @classmethod
    def take_from(cls, answers: MutableMapping[str, tuple[_T, float]]) -> Self:
        """Those that an earlier look has kept among its answers, each with its age in seconds."""
        first: dict[str, tuple[PublisherStatus, float]] = {}
        for key in [key for key in answers if key.startswith(_KEY)]:
            status, age = answers.pop(key)
            if isinstance(status, PublisherStatus):
                first[status.publisher] = status, time.time() - age
        return cls(first)

    def see(self, status: PublisherStatus) -> PublisherStatus:
        """The status with the time since which its WAL is not captured.

        The time begins again if the publisher or the log do not answer: then no capture can run either.
        """
        now = time.time()
        first, at = self._first.pop(status.publisher, (status, now))
        is_present = status.state in {PublisherState.READY, PublisherState.NEAR_LOST}
        if not is_present or not status.behind_bytes:
            return status
        if first.log_end != status.log_end:
            first, at = status, now
        self._first[status.publisher] = first, at
        return replace(status, uncaptured_seconds=max(0.0, now - at))

    def answers(self) -> dict[str, tuple[PublisherStatus, float]]:
        """Those of all publishers, for `take_from`."""
        return {f"{_KEY}{name}": (status, time.time() - at) for name, (status, at) in self._first.items()}
