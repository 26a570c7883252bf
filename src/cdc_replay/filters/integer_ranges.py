"""The range of integers that an expression can have, which shows whether it can overflow.

PostgreSQL raises an error if the result of integer arithmetic does not fit its type. An operation is safe if
its result fits for all values that its arguments can have: those of their types, or fewer if they are
constants or computed (`integer::bigint * 100`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from cdc_replay.filters.expression import Column, Constant, Expression, Function, Operator, Type
from cdc_replay.filters.operators import FUNCTIONS, OPERATORS, Signature


@dataclass(frozen=True, slots=True)
class Range:
    """The integers from `lowest` to `highest`."""

    lowest: int
    highest: int

    def __contains__(self, other: Range) -> bool:
        return self.lowest <= other.lowest and other.highest <= self.highest

    def within(self, other: Range) -> Range:
        """The intersection with `other`, which must not be empty."""
        return Range(max(self.lowest, other.lowest), min(self.highest, other.highest))


_OF_TYPE: Final[Mapping[str, Range]] = {
    "int2": Range(-(1 << 15), (1 << 15) - 1),
    "int4": Range(-(1 << 31), (1 << 31) - 1),
    "int8": Range(-(1 << 63), (1 << 63) - 1),
    "oid": Range(0, (1 << 32) - 1),
}


def range_of(expression: Expression) -> Range | None:
    """The values that the expression can have; None if it is not known to be an integer."""
    match expression:
        case Column(type_oid=type_oid):
            return _OF_TYPE.get(_type_name(type_oid))
        case Constant(type_oid, int(value)) if _type_name(type_oid) in _OF_TYPE:
            return Range(value, value)
        case Operator() | Function():
            combine, fitting = _computed_range(expression), _OF_TYPE.get(_result_type(_signature(expression)))
            return combine if combine is None or fitting is None else combine.within(fitting)
        case _:
            return None


def cannot_overflow(expression: Expression) -> bool:
    """Whether the result of integer arithmetic, or of a cast, fits its type for all values."""
    if not isinstance(expression, Operator | Function):
        return False
    combine = _computed_range(expression)
    return combine is not None and combine in _OF_TYPE[_result_type(_signature(expression))]


def _signature(expression: Operator | Function) -> Signature:
    if isinstance(expression, Operator):
        return OPERATORS.get(expression.operator, ("",))
    return FUNCTIONS.get(expression.function, ("",))


def _type_name(type_oid: int) -> str:
    return Type(type_oid).sql_name if type_oid in set(Type) else ""


def _result_type(signature: Signature) -> str:
    name, *types = signature
    if name in _OF_TYPE:
        return name  # a cast
    return max(types, key=_WIDTH.index) if types and set(types) <= set(_WIDTH) else ""


_WIDTH: Final = ("int2", "int4", "int8")


def _computed_range(expression: Operator | Function) -> Range | None:
    """The result's range before it is fitted into its type."""
    name, *types = _signature(expression)
    if not types or not set(types) <= set(_OF_TYPE):
        return None
    ranges = [
        range_of(argument) or _OF_TYPE[kind]
        for kind, argument in zip(types, expression.arguments, strict=True)
    ]
    if name in _OF_TYPE:
        return ranges[0]
    if len(ranges) == 1:
        return Range(-ranges[0].highest, -ranges[0].lowest) if name == "-" else None
    compute = _ARITHMETIC.get(name)
    return None if compute is None else compute(*ranges)


def _corners(compute: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    """For operations that are monotonic in both arguments: their extremes are at the arguments' extremes."""

    def combine(left: Range, right: Range) -> Range:
        corners = list(
            itertools.starmap(
                compute, itertools.product((left.lowest, left.highest), (right.lowest, right.highest))
            )
        )
        return Range(min(corners), max(corners))

    return combine


def _quotient(left: Range, right: Range) -> Range | None:
    if right.lowest <= 0 <= right.highest:
        return None
    return _corners(_divide)(left, right)


def _divide(left: int, right: int) -> int:
    magnitude = abs(left) // abs(right)
    return magnitude if (left < 0) == (right < 0) else -magnitude


def _remainder(left: Range, right: Range) -> Range:
    bound = max(abs(right.lowest), abs(right.highest), 1) - 1
    return Range(-min(bound, max(-left.lowest, 0)), min(bound, max(left.highest, 0)))


_ARITHMETIC: Final[Mapping[str, Callable[[Range, Range], Range | None]]] = {
    "+": _corners(operator.add),
    "-": _corners(operator.sub),
    "*": _corners(operator.mul),
    "/": _quotient,
    "%": _remainder,
    "mod": _remainder,
}
