"""A copy with a rate limit stays below it on average."""

from __future__ import annotations

from dataclasses import dataclass, field

from cdc_replay.postgres.copy import RateLimiter


@dataclass
class Clock:
    """Time that passes only by waiting, or by hand."""

    now: float = 0.0
    waits: list[float] = field(default_factory=list)

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def pace(clock: Clock, rate: float) -> RateLimiter:
    return RateLimiter(rate, clock=lambda: clock.now, wait=clock.wait)


def test_a_sender_above_the_rate_waits_for_the_difference() -> None:
    clock = Clock()
    send = pace(clock, 100.0)
    send(50)
    clock.now += 0.2
    send(150)
    assert clock.waits == [0.5, 1.3]
    assert clock.now == 2.0


def test_a_sender_below_the_rate_never_waits() -> None:
    clock = Clock()
    send = pace(clock, 100.0)
    for _ in range(10):
        clock.now += 1.0
        send(99)
    assert clock.waits == []
