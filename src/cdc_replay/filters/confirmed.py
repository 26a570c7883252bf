"""Whether two node trees mean the same: what was stored, and what a server has made of `printed`.

Only fields that decide are compared: not where something stood in the text, nor how a cast was written. So
trees of different versions compare, and the text of a forged log cannot give a constant another value than
its tree has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from cdc_replay.filters.names import Names
from cdc_replay.filters.node_text import Item, Node, result_type

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


def mean_the_same(stored: Node, made: Node, attnums: Mapping[int, int], names: Names) -> bool:
    """Whether `made`, of a table whose columns have other numbers, means what `stored` means.

    Args:
        stored: a tree of the published table.
        made: a tree of a table that has the columns without their lengths, and without domains.
        attnums: the published table's number for each column of the other table.
        names: the types of both.
    """
    todo: list[tuple[Item | None, Item | None]] = [(stored, made)]
    while todo:
        match todo.pop():
            case (Node() as left, Node() as right):
                left, right = _bare(left, names), _bare(right, names)
                if left.name != right.name or left.name not in _DECIDING:
                    return False
                if left.name == "VAR" and not _is_same_column(left, right, attnums):
                    return False
                todo.extend(_fields(left, right))
            case (list() as left, list() as right) if len(left) == len(right):
                todo.extend(zip(left, right, strict=True))
            case (left, right) if left != right or isinstance(left, list):
                return False
            case _:
                pass
    return True


def _bare(node: Node, names: Names) -> Node:
    """Without casts that change nothing where columns have no length and no domain."""
    while True:
        is_cast = node.name == "RELABELTYPE"
        if node.name == "COERCETODOMAIN" or (is_cast and node.number("resulttype") == _type(node, names)):
            node = node.node("arg")
        else:
            return node


def _type(cast: Node, names: Names) -> int | None:
    """The type of what is cast."""
    found = result_type(cast.node("arg"))
    return None if found is None else names.below_domains(found)


def _is_same_column(stored: Node, made: Node, attnums: Mapping[int, int]) -> bool:
    return attnums.get(made.number("varattno")) == stored.number("varattno")


def _fields(left: Node, right: Node) -> Iterator[tuple[Item | None, Item | None]]:
    for name in _DECIDING[left.name]:
        # What only one version has is not decided by it.
        if name in left.fields and name in right.fields:
            yield list(left.fields[name]), list(right.fields[name])
