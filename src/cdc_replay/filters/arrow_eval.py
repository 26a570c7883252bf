"""Evaluates an exact filter with Arrow's kernels, over the values that a worker has decoded.

The result is three-valued: TRUE, FALSE or NULL, as in PostgreSQL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.filters import rules
from cdc_replay.filters.expression import (
    Array,
    ArrayComparison,
    Bool,
    BoolOp,
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
    Truth,
    TruthTest,
    children,
)
from cdc_replay.filters.sortable_forms import FORMS, Datum, Plain

MAX_SHARED: Final = 64
"""Results, besides columns, are shared while there are fewer: each has as many values as there are rows."""


def evaluate_filter(
    expression: Expression,
    texts: Mapping[int, pa.StringArray],
    row_count: int,
    computed: dict[Expression, Datum] | None = None,
) -> pa.BooleanArray:
    """The answers of an exact filter to `row_count` rows: TRUE, FALSE or NULL (R3.1).

    `texts` has PostgreSQL's text of each column that the filter reads, by attribute number, NULL for NULL.
    `computed` has what other filters have computed of the same texts; what this one does is added.

    Raises:
        pa.ArrowInvalid: if a text is not one of its column's type.
    """
    result = _compute(expression, texts, {} if computed is None else computed)
    return pa.repeat(result, row_count) if isinstance(result, pa.Scalar) else result


def _compute(
    expression: Expression, texts: Mapping[int, pa.StringArray], computed: dict[Expression, Datum]
) -> Datum:
    if isinstance(expression, Constant):
        return _constant(expression.type_oid, expression.value)
    arguments = children(expression)
    if not all(isinstance(argument, Column | Constant) for argument in arguments):
        # Not shared: a hash of the expression would visit all of it, at each of its levels.
        return _kernel(expression)(*(_compute(argument, texts, computed) for argument in arguments))
    if (known := computed.get(expression)) is not None:
        return known
    result = _compute_of_columns(expression, texts, computed)
    # Computed texts can be wide; a column's own are there anyway.
    if isinstance(expression, Column) or (len(computed) < MAX_SHARED and pa.types.is_primitive(result.type)):
        computed[expression] = result
    return result


def _compute_of_columns(
    expression: Expression, texts: Mapping[int, pa.StringArray], computed: dict[Expression, Datum]
) -> Datum:
    match expression:
        case Column(attnum=attnum, type_oid=type_oid):
            return FORMS[type_oid].from_texts(texts[attnum])
        case NullTest(Column(attnum=attnum)):
            # The text is NULL iff the value is, whatever its type.
            return _kernel(expression)(texts[attnum])
        case _:
            return _kernel(expression)(*(_compute(child, texts, computed) for child in children(expression)))


@functools.lru_cache(maxsize=10_000)
def _constant(type_oid: int, value: Plain | None) -> pa.Scalar:
    return FORMS[type_oid].constant(value)


def _kernel(expression: Expression) -> Callable[..., Datum]:
    """The function that computes the expression from its arguments."""
    match expression:
        case Relabel(source_type=source, type_oid=target):
            return rules.RELABELS[source, target].compute
        case Function(function):
            return _exact(rules.function_rule(function))
        case Operator(oid) | Distinct(oid) | NullIf(oid) | ArrayComparison(oid, array=Array()):
            return _operator_kernel(expression, _exact(rules.operator_rule(oid)))
        case _:
            return _logic_kernel(expression)


def _operator_kernel(expression: Expression, operator: rules.Compute) -> Callable[..., Datum]:
    match expression:
        case Distinct():
            return functools.partial(_distinct, operator)
        case NullIf():
            return functools.partial(_null_if, operator)
        case ArrayComparison(is_any=is_any):
            return functools.partial(_compare_elements, operator, is_any)
        case _:
            return operator


def _logic_kernel(expression: Expression) -> Callable[..., Datum]:
    kernel: Callable[..., Datum]
    match expression:
        case NullTest(negated=negated):
            kernel = pc.is_valid if negated else pc.is_null
        case TruthTest(truth=truth):
            kernel = _TRUTH_TESTS[truth]
        case Bool(operation):
            kernel = _BOOLEAN[operation]
        case Coalesce():
            kernel = pc.coalesce
        case Case():
            kernel = _choose
        case Extreme(is_greatest=is_greatest):
            kernel = functools.partial(_extreme, pc.greater if is_greatest else pc.less)
        case Collate():
            kernel = rules.keep_form
        case _:
            raise TypeError(expression)
    return kernel


def _exact(rule: rules.Rule) -> rules.Compute:
    if not isinstance(rule, rules.Exact):
        raise TypeError(rule)
    return rule.compute


def _choose(*arguments: Datum) -> Datum:
    """CASE: condition and result of each branch in turn, then the ELSE."""
    *branches, result = arguments
    for condition, branch_result in reversed(list(zip(branches[::2], branches[1::2], strict=True))):
        result = pc.if_else(_is_true(condition), branch_result, result)
    return result


def _extreme(is_better: Callable[..., Datum], *arguments: Datum) -> Datum:
    """GREATEST and LEAST, which skip NULLs; equal values have one form, so that either may be taken."""
    return functools.reduce(
        lambda best, value: pc.coalesce(pc.if_else(is_better(value, best), value, best), best, value),
        arguments,
    )


def _distinct(equal: Callable[..., Datum], left: Datum, right: Datum) -> Datum:
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    return pc.invert(pc.coalesce(equal(left, right), both_null))


def _null_if(equal: Callable[..., Datum], left: Datum, right: Datum) -> Datum:
    return pc.if_else(_is_true(equal(left, right)), pa.scalar(None, left.type), left)


def _compare_elements(compare: Callable[..., Datum], is_any: bool, left: Datum, *elements: Datum) -> Datum:
    """ANY is an OR and ALL an AND of the comparisons; without elements FALSE and TRUE, also for NULL."""
    combine = pc.or_kleene if is_any else pc.and_kleene
    return functools.reduce(combine, (compare(left, element) for element in elements), pa.scalar(not is_any))


def _is_true(value: Datum) -> Datum:
    return pc.fill_null(value, False)


def _all(*values: Datum) -> Datum:
    return functools.reduce(pc.and_kleene, values)


def _any(*values: Datum) -> Datum:
    return functools.reduce(pc.or_kleene, values)


_BOOLEAN: Final[Mapping[BoolOp, Callable[..., Datum]]] = {
    BoolOp.AND: _all,
    BoolOp.OR: _any,
    BoolOp.NOT: pc.invert,
}
_TRUTH_TESTS: Final[Mapping[Truth, Callable[[Datum], Datum]]] = {
    Truth.TRUE: _is_true,
    Truth.NOT_TRUE: lambda value: pc.invert(_is_true(value)),
    Truth.FALSE: lambda value: _is_true(pc.invert(value)),
    Truth.NOT_FALSE: lambda value: pc.invert(_is_true(pc.invert(value))),
    Truth.UNKNOWN: pc.is_null,
    Truth.NOT_UNKNOWN: pc.is_valid,
}
