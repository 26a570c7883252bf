"""Which operations Spark answers exactly as PostgreSQL does.

A rule says for an operation and its argument types that Spark is exact (in value, NULL, overflow, collation
and error), and how it is built, or why PostgreSQL must be asked. What has no rule is asked: a gap costs
speed, not truth.

Values arrive as PostgreSQL's text (R1.11) and are read as the Spark type in `SPARK_TYPES`. Integers of all
widths are `bigint`, so that no comparison can overflow; types whose text is canonical stay text.
`docs/filters.md` is made from the tables in this module, and tests compare the oids with `pg_operator` and
each exact rule with a server.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions as F

from cdc_replay.filters.expression import (
    FIRST_UNRESERVED_OID,
    Array,
    ArrayComparison,
    Bool,
    Case,
    Coalesce,
    Collate,
    Column,
    Constant,
    Distinct,
    Expression,
    Function,
    NullIf,
    NullTest,
    Operator,
    Relabel,
    TruthTest,
    Type,
    Unmodelled,
    children,
)

Signature: TypeAlias = tuple[str, ...]
"""An operator's symbol or a function's name, and its argument types: `("<", "int4", "int8")`."""

Condition: TypeAlias = Callable[[tuple[Expression, ...], int], str | None]
"""Why these arguments under this collation are not exact after all, or None."""


@dataclass(frozen=True, slots=True)
class Exact:
    """Spark gives PostgreSQL's answer for all values, NULL included, unless `unless` objects.

    `remark` says for the reader of `docs/filters.md` when it does.
    """

    build: Callable[..., SparkColumn]
    unless: Condition | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class OnServer:
    """PostgreSQL evaluates this one; `because` is what `cdc-replay explain` prints."""

    because: str


Rule: TypeAlias = Exact | OnServer

UNKNOWN: Final = OnServer("no rule says that Spark is exact here")

SPARK_TYPES: Final[Mapping[int, str]] = {
    Type.BOOL: "boolean",
    Type.INT2: "bigint",
    Type.INT4: "bigint",
    Type.INT8: "bigint",
    Type.TEXT: "string",
    Type.VARCHAR: "string",
    Type.BPCHAR: "string",
    Type.DATE: "string",
    Type.UUID: "string",
}
"""The types that a filter may compute with in Spark, and as what."""


# ---- conditions


def _unwrapped(expression: Expression) -> Expression:
    """The argument of a cast that does not change the value; any other cast is refused by its own rule."""
    match expression:
        case Relabel(argument) | Collate(argument):
            return _unwrapped(argument)
        case Function(oid, (argument,)) if oid in FUNCTIONS:
            return _unwrapped(argument)
        case _:
            return expression


def _text_differs(arguments: tuple[Expression, ...], collation: int) -> str | None:
    """R3.16. Equal text is equal bytes under every built-in collation: all of those are deterministic.

    Bytes are compared in the database's encoding there and in UTF-8 here. With a constant of ASCII characters
    on one side that is the same; for two columns it need not be, because some encodings have two codes for
    one character.
    """
    if not 0 < collation < FIRST_UNRESERVED_OID:
        return "a user-defined collation may be non-deterministic"
    if not any(isinstance(_unwrapped(argument), Constant) for argument in arguments):
        return "text of two columns is compared in the database's encoding"
    return None


def _may_divide_by_zero(arguments: tuple[Expression, ...], _collation: int) -> str | None:
    divisor = _unwrapped(arguments[-1])
    if isinstance(divisor, Constant) and divisor.value:
        return None
    return "division by zero is an error in PostgreSQL"


def _may_overflow(bits: int) -> Condition:
    def condition(arguments: tuple[Expression, ...], _collation: int) -> str | None:
        argument = _unwrapped(arguments[0])
        match argument:
            case Constant(value=int(value)) if -(1 << bits - 1) <= value < 1 << bits - 1:
                return None
            case _:
                return _OVERFLOW.because

    return condition


def _bpchar(compare: Callable[[SparkColumn, SparkColumn], SparkColumn]) -> Callable[..., SparkColumn]:
    """R3.16: trailing blanks do not count."""
    return lambda left, right: compare(F.rtrim(left), F.rtrim(right))


def _same(argument: SparkColumn) -> SparkColumn:
    return argument


# ---- operators and functions

_INTEGERS: Final = ("int2", "int4", "int8")
_EQUALITY: Final = {"=": operator.eq, "<>": operator.ne}
_ORDER: Final = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_COMPARISONS: Final = _EQUALITY | _ORDER

_ONE_CONSTANT: Final = "one side is a constant of ASCII characters"
_FITS: Final = "it is a constant that fits"
_OVERFLOW: Final = OnServer("overflow is an error in PostgreSQL")
_TEXT_ORDER: Final = OnServer("text order depends on the column's collation")
_PATTERN: Final = OnServer("patterns depend on PostgreSQL's regular expressions and the column's collation")
_NUMERIC: Final = OnServer("equal numbers have different texts (1.0, 1.00), and there are NaN and infinity")
_FLOAT: Final = OnServer("-0 equals 0 and NaN equals NaN in PostgreSQL")
_TIMESTAMP: Final = OnServer("timestamps have infinities and years that Spark does not")

RULES: Final[Mapping[Signature, Rule]] = {
    **{
        (symbol, left, right): Exact(build)
        for left in _INTEGERS
        for right in _INTEGERS
        for symbol, build in _COMPARISONS.items()
    },
    **{
        ("%", kind, kind): Exact(operator.mod, _may_divide_by_zero, "the divisor is a constant other than 0")
        for kind in _INTEGERS
    },
    **{
        (symbol, left, right): _OVERFLOW
        for left in _INTEGERS
        for right in _INTEGERS
        for symbol in ("+", "-", "*")
    },
    **{
        ("/", left, right): OnServer("division by zero is an error in PostgreSQL")
        for left in _INTEGERS
        for right in _INTEGERS
    },
    **{("-", kind): _OVERFLOW for kind in _INTEGERS},
    **{(symbol, "bool", "bool"): Exact(build) for symbol, build in _COMPARISONS.items()},
    **{(symbol, "uuid", "uuid"): Exact(build) for symbol, build in _COMPARISONS.items()},
    **{(symbol, "date", "date"): Exact(build) for symbol, build in _EQUALITY.items()},
    **{
        (symbol, "date", "date"): OnServer("dates before year 1 and after 9999 have texts that do not sort")
        for symbol in _ORDER
    },
    **{
        (symbol, "text", "text"): Exact(build, _text_differs, _ONE_CONSTANT)
        for symbol, build in _EQUALITY.items()
    },
    **{
        (symbol, "bpchar", "bpchar"): Exact(_bpchar(build), _text_differs, _ONE_CONSTANT)
        for symbol, build in _EQUALITY.items()
    },
    **{(symbol, kind, kind): _TEXT_ORDER for kind in ("text", "bpchar") for symbol in _ORDER},
    **{
        (symbol, kind, "text"): _PATTERN for kind in ("text", "bpchar") for symbol in ("~~", "!~~", "~", "!~")
    },
    **{(symbol, "numeric", "numeric"): _NUMERIC for symbol in _COMPARISONS},
    **{(symbol, kind, kind): _FLOAT for kind in ("float4", "float8") for symbol in _COMPARISONS},
    **{(symbol, kind, kind): _TIMESTAMP for kind in ("timestamp", "timestamptz") for symbol in _COMPARISONS},
    ("int4", "int2"): Exact(_same),
    ("int8", "int2"): Exact(_same),
    ("int8", "int4"): Exact(_same),
    ("int2", "int4"): Exact(_same, _may_overflow(16), _FITS),
    ("int2", "int8"): Exact(_same, _may_overflow(16), _FITS),
    ("int4", "int8"): Exact(_same, _may_overflow(32), _FITS),
}
"""What is known of operators and of functions, by signature."""

_OPERATOR_OIDS: Final[Mapping[tuple[str, ...], Mapping[str, int]]] = {
    ("int2", "int2"): {"=": 94, "<>": 519, "<": 95, "<=": 522, ">": 520, ">=": 524},
    ("int2", "int4"): {"=": 532, "<>": 538, "<": 534, "<=": 540, ">": 536, ">=": 542},
    ("int2", "int8"): {"=": 1862, "<>": 1863, "<": 1864, "<=": 1866, ">": 1865, ">=": 1867},
    ("int4", "int2"): {"=": 533, "<>": 539, "<": 535, "<=": 541, ">": 537, ">=": 543},
    ("int4", "int4"): {"=": 96, "<>": 518, "<": 97, "<=": 523, ">": 521, ">=": 525},
    ("int4", "int8"): {"=": 15, "<>": 36, "<": 37, "<=": 80, ">": 76, ">=": 82},
    ("int8", "int2"): {"=": 1868, "<>": 1869, "<": 1870, "<=": 1872, ">": 1871, ">=": 1873},
    ("int8", "int4"): {"=": 416, "<>": 417, "<": 418, "<=": 420, ">": 419, ">=": 430},
    ("int8", "int8"): {"=": 410, "<>": 411, "<": 412, "<=": 414, ">": 413, ">=": 415},
    ("bool", "bool"): {"=": 91, "<>": 85, "<": 58, "<=": 1694, ">": 59, ">=": 1695},
    ("uuid", "uuid"): {"=": 2972, "<>": 2973, "<": 2974, "<=": 2976, ">": 2975, ">=": 2977},
    ("date", "date"): {"=": 1093, "<>": 1094, "<": 1095, "<=": 1096, ">": 1097, ">=": 1098},
    ("text", "text"): {"=": 98, "<>": 531, "<": 664, "<=": 665, ">": 666, ">=": 667},
    ("bpchar", "bpchar"): {"=": 1054, "<>": 1057, "<": 1058, "<=": 1059, ">": 1060, ">=": 1061},
    ("numeric", "numeric"): {"=": 1752, "<>": 1753, "<": 1754, "<=": 1755, ">": 1756, ">=": 1757},
    ("float4", "float4"): {"=": 620, "<>": 621, "<": 622, "<=": 624, ">": 623, ">=": 625},
    ("float8", "float8"): {"=": 670, "<>": 671, "<": 672, "<=": 673, ">": 674, ">=": 675},
    ("timestamp", "timestamp"): {"=": 2060, "<>": 2061, "<": 2062, "<=": 2063, ">": 2064, ">=": 2065},
    ("timestamptz", "timestamptz"): {"=": 1320, "<>": 1321, "<": 1322, "<=": 1323, ">": 1324, ">=": 1325},
}

_ARITHMETIC_OIDS: Final[Mapping[tuple[str, ...], Mapping[str, int]]] = {
    ("int2",): {"-": 559},
    ("int4",): {"-": 558},
    ("int8",): {"-": 484},
    ("int2", "int2"): {"+": 550, "-": 554, "*": 526, "/": 527, "%": 529},
    ("int2", "int4"): {"+": 552, "-": 556, "*": 544, "/": 546},
    ("int2", "int8"): {"+": 822, "-": 823, "*": 824, "/": 825},
    ("int4", "int2"): {"+": 553, "-": 557, "*": 545, "/": 547},
    ("int4", "int4"): {"+": 551, "-": 555, "*": 514, "/": 528, "%": 530},
    ("int4", "int8"): {"+": 692, "-": 693, "*": 694, "/": 695},
    ("int8", "int2"): {"+": 818, "-": 819, "*": 820, "/": 821},
    ("int8", "int4"): {"+": 688, "-": 689, "*": 690, "/": 691},
    ("int8", "int8"): {"+": 684, "-": 685, "*": 686, "/": 687, "%": 439},
    ("text", "text"): {"~~": 1209, "!~~": 1210, "~": 641, "!~": 642},
    ("bpchar", "text"): {"~~": 1211, "!~~": 1212, "~": 1055, "!~": 1056},
}

OPERATORS: Final[Mapping[int, Signature]] = {
    oid: (symbol, *types)
    for table in (_OPERATOR_OIDS, _ARITHMETIC_OIDS)
    for types, oids in table.items()
    for symbol, oid in oids.items()
}
"""`pg_operator.oid` → signature, for the operators that have a rule."""

FUNCTIONS: Final[Mapping[int, Signature]] = {
    313: ("int4", "int2"),
    754: ("int8", "int2"),
    481: ("int8", "int4"),
    314: ("int2", "int4"),
    714: ("int2", "int8"),
    480: ("int4", "int8"),
}
"""`pg_proc.oid` → signature, for the functions that have a rule."""

RELABELS: Final = frozenset({(Type.VARCHAR, Type.TEXT), (Type.TEXT, Type.VARCHAR)})
"""Binary-compatible casts that do not change what a value means: (from, to)."""

STRUCTURE: Final[Mapping[str, str]] = {
    "AND, OR, NOT": "three-valued, as in PostgreSQL",
    "IS [NOT] NULL": "of a column of any type, or of an expression that is exact",
    "IS [NOT] TRUE, FALSE, UNKNOWN": "of a boolean that is exact",
    "IS [NOT] DISTINCT FROM, NULLIF": "where = on the same types is exact",
    "IN, NOT IN, = ANY (ARRAY[…]), <> ALL (ARRAY[…])": "where = on the types is exact, except for bpchar",
    "COALESCE, CASE WHEN": "of exact expressions",
    "varchar::text, text::varchar, COLLATE": "the bytes stay the same",
}
"""Expressions that are exact in Spark where all of their parts are."""


def operator_rule(oid: int) -> Rule:
    """The rule for an operator; never absent."""
    return RULES.get(OPERATORS[oid], UNKNOWN) if oid in OPERATORS else UNKNOWN


def function_rule(oid: int) -> Rule:
    """The rule for a function; never absent."""
    return RULES.get(FUNCTIONS[oid], UNKNOWN) if oid in FUNCTIONS else UNKNOWN


def reason_for_server(expression: Expression) -> str | None:
    """Why PostgreSQL must evaluate `expression`, outermost reason first; None if Spark is exact."""
    if isinstance(expression, NullTest) and isinstance(expression.argument, Column):
        return None  # whether a value is NULL does not depend on its type
    reason = _own_reason(expression)
    if reason is not None:
        return reason
    return next((found for child in children(expression) if (found := reason_for_server(child))), None)


def _own_reason(expression: Expression) -> str | None:
    match expression:
        case Operator(oid, collation, arguments):
            return _objection(operator_rule(oid), arguments, collation, _operator_name(oid))
        case Distinct(oid, collation, arguments) | NullIf(oid, collation, arguments):
            return _equality_reason(oid, collation, arguments)
        case ArrayComparison():
            return _array_reason(expression)
        case Function(oid, arguments):
            return _objection(function_rule(oid), arguments, 0, f"function {FUNCTIONS.get(oid, (oid,))[0]}")
        case _:
            return _leaf_reason(expression)


def _leaf_reason(expression: Expression) -> str | None:
    match expression:
        case Column(type_oid=type_oid) | Constant(type_oid=type_oid):
            return None if type_oid in SPARK_TYPES else f"type oid {type_oid}: {UNKNOWN.because}"
        case Relabel(source_type=source, type_oid=target):
            return None if (source, target) in RELABELS else f"a cast between types: {UNKNOWN.because}"
        case Unmodelled(what):
            return f"{what}: {UNKNOWN.because}"
        case Array():
            return f"an array by itself: {UNKNOWN.because}"
        case Bool() | NullTest() | TruthTest() | Collate() | Coalesce() | Case():
            return None
        case _:
            return UNKNOWN.because


def _objection(rule: Rule, arguments: tuple[Expression, ...], collation: int, name: str) -> str | None:
    if isinstance(rule, OnServer):
        return f"{name}: {rule.because}"
    objection = None if rule.unless is None else rule.unless(arguments, collation)
    return objection and f"{name}: {objection}"


def _operator_name(oid: int) -> str:
    if oid not in OPERATORS:
        return f"operator with oid {oid}"
    symbol, *types = OPERATORS[oid]
    return f"{symbol} ({', '.join(types)})"


def _equality_reason(oid: int, collation: int, arguments: tuple[Expression, ...]) -> str | None:
    if oid in OPERATORS and OPERATORS[oid][0] != "=":
        return UNKNOWN.because
    return _objection(operator_rule(oid), arguments, collation, _operator_name(oid))


def _array_reason(comparison: ArrayComparison) -> str | None:
    """Exact are `= ANY` and `<> ALL` over the listed elements, where Spark compares them as they are."""
    symbol = OPERATORS.get(comparison.operator, ("",))[0]
    rule = operator_rule(comparison.operator)
    if not isinstance(comparison.array, Array) or (symbol, comparison.is_any) not in _LISTS:
        return f"{_operator_name(comparison.operator)} with ANY or ALL: {UNKNOWN.because}"
    if isinstance(rule, Exact) and rule.build not in _EQUALITY.values():
        return f"{_operator_name(comparison.operator)} with ANY or ALL: {UNKNOWN.because}"
    objections = (
        _objection(
            rule, (comparison.left, element), comparison.collation, _operator_name(comparison.operator)
        )
        for element in comparison.array.elements
    )
    return next((objection for objection in objections if objection), None)


_LISTS: Final = frozenset({("=", True), ("<>", False)})
"""(operator, is ANY) of IN and NOT IN."""
