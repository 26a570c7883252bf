"""Whether two node trees mean the same: a stored one, and the one that a server builds from its printed SQL.

Only fields that decide the result are compared, not positions in the text or how a cast was written. So trees
of different versions compare, and the text of a forged log cannot give a constant another value than its tree
has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from cdc_replay.filters.names import Names
from cdc_replay.filters.node_text import FieldValue, Node, result_type

_DECIDING: Final[Mapping[str, tuple[str, ...]]] = {
    "VAR": ("varcollid",),
    "CONST": ("consttype", "constisnull", "constvalue"),
    "OPEXPR": ("opno", "inputcollid", "args"),
    "DISTINCTEXPR": ("opno", "inputcollid", "args"),
    "NULLIFEXPR": ("opno", "inputcollid", "args"),
    "SCALARARRAYOPEXPR": ("opno", "useOr", "inputcollid", "args"),
    "FUNCEXPR": ("funcid", "funcresulttype", "funcvariadic", "inputcollid", "args"),
    "NAMEDARGEXPR": ("argnumber", "arg"),
    "BOOLEXPR": ("boolop", "args"),
    "NULLTEST": ("nulltesttype", "argisrow", "arg"),
    "BOOLEANTEST": ("booltesttype", "arg"),
    "RELABELTYPE": ("resulttype", "arg"),
    "COERCEVIAIO": ("resulttype", "arg"),
    "ARRAYCOERCEEXPR": ("resulttype", "arg", "elemexpr"),
    "COLLATEEXPR": ("collOid", "arg"),
    "CASEEXPR": ("casetype", "arg", "args", "defresult"),
    "CASEWHEN": ("expr", "result"),
    "CASETESTEXPR": ("typeId",),
    "ARRAYEXPR": ("array_typeid", "elements", "multidims"),
    "ROWEXPR": ("row_typeid", "args"),
    "ROWCOMPAREEXPR": ("opnos", "inputcollids", "largs", "rargs"),
    "COALESCEEXPR": ("coalescetype", "args"),
    "MINMAXEXPR": ("minmaxtype", "inputcollid", "op", "args"),
    "SUBSCRIPTINGREF": ("refcontainertype", "refupperindexpr", "reflowerindexpr", "refexpr"),
    "XMLEXPR": ("op", "name", "named_args", "arg_names", "args", "xmloption", "indent", "type"),
}


def mean_the_same(stored: Node, rebuilt: Node, attnums: Mapping[int, int], names: Names) -> bool:
    """Whether `rebuilt`, of a table with other attribute numbers, means what `stored` means.

    Args:
        stored: a tree of the published table.
        rebuilt: a tree of a table that has the columns without lengths and domains.
        attnums: the published table's attribute number for each of the other table's.
        names: the types of both.
    """
    pending: list[tuple[FieldValue | None, FieldValue | None]] = [(stored, rebuilt)]
    while pending:
        match pending.pop():
            case (Node() as left, Node() as right):
                left, right = _bare(left, names), _bare(right, names)
                if left.name != right.name or left.name not in _DECIDING:
                    return False
                if left.name == "VAR" and not _is_same_column(left, right, attnums):
                    return False
                pending.extend(_fields(left, right, names))
            case (list() as left, list() as right) if len(left) == len(right):
                pending.extend(zip(left, right, strict=True))
            case (left, right) if left != right or isinstance(left, list):
                return False
            case _:
                pass
    return True


def _bare(node: Node, names: Names) -> Node:
    """The node without casts that change nothing if columns have no length and no domain."""
    while True:
        is_cast = node.name == "RELABELTYPE"
        if node.name == "COERCETODOMAIN" or (is_cast and node.integer("resulttype") == _type(node, names)):
            node = node.node("arg")
        else:
            return node


def _type(cast: Node, names: Names) -> int | None:
    """The type of the cast's argument."""
    type_oid = result_type(cast.node("arg"))
    return None if type_oid is None else names.below_domains(type_oid)


def _is_same_column(stored: Node, rebuilt: Node, attnums: Mapping[int, int]) -> bool:
    return attnums.get(rebuilt.integer("varattno")) == stored.integer("varattno")


def _fields(left: Node, right: Node, names: Names) -> Iterator[tuple[FieldValue | None, FieldValue | None]]:
    for name in _DECIDING[left.name]:
        if left.name == "BOOLEXPR" and name == "args":
            yield _operands(left, names), _operands(right, names)
        # A field that only one version has does not decide.
        elif name in left.fields and name in right.fields:
            yield list(left.fields[name]), list(right.fields[name])


def _operands(node: Node, names: Names) -> list[FieldValue]:
    """The operands of NOT, AND or OR; an AND within an AND, or an OR within an OR, is replaced by its own.

    A parser joins them if they are on the left, where BETWEEN and IN leave them nested. They are evaluated in
    the same order, up to the same one.
    """
    operator = node.token("boolop")
    operands: list[FieldValue] = []
    pending = node.items("args")[::-1]
    while pending:
        operand = pending.pop()
        inner = _bare(operand, names) if isinstance(operand, Node) and operator != "not" else None
        if inner is not None and inner.name == "BOOLEXPR" and inner.token("boolop") == operator:
            pending.extend(inner.items("args")[::-1])
        else:
            operands.append(operand)
    return operands
