"""Durations, read and written in PostgreSQL's units."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

_UNITS: Final = {
    "d": dt.timedelta(days=1),
    "h": dt.timedelta(hours=1),
    "min": dt.timedelta(minutes=1),
    "s": dt.timedelta(seconds=1),
}
_STEPS: Final = ((86400, "days"), (3600, "h"), (60, "min"))
_TEXT: Final = re.compile(r"([0-9]{1,6}) *(d|h|min|s)|0")


def parse_duration(text: str) -> dt.timedelta:
    """The duration of a whole number of `d`, `h`, `min` or `s`; `0` needs no unit.

    Raises:
        ValueError: if `text` has another form.
    """
    if (match := _TEXT.fullmatch(text.strip())) is None:
        raise ValueError("not a duration: give a whole number of d, h, min or s, such as 7d or 36h, or 0")
    return int(match[1]) * _UNITS[match[2]] if match[1] else dt.timedelta()


def parse_short_duration(text: str) -> dt.timedelta:
    """As `parse_duration`; on a command line `m` means minutes, too.

    Raises:
        ValueError: if `text` has another form.
    """
    return parse_duration(f"{text.strip()}in" if text.strip().endswith("m") else text)


def duration_in_words(seconds: float) -> str:
    """The duration in the largest unit of which it has two, such as `3 min`, as a size is printed."""
    whole = max(0, int(seconds))
    for length, unit in _STEPS:
        if whole >= 2 * length:
            return f"{whole // length} {unit}"
    return f"{whole} s"
