"""Why PostgreSQL must evaluate an expression: the first of its parts that has no exact rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from cdc_replay.filters.expression import (
    Array,
    ArrayComparison,
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
    Unmodelled,
    children,
    walk,
)
from cdc_replay.filters.operators import FUNCTIONS, OPERATORS
from cdc_replay.filters.rules import (
    ARRAYS,
    RELABELS,
    TEXT_TYPES,
    UNKNOWN,
    OnServer,
    Rule,
    function_rule,
    operator_rule,
    text_order_differs,
)
from cdc_replay.filters.sortable_forms import FORMS

MAX_NODES: Final = 10_000
"""Arrow computes a larger expression, kernel by kernel, longer than PostgreSQL evaluates it for many rows."""


def unsupported_reason(expression: Expression) -> str | None:
    """Why PostgreSQL must evaluate `expression`, outermost reason first; None if Arrow is exact."""
    if sum(1 for _ in walk(expression)) > MAX_NODES:
        return "it is too large to be computed kernel by kernel"
    return _first_reason(expression)


def _first_reason(expression: Expression) -> str | None:
    if isinstance(expression, NullTest) and isinstance(expression.argument, Column):
        return None  # whether a value is NULL does not depend on its type
    reason = _own_reason(expression)
    if reason is not None:
        return reason
    return next(filter(None, map(_first_reason, children(expression))), None)


def _own_reason(expression: Expression) -> str | None:
    match expression:
        case Operator(oid, collation, arguments):
            return _objection(operator_rule(oid), expression, arguments, collation, _operator_name(oid))
        case Distinct(oid, collation, arguments) | NullIf(oid, collation, arguments):
            return _equality_reason(expression, oid, arguments, collation)
        case ArrayComparison():
            return next(_array_reasons(expression), None)
        case Function(oid, arguments):
            # No exact function depends on which collation it is, as long as it is a built-in one.
            return _objection(function_rule(oid), expression, arguments, _DEFAULT, _function_name(oid))
        case Extreme(type_oid=type_oid, collation=collation, arguments=arguments):
            return text_order_differs(expression, arguments, collation) if type_oid in TEXT_TYPES else None
        case _:
            return _leaf_reason(expression)


def _leaf_reason(expression: Expression) -> str | None:
    match expression:
        case Column(type_oid=type_oid) | Constant(type_oid=type_oid):
            subject = "" if type_oid in FORMS else _NAMES.get(type_oid, f"type oid {type_oid}")
        case Relabel(source_type=source, type_oid=target):
            subject = "" if (source, target) in RELABELS else "a cast between types"
        case Unmodelled(subject):
            pass
        case Array():
            subject = "an array outside of ANY or ALL"
        case _:
            subject = ""
    return f"{subject}: {UNKNOWN.because}" if subject else None


_DEFAULT: Final = 100


def _objection(
    rule: Rule, expression: Expression, arguments: tuple[Expression, ...], collation: int, name: str
) -> str | None:
    if isinstance(rule, OnServer):
        return f"{name}: {rule.because}"
    objection = None if rule.unless is None else rule.unless(expression, arguments, collation)
    return objection and f"{name}: {objection}"


def _equality_reason(
    expression: Expression, oid: int, arguments: tuple[Expression, ...], collation: int
) -> str | None:
    if oid in OPERATORS and OPERATORS[oid][0] != "=":
        return UNKNOWN.because
    return _objection(operator_rule(oid), expression, arguments, collation, _operator_name(oid))


def _array_reasons(comparison: ArrayComparison) -> Iterator[str]:
    """The objections to the comparisons with each element."""
    name = _operator_name(comparison.operator)
    if not isinstance(comparison.array, Array):
        yield f"{name} with ANY or ALL of an array that is not listed: {ARRAYS.because}"
        return
    rule = operator_rule(comparison.operator)
    # An empty list still needs a rule.
    for element in comparison.array.elements or (Constant(0, None),):
        arguments = (comparison.left, element)
        reason = _objection(rule, comparison, arguments, comparison.collation, name)
        if reason is not None:
            yield reason


def _operator_name(oid: int) -> str:
    if oid not in OPERATORS:
        return f"operator with oid {oid}"
    symbol, *types = OPERATORS[oid]
    return f"{symbol} ({', '.join(types)})"


def _function_name(oid: int) -> str:
    return f"function {FUNCTIONS[oid][0] if oid in FUNCTIONS else f'with oid {oid}'}"


_NAMES: Final[Mapping[int, str]] = {
    18: "char",
    19: "name",
    114: "json",
    142: "xml",
    650: "cidr",
    790: "money",
    869: "inet",
    1186: "interval",
    1266: "timetz",
    1560: "bit",
    1562: "varbit",
    3802: "jsonb",
}
"""Names of types without a form, for the reason."""
