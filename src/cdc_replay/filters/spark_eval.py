"""An exact filter → a Spark Column.

Reads a value from PostgreSQL's text and computes with the forms of `values`. The result is three-valued:
TRUE, FALSE or NULL as in PostgreSQL. Nothing here raises on PostgreSQL's own text, also where
Spark evaluates an expression for a row that the filter is not meant for: casts are `try_cast`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions as F

from cdc_replay.filters import rules
from cdc_replay.filters import sortable_forms as values
from cdc_replay.filters.compile import SparkFilter
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
)

ValueOf: TypeAlias = Callable[[str], SparkColumn]


def filter_column(compiled: SparkFilter, value_of: ValueOf) -> SparkColumn:
    """The filter as a boolean Column: TRUE, FALSE or NULL, as PostgreSQL answers (R3.1).

    `value_of` gives for a column's name its value: PostgreSQL's text, NULL for NULL.
    """
    names = {column.attnum: column.name for column in compiled.columns}
    return _Builder(lambda attnum: value_of(names[attnum])).build(compiled.expression)


class _Builder:
    def __init__(self, text_of: Callable[[int], SparkColumn]) -> None:
        self._text_of = text_of

    def build(self, expression: Expression) -> SparkColumn:
        """The expression, in the Spark type of its PostgreSQL type."""
        match expression:
            case Column() | Constant() | Relabel() | Collate():
                return self._value(expression)
            case NullTest() | TruthTest() | Bool():
                return self._logic(expression)
            case Coalesce() | Case() | Extreme():
                return self._choice(expression)
            case Operator() | Function() | Distinct() | NullIf() | ArrayComparison():
                return self._operation(expression)
            case _:
                raise TypeError(expression)

    def _value(self, expression: Column | Constant | Relabel | Collate) -> SparkColumn:
        match expression:
            case Column(attnum=attnum, type_oid=type_oid):
                return values.FORMS[type_oid].of_text(self._text_of(attnum))
            case Constant(type_oid, value):
                return _literal(values.FORMS[type_oid], value)
            case Relabel(argument, source, target):
                return rules.RELABELS[source, target].build(self.build(argument))
            case Collate(argument):
                return self.build(argument)

    def _all(self, expressions: Sequence[Expression]) -> list[SparkColumn]:
        return [self.build(each) for each in expressions]

    def _logic(self, expression: NullTest | TruthTest | Bool) -> SparkColumn:
        match expression:
            case NullTest(argument, negated):
                # The text is NULL iff the value is, whatever its type.
                tested = (
                    self._text_of(argument.attnum) if isinstance(argument, Column) else self.build(argument)
                )
                return tested.isNotNull() if negated else tested.isNull()
            case TruthTest(argument, truth):
                return _TRUTH_TESTS[truth](self.build(argument))
            case Bool(BoolOp.NOT, arguments):
                return ~self.build(arguments[0])
            case Bool(operation, arguments):
                return _balanced(
                    operator.and_ if operation is BoolOp.AND else operator.or_, self._all(arguments)
                )

    def _choice(self, expression: Coalesce | Case | Extreme) -> SparkColumn:
        match expression:
            case Coalesce(arguments):
                return F.coalesce(*self._all(arguments))
            case Case(branches, otherwise):
                return self._case(branches, otherwise)
            case Extreme(is_greatest=is_greatest, arguments=arguments):
                found = self._all(arguments)
                return found[0] if len(found) == 1 else (F.greatest if is_greatest else F.least)(*found)

    def _operation(
        self, expression: Operator | Function | Distinct | NullIf | ArrayComparison
    ) -> SparkColumn:
        match expression:
            case Operator(oid, _, arguments):
                return _exact(rules.operator_rule(oid)).build(*self._all(arguments))
            case Function(oid, arguments):
                return _exact(rules.function_rule(oid)).build(*self._all(arguments))
            case Distinct(oid, _, arguments):
                left, right = self._all(arguments)
                equal = _exact(rules.operator_rule(oid)).build(left, right)
                return ~F.coalesce(equal, left.isNull() & right.isNull())
            case NullIf(oid, _, arguments):
                left, right = self._all(arguments)
                equal = _exact(rules.operator_rule(oid)).build(left, right)
                return F.when(equal, F.lit(None)).otherwise(left)
            case ArrayComparison():
                return self._compared_with_each(expression)

    def _compared_with_each(self, comparison: ArrayComparison) -> SparkColumn:
        """ANY is an OR and ALL an AND of the comparisons with the elements; without any, even for NULL."""
        if not isinstance(comparison.array, Array):
            raise TypeError(comparison.array)
        elements = comparison.array.elements
        if not elements:
            return F.lit(not comparison.is_any)
        rule = _exact(rules.operator_rule(comparison.operator))
        left = self.build(comparison.left)
        if (rule.build, comparison.is_any) in _LISTS:
            # Plain values where possible: each Column costs several calls to the JVM, and lists are long.
            found = left.isin([self._plain(each) for each in elements])
            return found if comparison.is_any else ~found
        combine = operator.or_ if comparison.is_any else operator.and_
        return _balanced(combine, [rule.build(left, self.build(each)) for each in elements])

    def _plain(self, expression: Expression) -> values.Plain | SparkColumn:
        match expression:
            case Constant(type_oid, bool() | int() | float() | str() as value):
                return values.FORMS[type_oid].of_constant(value)
            case _:
                return self.build(expression)

    def _case(self, branches: Sequence[tuple[Expression, Expression]], otherwise: Expression) -> SparkColumn:
        (condition, result), *rest = ((self.build(when), self.build(then)) for when, then in branches)
        chain = F.when(condition, result)
        for condition, result in rest:
            chain = chain.when(condition, result)
        return chain.otherwise(self.build(otherwise))


_LISTS: Final = frozenset({(operator.eq, True), (operator.ne, False)})
"""(comparison, is ANY) of IN and NOT IN; the forms of both sides are compared as they are."""


def _literal(form: values.Form, value: values.Plain | None) -> SparkColumn:
    return F.lit(None).cast(form.spark_type) if value is None else F.lit(form.of_constant(value))


def _exact(rule: rules.Rule) -> rules.Exact:
    if not isinstance(rule, rules.Exact):
        raise TypeError(rule)
    return rule


def _is_true(value: SparkColumn) -> SparkColumn:
    return F.coalesce(value, F.lit(False))


_TRUTH_TESTS: Final[Mapping[Truth, Callable[[SparkColumn], SparkColumn]]] = {
    Truth.TRUE: _is_true,
    Truth.NOT_TRUE: lambda value: ~_is_true(value),
    Truth.FALSE: lambda value: _is_true(~value),
    Truth.NOT_FALSE: lambda value: ~_is_true(~value),
    Truth.UNKNOWN: lambda value: value.isNull(),
    Truth.NOT_UNKNOWN: lambda value: value.isNotNull(),
}


def _balanced(
    combine: Callable[[SparkColumn, SparkColumn], SparkColumn], parts: Sequence[SparkColumn]
) -> SparkColumn:
    """AND and OR of thousands of parts as a flat tree: Spark's analysis recurses."""
    if len(parts) <= 2:  # noqa: PLR2004 - one operator joins two
        return functools.reduce(combine, parts)
    half = len(parts) // 2
    return combine(_balanced(combine, parts[:half]), _balanced(combine, parts[half:]))
