"""A table with columns of every type that a filter computes with in Arrow, and values at which it could err.

Half of the values are extremes and neighbours from a small pool, so that equality is often true; the rest is
random. NULL is everywhere.
"""

from __future__ import annotations

import random
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fixtures.postgres import Database

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "bool": ("b", "b2"),
    "int2": ("i2", "j2"),
    "int4": ("i4", "j4"),
    "int8": ("i8", "j8"),
    "oid": ("o", "o2"),
    "numeric": ("n", "n2", "money_like"),
    "float4": ("f4", "g4"),
    "float8": ("f8", "g8"),
    "text": ("s", "s2"),
    "varchar": ("v", "v2"),
    "bpchar": ("c", "c2"),
    "date": ("d", "d2"),
    "time": ("tm", "tm2"),
    "timestamp": ("ts", "ts2"),
    "timestamptz": ("tz", "tz2"),
    "uuid": ("u", "u2"),
    "bytea": ("y", "y2"),
}
"""Type → its columns; `cc` and `cp` are text and char(6) under the collation C."""

_DECLARED: Final = {"money_like": "numeric(12, 2)", "varchar": "varchar(30)", "bpchar": "char(6)"}
_C_COLUMNS: Final = ('cc text collate "C"', 'cp char(6) collate "C"')

_WORDS: Final = ("", " ", "a", "A", "ab", "abc", "abc ", "ABC", "b", "%", "_", "a_b", "a%b", "a\\b", "\\",
                 "'", '"', "é", "É", "ß", "€", "𝄞", "a\nb", "\t", "e\u0301", "NaN", "0", "10", "9", "~",
                 "\x7f", "foo@example.com", "%.com", "null", "zz")  # fmt: skip
_DAYS: Final = ("2000-01-01", "1999-12-31", "2024-02-29", "1970-01-01", "0001-01-01", "0001-12-31 BC",
                "0044-03-15 BC", "0045-03-14 BC", "4714-11-24 BC", "9999-12-31", "10000-01-01", "12345-06-07",
                "99999-12-31", "100000-01-01", "294276-12-31")  # fmt: skip
_CLOCKS: Final = ("00:00:00", "00:00:00.000001", "10:00:00", "10:00:00.5", "10:00:00.500001", "23:59:59",
                  "23:59:59.999999")  # fmt: skip

_POOLS: Final[Mapping[str, Sequence[str]]] = {
    "bool": ("t", "f"),
    "int2": ("0", "1", "-1", "2", "7", "10", "-7", "32767", "-32768", "32766", "100"),
    "int4": ("0", "1", "-1", "2", "7", "10", "-7", "32767", "-32768", "32768", "2147483647", "-2147483648",
             "2147483646", "100", "65536"),
    "int8": ("0", "1", "-1", "2", "7", "10", "-7", "32768", "2147483648", "-2147483649",
             "9223372036854775807", "-9223372036854775808", "9223372036854775806",
             "9007199254740993", "4294967296", "100"),
    "oid": ("0", "1", "10", "2147483647", "2147483648", "4294967295", "4294967286"),
    "numeric": ("0", "0.0", "0.00", "1", "1.0", "1.00", "-1", "-1.0", "0.1", "0.10", "0.01", "-0.1", "-0.01",
                "10", "9", "9.99", "10.01", "99.99", "100", "-9", "-10", "-100", "123456789.123456789",
                "0.000000000000000000000000000000000000001", "-0.000000000000000000000000000000000000001",
                "99999999999999999999999999999999999999", "99999999999999999999999999999999999999.9",
                "100000000000000000000000000000000000000", "-99999999999999999999999999999999999999",
                "1e100", "-1e100", "1e1000", "1.5e-500", "NaN", "Infinity", "-Infinity", "7", "2", "32768"),
    "money_like": ("0", "0.01", "-0.01", "1", "1.50", "-1.50", "9.99", "10", "9999999999.99",
                   "-9999999999.99", "NaN", "100"),
    "float4": ("0", "-0", "1", "-1", "0.1", "1.5", "-1.5", "1e-45", "-1e-45", "3.4028235e38", "-3.4028235e38",
               "Infinity", "-Infinity", "NaN", "16777217", "100", "1e10", "10"),
    "float8": ("0", "-0", "1", "-1", "0.1", "0.10000000149011612", "1.5", "-1.5", "5e-324", "-5e-324",
               "1e300", "1.7976931348623157e308", "-1.7976931348623157e308", "Infinity", "-Infinity", "NaN",
               "1e15", "1e16", "9007199254740993", "2147483648", "0.30000000000000004", "0.3", "100", "10"),
    "text": _WORDS,
    "varchar": _WORDS,
    "bpchar": tuple(word for word in _WORDS if len(word) <= 6),
    "date": (*_DAYS, "5874897-12-31", "infinity", "-infinity"),
    "time": (*_CLOCKS, "24:00:00", "12:34:56.7"),
    "timestamp": (*(f"{day.removesuffix(' BC')} {clock}{' BC' * day.endswith('BC')}"
                    for day in _DAYS for clock in _CLOCKS), "infinity", "-infinity"),
    "timestamptz": (*(f"{day.removesuffix(' BC')} {clock}+00{' BC' * day.endswith('BC')}"
                      for day in _DAYS for clock in _CLOCKS), "infinity", "-infinity"),
    "uuid": ("00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff",
             "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "A0EEBC999C0B4EF8BB6D6BB9BD380A12"),
    "bytea": ("", "\\x00", "\\x0000", "\\x00ff", "\\xff", "\\x61", "\\x6162", "\\x7f", "\\x80"),
}  # fmt: skip


def quoted(text: str) -> str:
    """The text as a literal."""
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


@dataclass(frozen=True)
class Values:
    """A source of values, as text that PostgreSQL reads; the same for the same seed."""

    choice: random.Random

    def value(self, kind: str) -> str:
        """A value of the type, or of the column of that name."""
        if kind in _RANDOM and self.choice.random() < 0.5:
            return _RANDOM[kind](self.choice)
        return self.choice.choice(_POOLS[kind])

    def literal(self, kind: str) -> str:
        """A value as SQL: a quoted literal with a cast."""
        return f"{quoted(self.value(kind))}::{kind}"

    def row(self) -> list[str | None]:
        """A row of the table, without its id."""
        kinds = [column if column in _POOLS else kind for kind, names in COLUMNS.items() for column in names]
        return [
            None if self.choice.random() < 0.1 else self.value(kind) for kind in (*kinds, "text", "bpchar")
        ]


def _integer(bits: int) -> Callable[[random.Random], str]:
    def value(choice: random.Random) -> str:
        size = choice.randrange(1, bits)
        return str(choice.randrange(-(1 << size), 1 << size))

    return value


def _numeric(choice: random.Random) -> str:
    digits = choice.choice((1, 2, 3, 5, 20, 45))
    number = choice.randrange(-(10**digits), 10**digits)
    scale = choice.choice((0, 1, 2, 4, 30))
    return f"{number}e-{scale}" if choice.random() < 0.7 else f"{number}"


def _float8(choice: random.Random) -> str:
    (number,) = struct.unpack("<d", choice.randbytes(8))
    return repr(number) if number == number else "NaN"  # noqa: PLR0124 - NaN


def _float4(choice: random.Random) -> str:
    (number,) = struct.unpack("<f", choice.randbytes(4))
    return repr(number) if number == number else "NaN"  # noqa: PLR0124 - NaN


def _text(length: int) -> Callable[[random.Random], str]:
    def value(choice: random.Random) -> str:
        return "".join(choice.choice("abAB%_\\ éz~'\n") for _ in range(choice.randrange(length + 1)))

    return value


def _day(choice: random.Random) -> str:
    return f"{choice.randrange(1, 4000):04}-{choice.randrange(1, 13):02}-{choice.randrange(1, 29):02}"


def _clock(choice: random.Random) -> str:
    clock = f"{choice.randrange(24):02}:{choice.randrange(60):02}:{choice.randrange(60):02}"
    return clock + choice.choice(("", ".5", ".25", ".123456", ".000001"))


_RANDOM: Final[Mapping[str, Callable[[random.Random], str]]] = {
    "int2": _integer(16),
    "int4": _integer(32),
    "int8": _integer(64),
    "oid": lambda choice: str(choice.randrange(1 << 32)),
    "numeric": _numeric,
    "money_like": lambda choice: f"{choice.randrange(-(10**7), 10**7)}e-2",
    "float4": _float4,
    "float8": _float8,
    "text": _text(8),
    "varchar": _text(8),
    "bpchar": _text(6),
    "date": lambda choice: _day(choice) + choice.choice(("", "", " BC")),
    "time": _clock,
    "timestamp": lambda choice: f"{_day(choice)} {_clock(choice)}" + choice.choice(("", "", " BC")),
    "timestamptz": lambda choice: f"{_day(choice)} {_clock(choice)}+00" + choice.choice(("", "", " BC")),
    "uuid": lambda choice: str(uuid.UUID(bytes=choice.randbytes(16))),
    "bytea": lambda choice: f"\\x{choice.randbytes(choice.randrange(6)).hex()}",
}


def create_table(database: Database, rows: int, seed: int) -> None:
    """The table `t` with an `id`, filled with `rows` rows of values from `seed`."""
    columns = ", ".join(
        f"{name} {_DECLARED.get(name) or _DECLARED.get(kind) or kind}"
        for kind, names in COLUMNS.items()
        for name in names
    )
    database.run(f"create table t (id int primary key, {columns}, {', '.join(_C_COLUMNS)})")
    values = Values(random.Random(seed))
    with (
        database.connect() as connection,
        connection.cursor() as cursor,
        cursor.copy("copy t from stdin") as copy,
    ):
        for number in range(rows):
            copy.write_row((number, *values.row()))
