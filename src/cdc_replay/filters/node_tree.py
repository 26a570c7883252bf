"""Stored node trees (`pg_publication_rel.prqual`, 15 to 18) → `Expression`.

The nodes that are known by name are translated; every other one, and whatever is nested too deeply to be
worth translating, becomes `Unmodelled`. What is only another way of writing is translated to what it means:
CASE with an operand, the comparison of rows, `ROW(…) IS NULL`. Fields come and go with the versions; only
those that matter are asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from cdc_replay.filters.datum import decode_datum
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
    Type,
    Unmodelled,
    walk,
)
from cdc_replay.filters.node_text import Node, attnums_in, datum_of, malformed, read_node, result_type
from cdc_replay.filters.operators import OPERATOR_OIDS, OPERATORS

_INT4_OF_INT2: Final = 313

MAX_DEPTH: Final = 60
"""Deeper trees are not translated: translation and evaluation recurse."""


def parse(text: str) -> Expression:
    """The filter that the stored tree `text` means.

    Raises:
        InvalidFilter: if `text` is not a node tree.
    """
    try:
        return _translate(read_node(text), _Place())
    except (ValueError, LookupError) as error:
        raise malformed(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a node stands: how deep, and in the conditions of a CASE with which operand."""

    depth: int = 0
    operand: Expression | None = None


def _translate(node: Node, place: _Place) -> Expression:
    builder = _BUILDERS.get(node.name)
    if place.depth > MAX_DEPTH:
        return Unmodelled("an expression nested too deeply", attnums_in(node))
    if builder is None:
        return Unmodelled(f"expression node {node.name}", attnums_in(node))
    return builder(node, dataclasses.replace(place, depth=place.depth + 1))


def _arguments(node: Node, place: _Place, name: str = "args") -> tuple[Expression, ...]:
    return tuple(_translate(each, place) for each in node.nodes(name))


def _column(node: Node, _place: _Place) -> Expression:
    return Column(node.number("varattno"), node.number("vartype"), node.number("varcollid"))


def _constant(node: Node, _place: _Place) -> Expression:
    type_oid = node.number("consttype")
    if node.flag("constisnull"):
        return Constant(type_oid, None)
    decoded = decode_datum(type_oid, datum_of(node))
    return decoded or Unmodelled(f"a constant of {_type_name(type_oid)} that is not understood", frozenset())


def _operator(node: Node, place: _Place) -> Expression:
    return Operator(node.number("opno"), node.number("inputcollid"), _arguments(node, place))


def _distinct(node: Node, place: _Place) -> Expression:
    return Distinct(node.number("opno"), node.number("inputcollid"), _arguments(node, place))


def _null_if(node: Node, place: _Place) -> Expression:
    return NullIf(node.number("opno"), node.number("inputcollid"), _arguments(node, place))


def _array_comparison(node: Node, place: _Place) -> Expression:
    left, array = _arguments(node, place)
    is_any = node.flag("useOr")
    return ArrayComparison(node.number("opno"), node.number("inputcollid"), is_any, left, array)


def _array(node: Node, place: _Place) -> Expression:
    if node.flag("multidims"):
        return Unmodelled("an array of several dimensions", attnums_in(node))
    return Array(_arguments(node, place, "elements"))


def _function(node: Node, place: _Place) -> Expression:
    if node.number("funcid") == _INT4_OF_INT2 and node.number("funcresulttype") != Type.INT4:
        # The cast to oid is the same function: its result has no sign then.
        return Unmodelled("a smallint as an oid", attnums_in(node))
    return Function(node.number("funcid"), _arguments(node, place))


def _bool(node: Node, place: _Place) -> Expression:
    return Bool(BoolOp(node.token("boolop")), _arguments(node, place))


def _null_test(node: Node, place: _Place) -> Expression:
    negated = node.number("nulltesttype") == 1
    argument = node.node("arg")
    if not node.flag("argisrow"):
        return NullTest(_translate(argument, place), negated)
    if argument.name != "ROWEXPR":
        return Unmodelled("a NULL test of a row", attnums_in(node))
    # True if it is true of every field, for IS NOT NULL too.
    fields = tuple(NullTest(field, negated) for field in _arguments(argument, place))
    return Bool(BoolOp.AND, fields) if fields else Constant(Type.BOOL, True)


def _truth_test(node: Node, place: _Place) -> Expression:
    return TruthTest(_translate(node.node("arg"), place), Truth(node.number("booltesttype")))


def _relabel(node: Node, place: _Place) -> Expression:
    argument = node.node("arg")
    source = result_type(argument)
    if source is None:
        return Unmodelled("a cast of an expression", attnums_in(node))
    return Relabel(_translate(argument, place), source, node.number("resulttype"))


def _collate(node: Node, place: _Place) -> Expression:
    return Collate(_translate(node.node("arg"), place))


def _coalesce(node: Node, place: _Place) -> Expression:
    return Coalesce(_arguments(node, place))


def _extreme(node: Node, place: _Place) -> Expression:
    is_greatest = node.number("op") == 0
    return Extreme(
        is_greatest, node.number("minmaxtype"), node.number("inputcollid"), _arguments(node, place)
    )


def _case(node: Node, place: _Place) -> Expression:
    operand = node.one("arg")
    own = _translate(operand, place) if isinstance(operand, Node) else None
    if own is not None and _repeats(own):
        return Unmodelled("CASE with an operand that is a CASE", attnums_in(node))
    conditions = dataclasses.replace(place, operand=own)
    branches = tuple(
        (_translate(when.node("expr"), conditions), _translate(when.node("result"), place))
        for when in node.nodes("args")
    )
    return Case(branches, _translate(node.node("defresult"), place))


def _repeats(expression: Expression) -> bool:
    """Whether a part of the expression stands in it more than once: nested, that would double and double."""
    return any(isinstance(node, Case) for node in walk(expression))


def _case_operand(node: Node, place: _Place) -> Expression:
    return place.operand or Unmodelled(f"expression node {node.name}", frozenset())


def _row_comparison(node: Node, place: _Place) -> Expression:
    """The first fields that differ decide, or are NULL; the last ones by the operator itself.

    `(a, b) <= (c, d)` is: if a = c, then b <= d, else a < c.
    """
    operators, collations = node.oids("opnos"), node.oids("inputcollids")
    lefts, rights = _arguments(node, place, "largs"), _arguments(node, place, "rargs")
    pairs = tuple(zip(lefts, rights, strict=True))
    if any(_repeats(each) for each in (*lefts, *rights)):
        return Unmodelled("a comparison of rows that hold a CASE", attnums_in(node))
    result: Expression = Operator(operators[-1], collations[-1], pairs[-1])
    for operator, collation, pair in zip(operators[-2::-1], collations[-2::-1], pairs[-2::-1], strict=True):
        symbol, *types = OPERATORS.get(operator, ("",))
        equal, decisive = (OPERATOR_OIDS.get((each, *types)) for each in ("=", symbol.rstrip("=")))
        if equal is None or decisive is None:
            return Unmodelled("a comparison of rows", attnums_in(node))
        branch = (Operator(equal, collation, pair), result)
        result = Case((branch,), Operator(decisive, collation, pair))
    return result


_BUILDERS: Final[Mapping[str, Callable[[Node, _Place], Expression]]] = {
    "VAR": _column,
    "CONST": _constant,
    "OPEXPR": _operator,
    "DISTINCTEXPR": _distinct,
    "NULLIFEXPR": _null_if,
    "SCALARARRAYOPEXPR": _array_comparison,
    "ARRAYEXPR": _array,
    "FUNCEXPR": _function,
    "BOOLEXPR": _bool,
    "NULLTEST": _null_test,
    "BOOLEANTEST": _truth_test,
    "RELABELTYPE": _relabel,
    "COLLATEEXPR": _collate,
    "COALESCEEXPR": _coalesce,
    "CASEEXPR": _case,
    "CASETESTEXPR": _case_operand,
    "MINMAXEXPR": _extreme,
    "ROWCOMPAREEXPR": _row_comparison,
}


def _type_name(type_oid: int) -> str:
    known = {member.value: member.sql_name for member in Type}
    return known.get(type_oid, f"the type with oid {type_oid}")
