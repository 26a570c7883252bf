"""Nothing was captured if the log still ends before WAL that an earlier look has seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc_replay.capture.uncaptured_wal import UncapturedWal
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.status import PublisherState, PublisherStatus

SHOP = PublisherStatus("shop", "slot", "reserved", Lsn(9), Lsn(1), Lsn(9), state=PublisherState.READY)


class Probe:
    """Looks in a process of its own each time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.kept = UncapturedWal().answers()
        monkeypatch.setattr("cdc_replay.capture.uncaptured_wal.time.time", lambda: self.now)

    def look(self, position: int, end: int, state: PublisherState = PublisherState.READY) -> float | None:
        uncaptured = UncapturedWal.take_from(self.kept)
        seen = uncaptured.see(replace(SHOP, log_end=Lsn(end), behind_bytes=position - end, state=state))
        self.kept = uncaptured.answers()
        self.now += 60
        # The age is that of the file, which another look reads later.
        self.kept = {key: (status, age + 60) for key, (status, age) in self.kept.items()}
        return seen.uncaptured_seconds


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    return Probe(monkeypatch)


def test_time_counts_from_the_first_look_that_has_seen_wal_beyond_the_end(probe: Probe) -> None:
    assert probe.look(9, 9) is None
    assert [probe.look(10, 9), probe.look(20, 9), probe.look(30, 9)] == [0, 60, 120]
    assert probe.look(30, 30) is None
    assert probe.look(31, 30) == 0


def test_captures_that_run_keep_it_short_though_they_never_reach_the_position(probe: Probe) -> None:
    seen = [probe.look(position, position - 1) for position in range(20, 60)]
    assert set(seen) == {0.0}


def test_time_begins_again_after_a_publisher_was_down(probe: Probe) -> None:
    assert [probe.look(10, 9), probe.look(10, 9)] == [0, 60]
    assert probe.look(10, 9, PublisherState.DOWN) is None
    assert probe.look(10, 9) == 0
