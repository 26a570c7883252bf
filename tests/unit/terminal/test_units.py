"""Ages and times in words."""

from __future__ import annotations

import datetime as dt

import pytest

from cdc_replay.terminal.units import duration, time_and_age, zone

NOW = dt.datetime(2026, 1, 2, 9, 30, tzinfo=dt.timezone(dt.timedelta(hours=-3, minutes=-30)))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (-1, "0 s"), (119.9, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"),
     (47 * 3600, "47 h"), (48 * 3600, "2 days")],
)  # fmt: skip
def test_duration_is_in_the_largest_unit_of_which_it_has_two(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("timestamp", "words"),
    [
        (None, "never"),
        ("2026-01-02T12:59:00+00:00", "09:29, 60 s ago"),
        ("2026-01-01T12:00:00+00:00", "01 Jan 08:30, 25 h ago"),
        ("2025-12-30T12:00:00+00:00", "2025-12-30 08:30, 3 days ago"),
    ],
)
def test_time_is_in_the_zone_of_now_with_its_age(timestamp: str | None, words: str) -> None:
    assert time_and_age(timestamp, NOW) == words


def test_zone_is_its_offset() -> None:
    assert (zone(NOW), zone(NOW.astimezone(dt.UTC))) == ("UTC-03:30", "UTC")
