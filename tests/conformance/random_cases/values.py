"""Column types of random tables: values of each, and row filters over each.

A filter template has `{c}` for the column and is one that PostgreSQL accepts in a publication (R5.2-R5.4); an
enum and a domain have none, because filters may not read user-defined types (R5.3). No type has two values
that are equal and print differently (0 and -0, 1.0 and 1.00): which of two such rows a keyless UPDATE finds
is not determined (R8.10).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TYPES: Final = """
create type public.mood as enum ('sad', 'ok', 'happy');
create domain public.positive as int check (value > 0)
"""
"""The user-defined types of `KINDS`."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A column type, literals of it, and filter templates."""

    sql: str
    literals: tuple[str, ...]
    filters: tuple[str, ...] = ()


KINDS: Final = (
    Kind(
        "int",
        ("0", "1", "2", "5", "10", "11", "100", "-3", "2147483647"),
        (
            "{c} > 2",
            "{c} <= 10",
            "{c} between 1 and 10",
            "{c} in (1, 5, 100)",
            "{c} % 2 = 0",
            "{c} is not null",
            "{c} is distinct from 5",
            "coalesce({c}, 7) > 3",
            "case when {c} > 5 then true when {c} = 1 then null else false end",
        ),
    ),
    Kind(
        "bigint", ("0", "7", "-1", "9007199254740993"), ("{c} > 0", "{c} = 9007199254740993", "{c} is null")
    ),
    Kind("smallint", ("0", "3", "-32768", "32767"), ("{c} >= 3", "{c} <> 0")),
    Kind(
        "numeric(12,2)",
        ("0.00", "1.50", "-7.25", "99999.99", "NaN"),
        ("{c} > 1", "{c} <> 'NaN'", "{c} * 2 < 10.5"),
    ),
    Kind(
        "text",
        ("", "a", "abc", "ABC", "zz", "Ünïcode", "tab\there", "back\\slash", "quote''d", "NULL", "\\N"),
        (
            "{c} like 'a%'",
            "{c} <> 'a'",
            "{c} >= 'b'",
            "lower({c}) = 'abc'",
            "length({c}) > 1",
            "{c} ~ '^[a-z]+$'",
            "{c} in ('a', '', 'zz')",
        ),
    ),
    Kind(
        "varchar(12)",
        ("x", "xyz", "x y", "éé"),
        ("{c} = 'x'", "{c} = any (array['x', 'éé'])", "{c} is not null"),
    ),
    Kind("char(5)", ("ab", "ab c", "", "z"), ("{c} = 'ab'", "{c} > 'a'", "{c} <> ''")),
    Kind("bool", ("true", "false"), ("{c}", "not {c}", "{c} is not true", "{c} is unknown")),
    Kind(
        "date",
        ("2024-01-31", "1999-12-31", "infinity", "0044-03-15 BC"),
        ("{c} > '2024-01-15'", "{c} is null"),
    ),
    Kind(
        "timestamptz",
        ("2024-01-01 00:00:00+00", "2024-06-01 12:30:00.123456+02", "-infinity"),
        ("{c} >= '2024-01-01 00:00+00'", "{c} < '2024-03-01 00:00+00' or {c} is null"),
    ),
    Kind("float8", ("-0", "1.5", "1e300", "NaN", "Infinity"), ("{c} > 0.5", "{c} = 0", "{c} = 'NaN'")),
    Kind(
        "uuid",
        ("00000000-0000-0000-0000-000000000001", "ffffffff-0000-4000-8000-00000000000a"),
        ("{c} < '80000000-0000-0000-0000-000000000000'", "{c} is not null"),
    ),
    Kind(
        "jsonb",
        ('{"a": 1, "k": "x"}', '{"a": 2}', "[]", '"text"', "null"),
        ("{c} ->> 'k' = 'x'", "{c} @> '{{\"a\": 1}}'", "{c} ? 'a'"),
    ),
    Kind("bytea", ("\\x", "\\x00ff", "\\x5c"), ("{c} > '\\x01'", "length({c}) = 2")),
    Kind("int[]", ("{}", "{1,2}", "{NULL,3}"), ("{c} @> '{{1}}'", "3 = any ({c})", "{c} <> '{{}}'")),
    Kind("text[]", ('{a,"b c"}', "{}", '{"NULL",NULL}'), ("{c} && '{{a}}'",)),
    Kind("public.mood", ("sad", "ok", "happy")),
    Kind("public.positive", ("1", "42")),
)

INT: Final = KINDS[0]
TEXT: Final = KINDS[4]

KEY_KINDS: Final = (
    Kind("int", (), ("{c} > 8", "{c} % 3 <> 0", "{c} between 4 and 20", "{c} in (1, 2, 3, 5, 8, 13, 21)")),
    Kind("bigint", (), ("{c} < 12", "{c} / 4 = 1 or {c} > 15")),
    Kind("text", (), ("{c} like '%1%'", "{c} > '15'", "length({c}) = 2")),
    Kind("numeric(12,2)", (), ("{c} > 7.5", "{c} <> 3")),
)
"""Types of keys. Their values are counting numbers, which a generator hands out."""

REGIONS: Final = ("n", "s", "e", "w")
REGION: Final = Kind("text", REGIONS, ("{c} = 'n'", "{c} <> 's'", "{c} in ('n', 'e')"))
PART: Final = Kind("int", ("0", "3", "7", "12"), ("{c} > 3", "{c} < 10", "{c} <> 7"))


def quoted(text: str) -> str:
    """A name as SQL writes it if it needs quotes."""
    return '"' + text.replace('"', '""') + '"'


def literal(text: str | None) -> str:
    """A value as SQL writes it; quotes in `text` are doubled already."""
    if text is None:
        return "null"
    if "\t" in text:
        escaped = text.replace("\t", r"\t")
        return f"e'{escaped}'"
    return f"'{text}'"
