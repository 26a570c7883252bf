"""An exact filter → Arrow's kernels, over the values that a worker has decoded anyway.

The same rules as for Spark's columns (`rules`), without the way of the rows into the JVM and back. What some
rule or form of the filter has for Spark only is left to Spark: `is_computable` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.filters import rules
from cdc_replay.filters import sortable_forms as values
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
    Function,
    NullIf,
    NullTest,
    Operator,
    Relabel,
    Truth,
    TruthTest,
    children,
)

Datum: TypeAlias = pa.Array | pa.Scalar


def is_computable(expression: Expression) -> bool:
    """Whether Arrow has all that an exact filter needs."""
    if isinstance(expression, NullTest) and isinstance(expression.argument, Column):
        return True
    return _kernel(expression) is not None and all(map(is_computable, children(expression)))


def filter_answers(expression: Expression, texts: Mapping[int, pa.StringArray], rows: int) -> pa.BooleanArray:
    """The answers of a filter that is computable to so many rows: TRUE, FALSE or NULL (R3.1).

    `texts` has PostgreSQL's text of each column that the filter reads, by attribute number, NULL for NULL.
    """
    found = _Computer(texts).compute(expression)
    return pa.repeat(found, rows) if isinstance(found, pa.Scalar) else found


def _kernel(expression: Expression) -> Callable[..., Datum] | None:
    """What computes the expression from its arguments, if Arrow can."""
    match expression:
        case Column() | Constant() | Relabel() | Collate():
            return _value_kernel(expression)
        case Function(function):
            return _compute(rules.function_rule(function))
        case Operator(oid) | Distinct(oid) | NullIf(oid) | ArrayComparison(oid, array=Array()):
            return _compute(rules.operator_rule(oid))
        case NullTest() | TruthTest() | Bool() | Coalesce() | Case():
            return _logic_kernel(expression)
        case _:
            return None


def _value_kernel(expression: Column | Constant | Relabel | Collate) -> Callable[..., Datum] | None:
    match expression:
        case Column(type_oid=type_oid):
            return values.FORMS[type_oid].of_array
        case Constant(type_oid, value):
            form = values.FORMS.get(type_oid)
            return None if form is None else functools.partial(_scalar, form, value)
        case Relabel(source_type=source, type_oid=target):
            return rules.RELABELS[source, target].compute
        case Collate():
            return rules.same_array


def _logic_kernel(expression: NullTest | TruthTest | Bool | Coalesce | Case) -> Callable[..., Datum]:
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
            kernel = _choice
    return kernel


def _compute(rule: rules.Rule) -> rules.Compute | None:
    return rule.compute if isinstance(rule, rules.Exact) else None


class _Computer:
    """The filter as Arrow computes it, three-valued."""

    def __init__(self, texts: Mapping[int, pa.StringArray]) -> None:
        self._texts = texts

    def compute(self, expression: Expression) -> Datum:
        kernel = _kernel(expression)
        if kernel is None:
            raise TypeError(expression)
        match expression:
            case Column(attnum=attnum):
                arguments = [self._texts[attnum]]
            case NullTest(Column(attnum=attnum)):
                # The text is NULL iff the value is, whatever its type.
                arguments = [self._texts[attnum]]
            case _:
                arguments = [self.compute(each) for each in children(expression)]
        match expression:
            case Distinct():
                return _distinct(kernel, *arguments)
            case NullIf():
                return _null_if(kernel, *arguments)
            case ArrayComparison(is_any=is_any):
                return _compared_with_each(kernel, is_any, *arguments)
            case _:
                return kernel(*arguments)


def _scalar(form: values.Form, value: values.Plain | None) -> pa.Scalar:
    return pa.scalar(None if value is None else form.of_constant(value), form.arrow_type)


def _choice(*arguments: Datum) -> Datum:
    """CASE: condition and result of each branch, one after the other, then what is otherwise."""
    *branches, found = arguments
    for condition, result in reversed(list(zip(branches[::2], branches[1::2], strict=True))):
        found = pc.if_else(_is_true(condition), result, found)
    return found


def _distinct(equal: Callable[..., Datum], left: Datum, right: Datum) -> Datum:
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    return pc.invert(pc.coalesce(equal(left, right), both_null))


def _null_if(equal: Callable[..., Datum], left: Datum, right: Datum) -> Datum:
    return pc.if_else(_is_true(equal(left, right)), pa.scalar(None, left.type), left)


def _compared_with_each(compare: Callable[..., Datum], is_any: bool, left: Datum, *elements: Datum) -> Datum:
    """ANY is an OR and ALL an AND of the comparisons with the elements; without any, even for NULL."""
    combine = pc.or_kleene if is_any else pc.and_kleene
    return functools.reduce(combine, (compare(left, each) for each in elements), pa.scalar(not is_any))


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
