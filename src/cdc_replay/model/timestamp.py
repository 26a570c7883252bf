"""Timestamps in options and results."""

from __future__ import annotations

import datetime as dt

from cdc_replay.errors import InvalidConfiguration


def parse_timestamp_us(text: str) -> int:
    """Microseconds since 1970; a timestamp without a zone is UTC.

    Raises:
        InvalidConfiguration: if it is no timestamp.
    """
    try:
        timestamp = dt.datetime.fromisoformat(text)
    except ValueError:
        raise InvalidConfiguration(
            f'"{text}" is neither a WAL position nor a timestamp',
            hint="Give 0/16B3748, or 2026-01-31T12:00:00+00:00.",
        ) from None
    aware = timestamp if timestamp.tzinfo is not None else timestamp.replace(tzinfo=dt.UTC)
    return round(aware.timestamp() * 1_000_000)


def timestamp_text(microseconds: int) -> str:
    """The timestamp of microseconds since 1970, to the second."""
    return dt.datetime.fromtimestamp(microseconds // 1_000_000, dt.UTC).isoformat()
