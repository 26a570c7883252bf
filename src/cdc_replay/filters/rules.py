"""Which operations Arrow answers exactly as PostgreSQL does.

A rule says for an operation and its argument types that Arrow is exact (in value, NULL, overflow, collation
and error), and how the result is computed, or why PostgreSQL evaluates it. Operations without a rule are
evaluated by PostgreSQL: a gap costs speed, not correctness.

Operations work on values in the forms of `sortable_forms`, in which equality and order are PostgreSQL's. An
operation that can fail in PostgreSQL is exact only where it cannot fail: with a constant divisor, or a sum
that fits for all values of its arguments' types (`integer_ranges`).

`docs/filters.md` is generated from the tables here; tests compare each exact rule with a server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.filters import sortable_forms
from cdc_replay.filters.expression import (
    FIRST_UNRESERVED_OID,
    Collate,
    Constant,
    Expression,
    Function,
    Relabel,
    Type,
)
from cdc_replay.filters.integer_ranges import cannot_overflow, range_of
from cdc_replay.filters.operators import COMPARISON_SYMBOLS, FUNCTIONS, OPERATORS, Signature
from cdc_replay.filters.sortable_forms import Datum, date_to_timestamp

Compute: TypeAlias = Callable[..., Any]
"""Arrays and scalars, in the forms of `sortable_forms` → an array or a scalar."""

Condition: TypeAlias = Callable[[Expression, tuple[Expression, ...], int], str | None]
"""Why this expression, on these arguments under this collation, is not exact after all, or None."""


@dataclass(frozen=True, slots=True)
class Exact:
    """Arrow gives PostgreSQL's answer for all values, NULL included, unless `unless` returns a reason.

    `remark` is the condition in the words of `docs/filters.md`.
    """

    compute: Compute
    unless: Condition | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class OnServer:
    """PostgreSQL evaluates this one; `because` is what `cdc-replay explain` prints."""

    because: str


Rule: TypeAlias = Exact | OnServer

UNKNOWN: Final = OnServer("no rule says that Arrow is exact here")

# ---- collations

UTF8_COLLATIONS: Final = frozenset({811, 962, 6411})
"""pg_c_utf8, ucs_basic, pg_unicode_fast: they exist in UTF8 databases only and compare bytes."""

BYTE_ORDER_COLLATIONS: Final = frozenset({950, 951}) | UTF8_COLLATIONS
"""C and POSIX compare the bytes of any encoding."""


def _constant(expression: Expression) -> Constant | None:
    """The constant that `expression` is, under casts that are exact."""
    match expression:
        case Constant():
            return expression
        case Relabel(argument) | Collate(argument) | Function(_, (argument,)):
            return _constant(argument)
        case _:
            return None


def _is_ascii(expression: Expression) -> bool:
    constant = _constant(expression)
    return constant is not None and (constant.value is None or str(constant.value).isascii())


def _text_differs(_: Expression, arguments: tuple[Expression, ...], collation: int) -> str | None:
    """Why equal text is not equal bytes in UTF-8 (R3.16), or None: all built-in collations are deterministic.

    PostgreSQL compares bytes in the database's encoding. With a constant on one side the result is the same;
    for two columns it can differ, because some encodings have two codes for one character.
    """
    if not 0 < collation < FIRST_UNRESERVED_OID:
        return "a user-defined collation may be non-deterministic"
    if collation not in UTF8_COLLATIONS and all(_constant(argument) is None for argument in arguments):
        return "text of two columns is compared in the database's encoding"
    return None


def text_order_differs(_: Expression, arguments: tuple[Expression, ...], collation: int) -> str | None:
    """Why text is not ordered by its bytes in UTF-8 (R3.16), or None.

    In every server encoding, characters outside ASCII have bytes above those of ASCII. So the order is the
    same in all encodings if all arguments but one are constants of ASCII characters.
    """
    if collation not in BYTE_ORDER_COLLATIONS:
        return "text order depends on the collation"
    if collation not in UTF8_COLLATIONS and sum(not _is_ascii(argument) for argument in arguments) > 1:
        return "text is ordered by its bytes in the database's encoding"
    return None


def _pattern_differs(_: Expression, arguments: tuple[Expression, ...], collation: int) -> str | None:
    pattern = _constant(arguments[1])
    if pattern is None or not 0 < collation < FIRST_UNRESERVED_OID:
        return "the pattern is not a constant"
    text = _ESCAPED.sub("", str(pattern.value or ""))
    if "_" in text:
        return "_ stands for a character of the database's encoding"
    if "\\" in text:
        return "the pattern escapes an ordinary character"
    return "the pattern is too long for a regular expression" if len(text) > MAX_PATTERN else None


MAX_PATTERN: Final = 1000
"""Characters of a LIKE pattern; RE2, which evaluates it, limits the size of its programs."""
_ESCAPED: Final = re.compile(r"\\[\\%_]")


def _prefix_differs(_: Expression, arguments: tuple[Expression, ...], collation: int) -> str | None:
    is_constant = _constant(arguments[1]) is not None and 0 < collation < FIRST_UNRESERVED_OID
    return None if is_constant else "the prefix is not a constant"


# ---- numbers


def _may_divide_by_zero(_: Expression, arguments: tuple[Expression, ...], _collation: int) -> str | None:
    divisor = range_of(arguments[1])
    if divisor is None or divisor.lowest <= 0 <= divisor.highest:
        return "division by zero is an error in PostgreSQL"
    return None


def _may_overflow(expression: Expression, _: tuple[Expression, ...], _collation: int) -> str | None:
    return None if cannot_overflow(expression) else "overflow is an error in PostgreSQL"


def _may_fail_to_divide(
    expression: Expression, arguments: tuple[Expression, ...], collation: int
) -> str | None:
    objection = _may_divide_by_zero(expression, arguments, collation)
    return objection or _may_overflow(expression, arguments, collation)


# ---- what Arrow computes


def keep_form(argument: Datum) -> Datum:
    """A cast that does not change the value's form."""
    return argument


def _remainder(dividend: Datum, divisor: Datum) -> Datum:
    # Arrow's has the divisor's sign, PostgreSQL's the dividend's.
    remainder = pc.modulo(dividend, divisor)
    differ = pc.not_equal(pc.less(dividend, 0), pc.less(divisor, 0))
    return pc.if_else(pc.and_(differ, pc.not_equal(remainder, 0)), pc.subtract(remainder, divisor), remainder)


def _negate(operand: Datum) -> Datum:
    return pc.subtract(pa.scalar(0, pa.int64()), operand)


def _to_numeric(operand: Datum) -> Datum:
    return sortable_forms.form_numerics(operand.cast(pa.string()))


def _to_float8(operand: Datum) -> Datum:
    # A safe cast refuses to round.
    return sortable_forms.form_doubles(pc.cast(operand, pa.float64(), safe=False))


def _to_float4(operand: Datum) -> Datum:
    rounded = pc.cast(operand, pa.float32(), safe=False)
    return sortable_forms.form_doubles(pc.cast(rounded, pa.float64()))


def _to_unsigned(operand: Datum) -> Datum:
    return pc.bit_wise_and(operand, pa.scalar(0xFFFFFFFF, pa.int64()))


def _starts_with(text: Datum, prefix: pa.Scalar) -> Datum:
    return pc.starts_with(text, pattern=prefix.as_py()) if prefix.is_valid else pa.scalar(None, pa.bool_())


def _concatenate(left: Datum, right: Datum) -> Datum:
    return pc.binary_join_element_wise(left, right, "")


def _like(text: Datum, pattern: pa.Scalar) -> Datum:
    if not pattern.is_valid:
        return pa.scalar(None, pa.bool_())
    parts = _PATTERN_PARTS.findall(pattern.as_py())
    regex = "".join(".*" if part == "%" else re.escape(part[-1]) for part in parts)
    return pc.match_substring_regex(text, rf"(?s)\A{regex}\z")


def _not_like(text: Datum, pattern: pa.Scalar) -> Datum:
    return pc.invert(_like(text, pattern))


_PATTERN_PARTS: Final = re.compile(r"\\?.", re.DOTALL)

# ---- operators and functions

_COMPARISONS: Final[Mapping[str, Compute]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_EQUALITY: Final = ("=", "<>")
_ORDER: Final = ("<", "<=", ">", ">=")
_INTEGERS: Final = ("int2", "int4", "int8")
_PAIRS: Final = tuple((left, right) for left in _INTEGERS for right in _INTEGERS)
_ALWAYS_COMPARABLE: Final = (
    *_PAIRS,
    *((kind, kind) for kind in ("oid", "bool", "numeric", "float4", "float8", "uuid", "bytea")),
    ("float4", "float8"),
    ("float8", "float4"),
    *((kind, kind) for kind in ("date", "timestamp", "timestamptz", "time")),
)

_DIVISOR: Final = "the divisor is a constant other than 0"
_QUOTIENT: Final = "so is the divisor, and the result fits: not the lowest number by -1"
_FITS: Final = "the result fits for all values of the types: `smallint + 1`, `integer::bigint * 100`"
_ONE_CONSTANT: Final = "one side is a constant, or under a collation of UTF8 databases"
_BYTE_ORDER: Final = (
    'under "C" or POSIX, with a constant of ASCII characters on one side; under pg_c_utf8, ucs_basic and '
    "pg_unicode_fast"
)
_PATTERN: Final = (
    f"the pattern is a constant without `_` of at most {MAX_PATTERN} characters, and `\\` escapes only `%`,"
    " `_` and `\\`"
)
_PREFIX: Final = "the prefix is a constant"
_FOLDING: Final = OnServer("upper and lower case depend on the collation")
_REGULAR: Final = OnServer("PostgreSQL's regular expressions are its own, and depend on the collation")
_BLANKS: Final = OnServer("a pattern sees the trailing blanks of char(n), which comparisons do not")
_ROUNDING: Final = OnServer("the result's precision and its errors are PostgreSQL's own")
_CAST_ROUNDS: Final = OnServer("rounding and overflow of a column's values are PostgreSQL's own")
_CAST_CUTS: Final = OnServer("what is cut off counts characters of the database's encoding")

_DOCUMENTS: Final = OnServer("documents are PostgreSQL's own: equal ones have different texts (1, 1.0)")
ARRAYS: Final = OnServer("a column's array is text until PostgreSQL reads it")
_HASHES: Final = OnServer("of the text's bytes in the database's encoding, by PostgreSQL's own functions")
_CHARACTERS: Final = OnServer("what is one character depends on the database's encoding")
_CALENDAR: Final = OnServer("infinities and calendar arithmetic are PostgreSQL's own")

_ORDERED_BY_SERVER: Final = {
    "interval": OnServer("equal intervals have different texts (1 mon, 30 days)"),
    "timetz": OnServer("times are ordered by the moment, then by the zone"),
    "inet": OnServer("networks are ordered by family, length and address"),
    "money": OnServer("its text depends on the server's lc_monetary"),
    "name": OnServer("a type of system catalogs, too rare in tables for a rule"),
    "char": OnServer("a type of system catalogs, too rare in tables for a rule"),
}

RULES: Final[Mapping[Signature, Rule]] = {
    **{
        (symbol, *pair): Exact(_COMPARISONS[symbol])
        for pair in _ALWAYS_COMPARABLE
        for symbol in COMPARISON_SYMBOLS
    },
    **{
        (symbol, "date", "timestamp"): Exact(
            lambda left, right, compare=_COMPARISONS[symbol]: compare(date_to_timestamp(left), right)
        )
        for symbol in COMPARISON_SYMBOLS
    },
    **{
        (symbol, "timestamp", "date"): Exact(
            lambda left, right, compare=_COMPARISONS[symbol]: compare(left, date_to_timestamp(right))
        )
        for symbol in COMPARISON_SYMBOLS
    },
    **{
        (symbol, kind, kind): Exact(_COMPARISONS[symbol], _text_differs, _ONE_CONSTANT)
        for kind in ("text", "bpchar")
        for symbol in _EQUALITY
    },
    **{
        (symbol, kind, kind): Exact(_COMPARISONS[symbol], text_order_differs, _BYTE_ORDER)
        for kind in ("text", "bpchar")
        for symbol in _ORDER
    },
    ("~~", "text", "text"): Exact(_like, _pattern_differs, _PATTERN),
    ("!~~", "text", "text"): Exact(_not_like, _pattern_differs, _PATTERN),
    ("^@", "text", "text"): Exact(_starts_with, _prefix_differs, _PREFIX),
    ("starts_with", "text", "text"): Exact(_starts_with, _prefix_differs, _PREFIX),
    ("||", "text", "text"): Exact(_concatenate),
    **{("+", *pair): Exact(pc.add, _may_overflow, _FITS) for pair in _PAIRS},
    **{("-", *pair): Exact(pc.subtract, _may_overflow, _FITS) for pair in _PAIRS},
    **{("*", *pair): Exact(pc.multiply, _may_overflow, _FITS) for pair in _PAIRS},
    **{("/", *pair): Exact(pc.divide, _may_fail_to_divide, _QUOTIENT) for pair in _PAIRS},
    **{
        (name, kind, kind): Exact(_remainder, _may_divide_by_zero, _DIVISOR)
        for name in ("%", "mod")
        for kind in _INTEGERS
    },
    **{("-", kind): Exact(_negate, _may_overflow, _FITS) for kind in _INTEGERS},
    **{("~", kind): Exact(pc.bit_wise_not) for kind in _INTEGERS},
    **{("&", kind, kind): Exact(pc.bit_wise_and) for kind in _INTEGERS},
    **{("|", kind, kind): Exact(pc.bit_wise_or) for kind in _INTEGERS},
    **{("#", kind, kind): Exact(pc.bit_wise_xor) for kind in _INTEGERS},
    ("int4", "int2"): Exact(keep_form),
    ("int8", "int2"): Exact(keep_form),
    ("int8", "int4"): Exact(keep_form),
    ("int8", "oid"): Exact(keep_form),
    ("int2", "int4"): Exact(keep_form, _may_overflow, _FITS),
    ("int2", "int8"): Exact(keep_form, _may_overflow, _FITS),
    ("int4", "int8"): Exact(keep_form, _may_overflow, _FITS),
    ("oid", "int8"): Exact(keep_form, _may_overflow, _FITS),
    **{("numeric", kind): Exact(_to_numeric) for kind in _INTEGERS},
    **{("float4", kind): Exact(_to_float4) for kind in _INTEGERS},
    **{("float8", kind): Exact(_to_float8) for kind in _INTEGERS},
    ("float8", "float4"): Exact(keep_form),
    ("text", "bpchar"): Exact(keep_form),
    ("date", "timestamp"): Exact(sortable_forms.timestamp_to_date),
    ("float8", "numeric"): _CAST_ROUNDS,
    ("float4", "numeric"): _CAST_ROUNDS,
    ("numeric", "numeric", "int4"): _CAST_ROUNDS,
    ("bpchar", "bpchar", "int4", "bool"): _CAST_CUTS,
    ("varchar", "varchar", "int4", "bool"): _CAST_CUTS,
    **{(symbol, kind, "text"): _FOLDING for kind in ("text", "bpchar") for symbol in ("~~*", "!~~*")},
    **{
        (symbol, kind, "text"): _REGULAR for kind in ("text", "bpchar") for symbol in ("~", "!~", "~*", "!~*")
    },
    **{(symbol, "bpchar", "text"): _BLANKS for symbol in ("~~", "!~~")},
    **{
        (symbol, kind, kind): rule
        for kind, rule in _ORDERED_BY_SERVER.items()
        for symbol in COMPARISON_SYMBOLS
    },
    **{signature: _DOCUMENTS for signature in OPERATORS.values() if signature[1] in {"json", "jsonb"}},
    **{signature: ARRAYS for signature in OPERATORS.values() if signature[1] == "anyarray"},
    **{(name, "text"): _FOLDING for name in ("lower", "upper")},
    **{(name, "text"): _HASHES for name in ("md5", "hashtext")},
    ("length", "text"): _CHARACTERS,
    ("substring", "text", "int4"): _CHARACTERS,
    ("substring", "text", "int4", "int4"): _CHARACTERS,
    **{("abs", kind): OnServer("the lowest number has none, which is an error") for kind in _INTEGERS},
    ("date_trunc", "text", "timestamp"): _CALENDAR,
    ("extract", "text", "date"): _CALENDAR,
    ("extract", "text", "timestamp"): _CALENDAR,
    **{(symbol, "numeric", "numeric"): _ROUNDING for symbol in ("+", "-", "*", "/", "%")},
    **{(symbol, "float8", "float8"): _ROUNDING for symbol in ("+", "-", "*", "/")},
}
"""The rules of operators and functions, by signature."""

RELABELS: Final[Mapping[tuple[int, int], Exact]] = {
    (Type.VARCHAR, Type.TEXT): Exact(keep_form),
    (Type.TEXT, Type.VARCHAR): Exact(keep_form),
    (Type.VARCHAR, Type.BPCHAR): Exact(sortable_forms.trim_blanks),
    (Type.TEXT, Type.BPCHAR): Exact(sortable_forms.trim_blanks),
    (Type.INT4, Type.OID): Exact(_to_unsigned),
}
"""Binary-compatible casts, (from, to): the same bytes, read as another type."""

STRUCTURE: Final[Mapping[str, str]] = {
    "AND, OR, NOT": "three-valued, as in PostgreSQL",
    "IS [NOT] NULL": "of a column of any type, or of an expression that is exact; also of ROW(…)",
    "IS [NOT] TRUE, FALSE, UNKNOWN": "of a boolean that is exact",
    "IS [NOT] DISTINCT FROM, NULLIF": "where = on the same types is exact",
    "IN, NOT IN, BETWEEN, operator ANY or ALL (ARRAY[…])": "where the operator on the types is exact",
    "(a, b) > (c, d)": "where the comparisons of its parts are exact",
    "COALESCE, CASE, CASE … WHEN": "of exact expressions",
    "GREATEST, LEAST": "of exact expressions; of text where its order is exact",
    "casts of constants": "to a number or to char(n), varchar(n), numeric(p, s), if the result fits",
    "other types of the same bytes": "varchar, text and char(n); integer as oid; COLLATE",
}
"""Expressions that are exact in Arrow if all of their parts are."""

WITHOUT_A_RULE: Final[Mapping[str, str]] = {
    "initcap, replace, trim, position, lpad, reverse, …": (
        "characters, case and position are those of the database's encoding and collation"
    ),
    "regexp_replace, regexp_like, …": "PostgreSQL's regular expressions are its own",
    "age, date_bin, AT TIME ZONE, make_date, + and - of dates and times": "calendar, infinities and errors",
    "round, ceil, floor, sqrt, power, arithmetic of real": "rounding and errors are PostgreSQL's own",
    "<<, >> of integers": "the shift counts modulo the width",
    "jsonb_path_exists, jsonb_typeof, XMLEXISTS, …": "PostgreSQL's own documents and paths",
    "= ANY (column), array_length, array_position, …": "a column's array is text until PostgreSQL reads it",
    "full text, ranges, geometric types, inet, bit strings": "PostgreSQL's own types",
    "generated columns: virtual ones, and all before PostgreSQL 18": (
        "their values are not sent, but computed again (R3.13)"
    ),
    "constants of other types, or in another encoding than UTF-8": "their stored form is not supported",
}
"""What PostgreSQL evaluates for want of a rule, for `docs/filters.md`."""

TEXT_TYPES: Final = frozenset({Type.TEXT, Type.VARCHAR, Type.BPCHAR})


def operator_rule(oid: int) -> Rule:
    """The rule for an operator; never absent."""
    return RULES.get(OPERATORS[oid], UNKNOWN) if oid in OPERATORS else UNKNOWN


def function_rule(oid: int) -> Rule:
    """The rule for a function; never absent."""
    return RULES.get(FUNCTIONS[oid], UNKNOWN) if oid in FUNCTIONS else UNKNOWN
