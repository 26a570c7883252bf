"""The publisher's traffic: the days before the start at once, the following days live.

Ten minutes of the airports are one transaction. Every fifth transaction also rolls changes back to a
savepoint. At three in the morning flights of a week ago are archived; on the first day of a month
the weather of the month before is truncated.
"""

from __future__ import annotations

import datetime as dt
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from flights import (
    DAY,
    POSTPONED,
    RENUMBERED,
    YEAR_START,
    Event,
    EventKind,
    Flight,
    clock,
    events_of,
    read_flights,
    read_table,
)

HISTORY_DAYS: Final = 7
STEP_MINUTES: Final = 10
ARCHIVE_HOUR: Final = 3
LAST_DAY: Final = dt.date(2013, 12, 31)

_INSERT: Final = """
    insert into flights (flight_date, origin, carrier, flight, scheduled, dest, tailnum, status, distance,
    plan) values (%s, %s, %s, %s, %s, %s, %s, 'scheduled', %s, %s)
"""
_KEY: Final = sql.SQL(
    "where flight_date = %s and origin = %s and carrier = %s and flight = %s and scheduled = %s"
)
_RENUMBER: Final = sql.SQL("update flights set flight = flight + {} {}").format(RENUMBERED, _KEY)
_DELAY: Final = sql.SQL("update flights set status = 'delayed', dep_delay = %s {}").format(_KEY)
_DEPART: Final = sql.SQL("update flights set status = 'departed', departed = %s, dep_delay = %s {}").format(
    _KEY
)
_LAND: Final = sql.SQL("update flights set status = 'landed', arrived = %s, arr_delay = %s {}").format(_KEY)
_CANCEL: Final = sql.SQL("update flights set status = 'cancelled' {}").format(_KEY)
_POSTPONE: Final = sql.SQL(
    "update flights set flight_date = flight_date + 1, flight = flight + {}, status = 'scheduled' {}"
).format(POSTPONED, _KEY)
_ARCHIVE: Final = "delete from flights where flight_date = %s"
_COUNT_LANDING: Final = "update planes set landings = landings + 1 where tailnum = %s"
_WEATHER_COLUMNS: Final = (
    "origin", "time_hour", "temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip",
    "pressure", "visib",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DateRange:
    """The live days; the days before `start` are loaded as history."""

    start: dt.date
    days: int

    @classmethod
    def with_month_end(cls, days: int) -> DateRange:
        """A range of live days that contains the turn of a month, preferably January's."""
        latest = LAST_DAY - dt.timedelta(days=days - 1)
        preferred = dt.date(2013, 2, 1) - dt.timedelta(days=min(days - 1, 24))
        return cls(min(preferred, latest), days)

    @property
    def end(self) -> dt.date:
        """The last live day."""
        return self.start + dt.timedelta(days=self.days - 1)


@dataclass(slots=True)
class TrafficStats:
    """What was played so far; `statements` includes those that were rolled back."""

    transactions: int = 0
    statements: int = 0
    minute: int = 0

    @property
    def now(self) -> dt.datetime:
        """The demo's own time."""
        return YEAR_START + dt.timedelta(minutes=self.minute)


def load_history(connection: psycopg.Connection[Any], period: DateRange) -> int:
    """Load the rows from before the start; returns the number of flights."""
    with connection.transaction(), connection.cursor() as cursor:
        for name in ("airlines", "airports", "planes"):
            rows = list(read_table(name))
            columns = list(rows[0])
            _copy(cursor, name, columns, (tuple(row[column] for column in columns) for row in rows))
        _copy(cursor, "weather", list(_WEATHER_COLUMNS), _read_weather(dt.date(2013, 1, 1), period.start))
    first = period.start - dt.timedelta(days=HISTORY_DAYS)
    flights = list(read_flights(first, period.start - dt.timedelta(days=1)))
    until = (period.start - YEAR_START.date()).days * DAY
    events = sorted((event for flight in flights for event in events_of(flight)), key=lambda e: e.minute)
    with connection.transaction(), connection.pipeline():
        for event in events:
            if event.minute < until:
                play_event(connection, event)
    return len(flights)


def _copy(
    cursor: psycopg.Cursor[Any], table: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    statement = sql.SQL("copy {} ({}) from stdin").format(
        sql.Identifier(table), sql.SQL(", ").join(map(sql.Identifier, columns))
    )
    with cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)


def _read_weather(first: dt.date, before: dt.date) -> Iterator[tuple[str | None, ...]]:
    for row in read_table("weather"):
        if first.isoformat() <= str(row["time_hour"])[:10] < before.isoformat():
            yield tuple(row[column] for column in _WEATHER_COLUMNS)


def play(
    connection: psycopg.Connection[Any],
    period: DateRange,
    *,
    seconds: float,
    progress: Callable[[TrafficStats], None],
) -> TrafficStats:
    """Play the live days within about `seconds`."""
    stats = TrafficStats()
    began = time.monotonic()
    first = (period.start - YEAR_START.date()).days * DAY
    last = first + period.days * DAY
    events = _live_events(period, first, last)
    weather = _weather_by_hour(period)
    for index, (step, step_events) in enumerate(
        itertools.groupby(events, key=lambda e: e.minute // STEP_MINUTES)
    ):
        stats.minute = step * STEP_MINUTES
        stats.statements += _play_transaction(connection, list(step_events), rolls_back=index % 5 == 0)
        stats.transactions += 1
        _play_hourly(connection, stats, weather)
        progress(stats)
        due = began + seconds * (stats.minute - first) / (last - first)
        time.sleep(max(0.0, due - time.monotonic()))
    return stats


def _live_events(period: DateRange, first: int, last: int) -> list[Event]:
    flights = read_flights(period.start - dt.timedelta(days=HISTORY_DAYS), period.end)
    events = (event for flight in flights for event in events_of(flight))
    return sorted((event for event in events if first <= event.minute < last), key=lambda e: e.minute)


def _play_transaction(
    connection: psycopg.Connection[Any], events: Sequence[Event], *, rolls_back: bool
) -> int:
    with connection.transaction():
        with connection.pipeline():
            for event in events:
                play_event(connection, event)
        if rolls_back:
            # None of this may ever reach a subscriber.
            with connection.transaction(force_rollback=True):
                connection.execute("update flights set status = 'lost' where status = 'scheduled'")
                connection.execute("delete from planes where tailnum < 'N15'")
    return len(events)


def _weather_by_hour(period: DateRange) -> dict[str, list[tuple[str | None, ...]]]:
    by_hour: dict[str, list[tuple[str | None, ...]]] = {}
    for row in _read_weather(period.start, period.end + dt.timedelta(days=1)):
        by_hour.setdefault(str(row[1])[:13], []).append(row)
    return by_hour


def _play_hourly(
    connection: psycopg.Connection[Any], stats: TrafficStats, weather: dict[str, list[tuple[str | None, ...]]]
) -> None:
    """New weather every hour, the archive at three, and the truncation of last month's weather."""
    now = stats.now
    rows = weather.pop(now.isoformat()[:13], [])
    with connection.transaction(), connection.cursor() as cursor:
        if rows:
            _copy(cursor, "weather", list(_WEATHER_COLUMNS), rows)
        if now.hour == ARCHIVE_HOUR and now.minute < STEP_MINUTES:
            cursor.execute(_ARCHIVE, (now.date() - dt.timedelta(days=HISTORY_DAYS),))
            if now.day == 1 and now.month > 1:
                month = sql.Identifier(f"weather_{now.month - 1:02}")
                cursor.execute(sql.SQL("truncate {}").format(month))


def play_event(connection: psycopg.Connection[Any], event: Event) -> None:
    """One event as SQL."""
    flight = event.flight
    key = (flight.date, flight.origin, flight.carrier, flight.flight_number, clock(flight.scheduled))
    match event.kind:
        case EventKind.SCHEDULED:
            connection.execute(_INSERT, (*key, flight.dest, flight.tailnum, flight.distance, flight.plan))
        case EventKind.RENUMBERED:
            connection.execute(_RENUMBER, key)
        case EventKind.DELAYED:
            connection.execute(_DELAY, (flight.dep_delay, *key))
        case EventKind.DEPARTED:
            connection.execute(_DEPART, (clock(event.minute), flight.dep_delay, *key))
        case EventKind.LANDED:
            _land(connection, event, key)
        case EventKind.CANCELLED:
            connection.execute(_CANCEL, key)
        case EventKind.POSTPONED:
            connection.execute(_POSTPONE, key)


def _land(connection: psycopg.Connection[Any], event: Event, key: tuple[object, ...]) -> None:
    flight: Flight = event.flight
    connection.execute(_LAND, (clock(event.minute), flight.arr_delay, *key))
    if flight.tailnum is not None:
        connection.execute(_COUNT_LANDING, (flight.tailnum,))
