"""Evaluates casts of constants: a compiled `n > 10::numeric(5,2)` has no cast.

PostgreSQL evaluates such a cast once, when it plans the filter (R3.8). A cast that fails or is not understood
stays, and has no exact rule.
"""

from __future__ import annotations

import dataclasses
import decimal
import math
import struct
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Final, TypeAlias

from cdc_replay.filters.expression import (
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
    Extreme,
    Function,
    NullIf,
    NullTest,
    Operator,
    Relabel,
    TruthTest,
    Type,
    Unmodelled,
)

Value: TypeAlias = bool | int | float | str
Fold: TypeAlias = Callable[..., Value | None]


def fold_constants(expression: Expression) -> Expression:
    """The expression without casts of constants."""
    match expression:
        case Column() | Constant() | Unmodelled():
            return expression
        case Relabel(argument, source, target):
            return _relabel(fold_constants(argument), source, target)
        case Function(function, arguments):
            return _call(function, _fold_all(arguments))
        case _:
            return _fold_children(expression)


def _fold_children(expression: Expression) -> Expression:
    match expression:
        case NullTest() | TruthTest() | Collate():
            return dataclasses.replace(expression, argument=fold_constants(expression.argument))
        case ArrayComparison(left=left, array=array):
            return dataclasses.replace(expression, left=fold_constants(left), array=fold_constants(array))
        case Array(elements):
            return Array(_fold_all(elements))
        case Case(branches, otherwise):
            pairs = tuple((fold_constants(when), fold_constants(then)) for when, then in branches)
            return Case(pairs, fold_constants(otherwise))
        case Bool() | Coalesce() | Distinct() | Extreme() | NullIf() | Operator():
            return dataclasses.replace(expression, arguments=_fold_all(expression.arguments))
        case _:
            return expression


def _fold_all(expressions: tuple[Expression, ...]) -> tuple[Expression, ...]:
    return tuple(map(fold_constants, expressions))


def _relabel(argument: Expression, source: int, target: int) -> Expression:
    if isinstance(argument, Constant) and (source, target) in _RELABELLED:
        return Constant(target, argument.value)
    return Relabel(argument, source, target)


_RELABELLED: Final = frozenset(
    {
        (Type.VARCHAR, Type.TEXT),
        (Type.TEXT, Type.VARCHAR),
        (Type.VARCHAR, Type.BPCHAR),
        (Type.TEXT, Type.BPCHAR),
    }
)


def _call(function: int, arguments: tuple[Expression, ...]) -> Expression:
    call = Function(function, arguments)
    if function not in FOLDS:
        return call
    target, fold = FOLDS[function]
    values = [argument.value for argument in arguments if isinstance(argument, Constant)]
    if len(values) < len(arguments):
        return call
    if None in values:
        return Constant(target, None)  # all of these functions are strict
    value = fold(*values)
    return call if value is None else Constant(target, value)


# ---- the functions


def _fit(bits: int) -> Fold:
    def fold(literal: int) -> int | None:
        return literal if -(1 << bits - 1) <= literal < 1 << bits - 1 else None

    return fold


def _same(value: Value) -> Value:
    return value


def _float8(literal: int | str) -> float | None:
    """The nearest double; overflow and underflow are errors in PostgreSQL."""
    value = float(literal)
    is_lost = (math.isinf(value) and "Inf" not in str(literal)) or (value == 0 and Decimal(literal) != 0)
    return None if is_lost else value


def _float4(literal: int | str) -> float | None:
    """The nearest float, if the number is exactly a double: else it would be rounded twice."""
    double = _float8(literal)
    if double is None or not math.isfinite(double) or Decimal(double) != Decimal(literal):
        return None
    try:
        (value,) = struct.unpack("<f", struct.pack("<f", double))
    except OverflowError:
        return None
    return None if value == 0 and double != 0 else float(value)


_TYPMOD_OFFSET: Final = 4  # VARHDRSZ
_SCALE_BITS: Final = 11
_WIDE_CONTEXT: Final = decimal.Context(prec=2000, rounding=decimal.ROUND_HALF_UP)


def _numeric(literal: str, typmod: int) -> str | None:
    """The number rounded to the scale of numeric(precision, scale), half away from zero."""
    precision, scale = (typmod - _TYPMOD_OFFSET) >> 16 & 0xFFFF, (typmod - _TYPMOD_OFFSET) & 0x7FF
    scale = (scale ^ 1 << _SCALE_BITS - 1) - (1 << _SCALE_BITS - 1)
    value = Decimal(literal)
    if typmod < _TYPMOD_OFFSET or not value.is_finite() or len(literal) > precision + 500:
        return None
    rounded = value.quantize(Decimal(1).scaleb(-scale), context=_WIDE_CONTEXT)
    if abs(rounded) >= Decimal(10) ** (precision - scale):
        return None
    return f"{abs(rounded) if rounded == 0 else rounded:f}"


def _bpchar(text: str, typmod: int, is_explicit: object) -> str | None:
    cut = _varchar(text, typmod, is_explicit)
    return None if cut is None else cut.ljust(typmod - _TYPMOD_OFFSET)


def _varchar(text: str, typmod: int, is_explicit: object) -> str | None:
    length = typmod - _TYPMOD_OFFSET
    if length < 1 or not text.isascii():
        return None
    return text[:length] if is_explicit is True or not text[length:].strip(" ") else None


FOLDS: Final[Mapping[int, tuple[Type, Fold]]] = {
    313: (Type.INT4, _same),
    754: (Type.INT8, _same),
    481: (Type.INT8, _same),
    314: (Type.INT2, _fit(16)),
    714: (Type.INT2, _fit(16)),
    480: (Type.INT4, _fit(32)),
    1782: (Type.NUMERIC, str),
    1740: (Type.NUMERIC, str),
    1781: (Type.NUMERIC, str),
    1746: (Type.FLOAT8, _float8),
    1745: (Type.FLOAT4, _float4),
    236: (Type.FLOAT4, _float4),
    318: (Type.FLOAT4, _float4),
    652: (Type.FLOAT4, _float4),
    235: (Type.FLOAT8, float),
    316: (Type.FLOAT8, float),
    482: (Type.FLOAT8, float),
    1703: (Type.NUMERIC, _numeric),
    668: (Type.BPCHAR, _bpchar),
    669: (Type.VARCHAR, _varchar),
}
"""`pg_proc.oid` of a cast → the type of its result, and its value for constants; None if it has none."""

LENGTH_CASTS: Final = frozenset({1703, 668, 669})
"""The casts to numeric(p, s), char(n) and varchar(n): their further arguments are printed with the type."""
