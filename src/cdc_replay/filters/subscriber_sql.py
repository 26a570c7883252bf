"""An exact filter → SQL for another server than the publisher: the subscriber.

What is executed there is written here, node by node, from the parsed tree, with names of PostgreSQL's own
objects by their oids. No text of a publication, a change log or a state table is executed. What has no form
here is `NotPrintableError`; the caller does without the filter.

Columns are named and not cast: whether the subscriber's column holds the same values is the caller's to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from psycopg import sql

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
    Function,
    NullTest,
    Operator,
    Relabel,
    TruthTest,
    Type,
)
from cdc_replay.filters.operators import FUNCTIONS, OPERATORS

_COLLATIONS: Final[Mapping[int, str]] = {100: "default", 950: "C", 951: "POSIX"}
_CALLED: Final = frozenset({"mod", "starts_with"})


class NotPrintableError(Exception):
    """A part of the filter has no form here."""


def filter_sql(compiled: SparkFilter, names: Mapping[int, str]) -> sql.Composed:
    """The filter as an expression that is true for the rows that pass; `names` are the columns by attnum.

    Raises:
        NotPrintableError: if a part of it has no form.
    """
    return sql.SQL("({} is true)").format(_Printer(names).print(compiled.expression))


class _Printer:
    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names

    def print(self, expression: Expression) -> sql.Composable:
        match expression:
            case Column(attnum=attnum):
                return sql.Identifier(self._names[attnum])
            case Constant(type_oid, value):
                return _constant(type_oid, value)
            case NullTest() | TruthTest() | Bool():
                return self._logic(expression)
            case Coalesce() | Case():
                return self._choice(expression)
            case _:
                return self._operation(expression)

    def _logic(self, expression: NullTest | TruthTest | Bool) -> sql.Composed:
        match expression:
            case NullTest(argument, negated):
                test = "({} is not null)" if negated else "({} is null)"
                return sql.SQL(test).format(self.print(argument))
            case TruthTest(argument, truth):
                words = sql.SQL(truth.name.lower().replace("_", " "))
                return sql.SQL("({} is {})").format(self.print(argument), words)
            case Bool(BoolOp.NOT, arguments):
                return sql.SQL("(not {})").format(self.print(arguments[0]))
            case Bool(operation, arguments):
                parts = sql.SQL(" and " if operation is BoolOp.AND else " or ").join(
                    map(self.print, arguments)
                )
                return sql.SQL("({})").format(parts)

    def _choice(self, expression: Coalesce | Case) -> sql.Composed:
        match expression:
            case Coalesce(arguments):
                return sql.SQL("coalesce({})").format(self._list(arguments))
            case Case(branches, otherwise):
                parts = (
                    sql.SQL("when {} then {}").format(self.print(condition), self.print(result))
                    for condition, result in branches
                )
                return sql.SQL("(case {} else {} end)").format(
                    sql.SQL(" ").join(parts), self.print(otherwise)
                )

    def _operation(self, expression: Expression) -> sql.Composable:
        match expression:
            case Operator(oid, _, (argument,)):
                return sql.SQL("({} {})").format(_operator(oid), self.print(argument))
            case Operator(oid, collation, (left, right)):
                return sql.SQL("({} {} {})").format(
                    self._collated(left, collation), _operator(oid), self.print(right)
                )
            case Distinct(_, collation, (left, right)):
                return sql.SQL("({} is distinct from {})").format(
                    self._collated(left, collation), self.print(right)
                )
            case ArrayComparison(array=Array(elements)) as comparison:
                return self._compared_with_each(comparison, elements)
            case _:
                return self._conversion(expression)

    def _conversion(self, expression: Expression) -> sql.Composable:
        match expression:
            case Function(oid, arguments):
                return self._function(oid, arguments)
            case Relabel(argument=argument, type_oid=type_oid):
                return _cast(self.print(argument), type_oid)
            case Collate(argument):
                return self.print(argument)
            case _:
                raise NotPrintableError(f"{type(expression).__name__} has no form there")

    def _compared_with_each(
        self, comparison: ArrayComparison, elements: tuple[Expression, ...]
    ) -> sql.Composable:
        if not elements:
            return sql.SQL("false" if comparison.is_any else "true")
        return sql.SQL("({} {} {} (array[{}]))").format(
            self._collated(comparison.left, comparison.collation),
            _operator(comparison.operator),
            sql.SQL("any" if comparison.is_any else "all"),
            self._list(elements),
        )

    def _function(self, oid: int, arguments: tuple[Expression, ...]) -> sql.Composable:
        name = FUNCTIONS[oid][0] if oid in FUNCTIONS else ""
        if name in _CALLED:
            return sql.SQL("{}({})").format(sql.Identifier("pg_catalog", name), self._list(arguments))
        types = {each.sql_name: each for each in Type}
        if name in types and len(arguments) == 1:
            return _cast(self.print(arguments[0]), types[name])
        raise NotPrintableError(f"function {oid} has no form there")

    def _collated(self, argument: Expression, collation: int) -> sql.Composable:
        printed = self.print(argument)
        if not collation:
            return printed
        if collation not in _COLLATIONS:
            raise NotPrintableError(f"collation {collation} has no form there")
        return sql.SQL("({} collate {})").format(
            printed, sql.Identifier("pg_catalog", _COLLATIONS[collation])
        )

    def _list(self, expressions: Iterable[Expression]) -> sql.Composed:
        return sql.SQL(", ").join(map(self.print, expressions))


def _operator(oid: int) -> sql.Composable:
    if oid not in OPERATORS:
        raise NotPrintableError(f"operator {oid} has no form there")
    # From our own table, never from a server.
    return sql.SQL("operator(pg_catalog.{})").format(sql.SQL(OPERATORS[oid][0]))


def _constant(type_oid: int, value: bool | float | str | None) -> sql.Composed:
    text = None if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return _cast(sql.Literal(text), type_oid)


def _cast(value: sql.Composable, type_oid: int) -> sql.Composed:
    try:
        name = Type(type_oid).sql_name
    except ValueError:
        raise NotPrintableError(f"type {type_oid} has no form there") from None
    brackets = sql.SQL("[]" if name.endswith("[]") else "")
    return sql.SQL("({}::{}{})").format(
        value, sql.Identifier("pg_catalog", name.removesuffix("[]")), brackets
    )
