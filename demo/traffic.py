"""The life of the publisher's database: days before the start at once, the following days as live traffic.

Ten minutes of the airports are one transaction. Every fifth transaction also does something that it rolls
back to a savepoint. At three in the morning flights of a week ago are archived; on the first day of a month
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
class Period:
    """The days that are there at the start, and those that arrive live."""

    start: dt.date
    days: int

    @classmethod
    def of_days(cls, days: int) -> Period:
        """A period of live days that contains the turn of a month, January's where it can."""
        latest = LAST_DAY - dt.timedelta(days=days - 1)
        wanted = dt.date(2013, 2, 1) - dt.timedelta(days=min(days - 1, 24))
        return cls(min(wanted, latest), days)

    @property
    def end(self) -> dt.date:
        """The last live day."""
        return self.start + dt.timedelta(days=self.days - 1)


@dataclass(slots=True)
class Played:
    """What has happened so far; `statements` includes those that were rolled back."""

    transactions: int = 0
    statements: int = 0
    minute: int = 0

    @property
    def now(self) -> dt.datetime:
        """The demo's own time."""
        return YEAR_START + dt.timedelta(minutes=self.minute)


def load_history(connection: psycopg.Connection[Any], period: Period) -> int:
    """Fill the database with what is there before the start; returns the number of flights."""
    with connection.transaction(), connection.cursor() as cursor:
        for name in ("airlines", "airports", "planes"):
            rows = list(read_table(name))
            columns = list(rows[0])
            _copy(cursor, name, columns, (tuple(row[column] for column in columns) for row in rows))
        _copy(cursor, "weather", list(_WEATHER_COLUMNS), _weather(dt.date(2013, 1, 1), period.start))
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


def _weather(first: dt.date, before: dt.date) -> Iterator[tuple[str | None, ...]]:
    for row in read_table("weather"):
        if first.isoformat() <= str(row["time_hour"])[:10] < before.isoformat():
            yield tuple(row[column] for column in _WEATHER_COLUMNS)


def play(
    connection: psycopg.Connection[Any],
    period: Period,
    *,
    seconds: float,
    progress: Callable[[Played], None],
) -> Played:
    """Let the live days happen within about `seconds`; returns what was done."""
    played = Played()
    began = time.monotonic()
    first = (period.start - YEAR_START.date()).days * DAY
    last = first + period.days * DAY
    events = _live_events(period, first, last)
    weather = _hourly_weather(period)
    for number, (step, happening) in enumerate(
        itertools.groupby(events, key=lambda e: e.minute // STEP_MINUTES)
    ):
        played.minute = step * STEP_MINUTES
        played.statements += _transaction(connection, list(happening), rolls_back=number % 5 == 0)
        played.transactions += 1
        _on_the_hour(connection, played, weather)
        progress(played)
        due = began + seconds * (played.minute - first) / (last - first)
        time.sleep(max(0.0, due - time.monotonic()))
    return played


def _live_events(period: Period, first: int, last: int) -> list[Event]:
    flights = read_flights(period.start - dt.timedelta(days=HISTORY_DAYS), period.end)
    events = (event for flight in flights for event in events_of(flight))
    return sorted((event for event in events if first <= event.minute < last), key=lambda e: e.minute)


def _transaction(connection: psycopg.Connection[Any], events: Sequence[Event], *, rolls_back: bool) -> int:
    with connection.transaction():
        with connection.pipeline():
            for event in events:
                play_event(connection, event)
        if rolls_back:
            # A clerk who changes his mind: none of this may ever reach a subscriber.
            with connection.transaction(force_rollback=True):
                connection.execute("update flights set status = 'lost' where status = 'scheduled'")
                connection.execute("delete from planes where tailnum < 'N15'")
    return len(events)


def _hourly_weather(period: Period) -> dict[str, list[tuple[str | None, ...]]]:
    by_hour: dict[str, list[tuple[str | None, ...]]] = {}
    for row in _weather(period.start, period.end + dt.timedelta(days=1)):
        by_hour.setdefault(str(row[1])[:13], []).append(row)
    return by_hour


def _on_the_hour(
    connection: psycopg.Connection[Any], played: Played, weather: dict[str, list[tuple[str | None, ...]]]
) -> None:
    """New weather every hour; the archive at three; a truncated month on its first day after."""
    now = played.now
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
    key = (flight.date, flight.origin, flight.carrier, flight.number, clock(flight.scheduled))
    match event.kind:
        case EventKind.SCHEDULED:
            rest = (flight.dest, flight.tailnum, flight.distance, flight.plan)
            connection.execute(_INSERT, (*key, *rest))
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
