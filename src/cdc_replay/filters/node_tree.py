"""Stored node trees (`pg_publication_rel.prqual`, 15 to 18) → `Expression`.

Known nodes are translated; others, and those nested too deeply, become `Unmodelled`. CASE with an operand,
the comparison of rows and `ROW(…) IS NULL` are translated to what they abbreviate. Fields differ between
versions; only those that matter are read.
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
from cdc_replay.filters.node_text import Node, attnums_in, datum_of, malformed_tree, read_node, result_type
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
        return _translate(read_node(text), _Context())
    except (ValueError, LookupError) as error:
        raise malformed_tree(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Context:
    """A node's depth, and the operand of the CASE in whose conditions it is."""

    depth: int = 0
    operand: Expression | None = None


def _translate(node: Node, context: _Context) -> Expression:
    builder = _BUILDERS.get(node.name)
    if context.depth > MAX_DEPTH:
        return Unmodelled("an expression nested too deeply", attnums_in(node))
    if builder is None:
        return Unmodelled(f"expression node {node.name}", attnums_in(node))
    return builder(node, dataclasses.replace(context, depth=context.depth + 1))


def _arguments(node: Node, context: _Context, name: str = "args") -> tuple[Expression, ...]:
    return tuple(_translate(argument, context) for argument in node.nodes(name))


def _column(node: Node, _context: _Context) -> Expression:
    return Column(node.integer("varattno"), node.integer("vartype"), node.integer("varcollid"))


def _constant(node: Node, _context: _Context) -> Expression:
    type_oid = node.integer("consttype")
    if node.flag("constisnull"):
        return Constant(type_oid, None)
    decoded = decode_datum(type_oid, datum_of(node))
    return decoded or Unmodelled(f"a constant of {_type_name(type_oid)} that is not understood", frozenset())


def _operator(node: Node, context: _Context) -> Expression:
    return Operator(node.integer("opno"), node.integer("inputcollid"), _arguments(node, context))


def _distinct(node: Node, context: _Context) -> Expression:
    return Distinct(node.integer("opno"), node.integer("inputcollid"), _arguments(node, context))


def _null_if(node: Node, context: _Context) -> Expression:
    return NullIf(node.integer("opno"), node.integer("inputcollid"), _arguments(node, context))


def _array_comparison(node: Node, context: _Context) -> Expression:
    left, array = _arguments(node, context)
    is_any = node.flag("useOr")
    return ArrayComparison(node.integer("opno"), node.integer("inputcollid"), is_any, left, array)


def _array(node: Node, context: _Context) -> Expression:
    if node.flag("multidims"):
        return Unmodelled("an array of several dimensions", attnums_in(node))
    return Array(_arguments(node, context, "elements"))


def _function(node: Node, context: _Context) -> Expression:
    if node.integer("funcid") == _INT4_OF_INT2 and node.integer("funcresulttype") != Type.INT4:
        # The cast to oid is the same function, with an unsigned result.
        return Unmodelled("a smallint as an oid", attnums_in(node))
    return Function(node.integer("funcid"), _arguments(node, context))


def _bool(node: Node, context: _Context) -> Expression:
    return Bool(BoolOp(node.token("boolop")), _arguments(node, context))


def _null_test(node: Node, context: _Context) -> Expression:
    negated = node.integer("nulltesttype") == 1
    argument = node.node("arg")
    if not node.flag("argisrow"):
        return NullTest(_translate(argument, context), negated)
    if argument.name != "ROWEXPR":
        return Unmodelled("a NULL test of a row", attnums_in(node))
    # True if it is true for every field, also IS NOT NULL.
    fields = tuple(NullTest(field, negated) for field in _arguments(argument, context))
    return Bool(BoolOp.AND, fields) if fields else Constant(Type.BOOL, True)


def _truth_test(node: Node, context: _Context) -> Expression:
    return TruthTest(_translate(node.node("arg"), context), Truth(node.integer("booltesttype")))


def _relabel(node: Node, context: _Context) -> Expression:
    argument = node.node("arg")
    source = result_type(argument)
    if source is None:
        return Unmodelled("a cast of an expression", attnums_in(node))
    return Relabel(_translate(argument, context), source, node.integer("resulttype"))


def _collate(node: Node, context: _Context) -> Expression:
    return Collate(_translate(node.node("arg"), context))


def _coalesce(node: Node, context: _Context) -> Expression:
    return Coalesce(_arguments(node, context))


def _extreme(node: Node, context: _Context) -> Expression:
    is_greatest = node.integer("op") == 0
    return Extreme(
        is_greatest, node.integer("minmaxtype"), node.integer("inputcollid"), _arguments(node, context)
    )


def _case(node: Node, context: _Context) -> Expression:
    operand = node.single("arg")
    translated = _translate(operand, context) if isinstance(operand, Node) else None
    if translated is not None and _repeats(translated):
        return Unmodelled("CASE with an operand that is a CASE", attnums_in(node))
    conditions = dataclasses.replace(context, operand=translated)
    branches = tuple(
        (_translate(when.node("expr"), conditions), _translate(when.node("result"), context))
        for when in node.nodes("args")
    )
    return Case(branches, _translate(node.node("defresult"), context))


def _repeats(expression: Expression) -> bool:
    """Whether a part of the expression is in it more than once: nested, its size would grow exponentially."""
    return any(isinstance(node, Case) for node in walk(expression))


def _case_operand(node: Node, context: _Context) -> Expression:
    return context.operand or Unmodelled(f"expression node {node.name}", frozenset())


def _row_comparison(node: Node, context: _Context) -> Expression:
    """The first fields that differ or are NULL decide, the last ones by the operator itself.

    `(a, b) <= (c, d)` is: if a = c, then b <= d, else a < c.
    """
    operators, collations = node.oids("opnos"), node.oids("inputcollids")
    lefts, rights = _arguments(node, context, "largs"), _arguments(node, context, "rargs")
    pairs = tuple(zip(lefts, rights, strict=True))
    if any(map(_repeats, (*lefts, *rights))):
        return Unmodelled("a comparison of rows that hold a CASE", attnums_in(node))
    result: Expression = Operator(operators[-1], collations[-1], pairs[-1])
    for operator, collation, pair in zip(operators[-2::-1], collations[-2::-1], pairs[-2::-1], strict=True):
        symbol, *types = OPERATORS.get(operator, ("",))
        equal, decisive = (OPERATOR_OIDS.get((name, *types)) for name in ("=", symbol.rstrip("=")))
        if equal is None or decisive is None:
            return Unmodelled("a comparison of rows", attnums_in(node))
        branch = (Operator(equal, collation, pair), result)
        result = Case((branch,), Operator(decisive, collation, pair))
    return result


_BUILDERS: Final[Mapping[str, Callable[[Node, _Context], Expression]]] = {
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
    names = {member.value: member.sql_name for member in Type}
    return names.get(type_oid, f"the type with oid {type_oid}")
