"""Sizes, ages and times in words."""

from __future__ import annotations

import datetime as dt

from cdc_replay.model.duration import duration_in_words
from cdc_replay.model.size import size_in_words


def size(size_bytes: int | None) -> str:
    """A size as PostgreSQL prints it, or `-`."""
    return "-" if size_bytes is None else size_in_words(size_bytes)


def duration(seconds: float | None) -> str:
    """A duration such as `3 min`, or `-`."""
    return "-" if seconds is None else duration_in_words(seconds)


def time_and_age(timestamp: str | None, now: dt.datetime) -> str:
    """Wall-clock time in the zone of `now`, with the date unless that is today, and the age; or `never`."""
    if timestamp is None:
        return "never"
    then = dt.datetime.fromisoformat(timestamp).astimezone(now.tzinfo)
    day = "" if then.date() == now.date() else "%d %b " if then.year == now.year else "%Y-%m-%d "
    clock = then.strftime(f"{day}%H:%M")
    return f"{clock}, {duration((now - then).total_seconds())} ago"


def zone(now: dt.datetime) -> str:
    """The offset of the zone, such as `UTC+02:00`."""
    return f"UTC{now.isoformat()[-6:] if now.utcoffset() else ''}"
