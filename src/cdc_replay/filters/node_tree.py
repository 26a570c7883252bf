"""Stored node trees (`pg_publication_rel.prqual`, 15 to 18) → `Expression`.

The nodes that are known by name are translated; every other one, and whatever is nested too deeply to be
worth translating, becomes `Unmodelled`. What is only another way of writing is translated to what it means:
CASE with an operand, the comparison of rows, `ROW(…) IS NULL`. Fields come and go with the versions; only
those that matter are asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
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
from cdc_replay.filters.node_text import Item, Node, malformed, read_node
from cdc_replay.filters.operators import OPERATOR_OIDS, OPERATORS

_INT4_OF_INT2: Final = 313

MAX_DEPTH: Final = 60
"""Trees deeper than any that a person writes are not translated: that recurses, and so does Spark."""


def parse(text: str) -> Expression:
    """The filter that the stored tree `text` means.

    Raises:
        InvalidFilter: if `text` is not a node tree.
    """
    return _translate(read_node(text), _Place())


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a node stands: how deep, and in the conditions of a CASE with which operand."""

    depth: int = 0
    operand: Expression | None = None


def _translate(node: Node, place: _Place) -> Expression:
    builder = _BUILDERS.get(node.name)
    if place.depth > MAX_DEPTH:
        return Unmodelled("an expression nested too deeply", _attnums(node))
    if builder is None:
        return Unmodelled(f"expression node {node.name}", _attnums(node))
    return builder(node, dataclasses.replace(place, depth=place.depth + 1))


def _attnums(node: Node) -> frozenset[int]:
    return frozenset(each.number("varattno") for each in _nodes_below(node) if each.name == "VAR")


def _nodes_below(node: Node) -> Iterator[Node]:
    todo: list[Item] = [node]
    while todo:
        item = todo.pop()
        if isinstance(item, Node):
            yield item
            todo.extend(value for values in item.fields.values() for value in values)
        elif isinstance(item, list):
            todo.extend(item)


def _arguments(node: Node, place: _Place, name: str = "args") -> tuple[Expression, ...]:
    return tuple(_translate(each, place) for each in node.nodes(name))


def _column(node: Node, _place: _Place) -> Expression:
    return Column(node.number("varattno"), node.number("vartype"), node.number("varcollid"))


def _constant(node: Node, _place: _Place) -> Expression:
    type_oid = node.number("consttype")
    if node.token("constisnull") == "true":
        return Constant(type_oid, None)
    decoded = decode_datum(type_oid, _datum(node))
    return decoded or Unmodelled(f"a constant of {_type_name(type_oid)} that is not understood", frozenset())


def _operator(node: Node, place: _Place) -> Expression:
    return Operator(node.number("opno"), node.number("inputcollid"), _arguments(node, place))


def _distinct(node: Node, place: _Place) -> Expression:
    return Distinct(node.number("opno"), node.number("inputcollid"), _arguments(node, place))


def _null_if(node: Node, place: _Place) -> Expression:
    return NullIf(node.number("opno"), node.number("inputcollid"), _arguments(node, place))


def _array_comparison(node: Node, place: _Place) -> Expression:
    left, array = _arguments(node, place)
    is_any = node.token("useOr") == "true"
    return ArrayComparison(node.number("opno"), node.number("inputcollid"), is_any, left, array)


def _array(node: Node, place: _Place) -> Expression:
    if node.token("multidims") == "true":
        return Unmodelled("an array of several dimensions", _attnums(node))
    return Array(_arguments(node, place, "elements"))


def _function(node: Node, place: _Place) -> Expression:
    if node.number("funcid") == _INT4_OF_INT2 and node.number("funcresulttype") != Type.INT4:
        # The cast to oid is the same function: its result has no sign then.
        return Unmodelled("a smallint as an oid", _attnums(node))
    return Function(node.number("funcid"), _arguments(node, place))


def _bool(node: Node, place: _Place) -> Expression:
    return Bool(BoolOp(node.token("boolop")), _arguments(node, place))


def _null_test(node: Node, place: _Place) -> Expression:
    negated = node.number("nulltesttype") == 1
    argument = node.node("arg")
    if node.token("argisrow") != "true":
        return NullTest(_translate(argument, place), negated)
    if argument.name != "ROWEXPR":
        return Unmodelled("a NULL test of a row", _attnums(node))
    # True if it is true of every field, for IS NOT NULL too.
    fields = tuple(NullTest(field, negated) for field in _arguments(argument, place))
    return Bool(BoolOp.AND, fields) if fields else Constant(Type.BOOL, True)


def _truth_test(node: Node, place: _Place) -> Expression:
    return TruthTest(_translate(node.node("arg"), place), Truth(node.number("booltesttype")))


def _relabel(node: Node, place: _Place) -> Expression:
    argument = node.node("arg")
    source = _result_type(argument)
    if source is None:
        return Unmodelled("a cast of an expression", _attnums(node))
    return Relabel(_translate(argument, place), source, node.number("resulttype"))


_RESULT_TYPES: Final[Mapping[str, str]] = {
    "VAR": "vartype",
    "CONST": "consttype",
    "FUNCEXPR": "funcresulttype",
    "OPEXPR": "opresulttype",
    "NULLIFEXPR": "opresulttype",
    "RELABELTYPE": "resulttype",
    "COALESCEEXPR": "coalescetype",
    "CASEEXPR": "casetype",
    "MINMAXEXPR": "minmaxtype",
    "CASETESTEXPR": "typeId",
}


def _result_type(node: Node) -> int | None:
    """The type of an expression's value, where the node says it."""
    if node.name == "COLLATEEXPR":
        return _result_type(node.node("arg"))
    name = _RESULT_TYPES.get(node.name)
    return None if name is None else node.number(name)


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
        return Unmodelled("CASE with an operand that is a CASE", _attnums(node))
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
    operators, collations = _oids(node, "opnos"), _oids(node, "inputcollids")
    lefts, rights = _arguments(node, place, "largs"), _arguments(node, place, "rargs")
    pairs = tuple(zip(lefts, rights, strict=True))
    if any(_repeats(each) for each in (*lefts, *rights)):
        return Unmodelled("a comparison of rows that hold a CASE", _attnums(node))
    result: Expression = Operator(operators[-1], collations[-1], pairs[-1])
    for operator, collation, pair in zip(operators[-2::-1], collations[-2::-1], pairs[-2::-1], strict=True):
        symbol, *types = OPERATORS.get(operator, ("",))
        equal, decisive = (OPERATOR_OIDS.get((each, *types)) for each in ("=", symbol.rstrip("=")))
        if equal is None or decisive is None:
            return Unmodelled("a comparison of rows", _attnums(node))
        branch = (Operator(equal, collation, pair), result)
        result = Case((branch,), Operator(decisive, collation, pair))
    return result


def _oids(node: Node, name: str) -> tuple[int, ...]:
    """A list of oids: `(o 96 521)`."""
    match node.one(name):
        case ["o", *words]:
            return tuple(int(word) for word in words if isinstance(word, str))
        case _:
            raise malformed(f"field {name} of node {node.name} is not a list of oids")


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


def _datum(node: Node) -> bytes:
    """The bytes of a constant: `length [ byte … ]`, eight of them where the type is passed by value."""
    match node.fields.get("constvalue"):
        case [str(), "[", *numbers, "]"]:
            return bytes(int(number) & 0xFF for number in numbers if isinstance(number, str))
        case _:
            raise malformed("a constant has no value")


def _type_name(type_oid: int) -> str:
    known = {member.value: member.sql_name for member in Type}
    return known.get(type_oid, f"the type with oid {type_oid}")
