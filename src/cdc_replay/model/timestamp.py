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


def check_zone(text: str | None) -> str | None:
    """`text`, unless it is a timestamp without a zone: a person may mean that of any machine.

    Raises:
        InvalidConfiguration: naming the timestamp in UTC.
    """
    try:
        timestamp = dt.datetime.fromisoformat(text or "")
    except ValueError:  # a WAL position, or not valid: the command says so
        return text
    if timestamp.tzinfo is not None:
        return text
    raise InvalidConfiguration(
        f'timestamp "{text}" has no time zone',
        hint=f"Give {timestamp.isoformat()}Z for UTC, or an offset such as +02:00.",
    )


def timestamp_text(microseconds: int) -> str:
    """The timestamp of microseconds since 1970, to the second."""
    return dt.datetime.fromtimestamp(microseconds // 1_000_000, dt.UTC).isoformat()
