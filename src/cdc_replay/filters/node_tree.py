r"""PostgreSQL's stored node trees (`pg_publication_rel.prqual`, 15 to 18) → `Expression`.

The text is that of `outfuncs.c`:

| text                            | is                                                              |
|---------------------------------|-----------------------------------------------------------------|
| `{OPEXPR :opno 96 :args (…) …}` | a node with named fields                                        |
| `(a b c)`                       | a list, of nodes, strings or numbers                            |
| `<>`                            | no value                                                        |
| `4 [ 10 0 0 0 0 0 0 0 ]`        | a datum: its length, and its bytes as signed numbers            |
| `\(`                            | a backslash takes the special meaning from the next character   |

Reading has two steps. `read_node` knows this syntax and no node at all, and works without recursion, so any
tree that a server has stored is readable. `parse` then translates the nodes that it knows by name and turns
every other one, and whatever is nested too deeply to be worth translating, into `Unmodelled`. Names of nodes
and fields differ between versions (15 wrote COALESCE where 16 writes COALESCEEXPR), fields come and go; only
those that matter are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from cdc_replay.errors import InvalidFilter
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
    Function,
    NullIf,
    NullTest,
    Operator,
    Relabel,
    Truth,
    TruthTest,
    Type,
    Unmodelled,
)

MAX_DEPTH: Final = 60
"""Trees deeper than any that a person writes are not translated: that recurses, and so does Spark."""

_TOKEN: Final = re.compile(r"[(){}]|(?:\\.|[^\s(){}\\])+", re.DOTALL)
_NULL: Final = "<>"


@dataclass(slots=True)
class Node:
    """A node as written; a field has the values that stand between its name and the next name."""

    name: str
    fields: dict[str, list[Item]] = field(default_factory=dict)

    def one(self, name: str) -> Item:
        """The only value of a field.

        Raises:
            InvalidFilter: if there is not exactly one.
        """
        values = self.fields.get(name, [])
        if len(values) != 1:
            raise _malformed(f"node {self.name} has {len(values)} values for {name}")
        return values[0]

    def number(self, name: str) -> int:
        """A field that holds an integer, an oid or an enumerator."""
        return int(self.token(name))

    def token(self, name: str) -> str:
        """A field that holds one word."""
        value = self.one(name)
        if not isinstance(value, str):
            raise _malformed(f"field {name} of node {self.name} is not a word")
        return value

    def node(self, name: str) -> Node:
        """A field that holds one node."""
        value = self.one(name)
        if not isinstance(value, Node):
            raise _malformed(f"field {name} of node {self.name} is not a node")
        return value

    def nodes(self, name: str) -> list[Node]:
        """A field that holds a list of nodes; `<>` is the empty one."""
        value = self.one(name)
        if value == _NULL:
            return []
        if not isinstance(value, list):
            raise _malformed(f"field {name} of node {self.name} is not a list")
        return [item for item in value if isinstance(item, Node)]


Item: TypeAlias = "str | Node | list[Item]"


def parse(text: str) -> Expression:
    """The filter that the stored tree `text` means.

    Raises:
        InvalidFilter: if `text` is not a node tree.
    """
    return _translate(read_node(text), depth=0)


def read_node(text: str) -> Node:
    """The outermost node of `text`, whatever its kind.

    Raises:
        InvalidFilter: if brackets do not match or something other than one node is there.
    """
    reader = _Reader()
    for match in _TOKEN.finditer(text):
        reader.take(match.group())
    return reader.result()


class _Reader:
    """Puts words together; `_open` holds the nodes and lists that are not closed yet, outermost first."""

    def __init__(self) -> None:
        self._top: list[Item] = []
        self._open: list[Node | list[Item]] = []
        self._values: list[list[Item]] = [self._top]
        self._expect_name = False

    def take(self, word: str) -> None:
        """Read one more word."""
        if self._expect_name:
            self._open_node(word)
        elif word == "{":
            self._expect_name = True
        elif word == "(":
            self._open_list()
        elif word in {"}", ")"}:
            self._close(word)
        elif word.startswith(":") and self._open and isinstance(node := self._open[-1], Node):
            self._values[-1] = node.fields.setdefault(word[1:], [])
        else:
            self._values[-1].append(word)

    def result(self) -> Node:
        """What was read.

        Raises:
            InvalidFilter: if it is not exactly one node.
        """
        if self._open or self._expect_name or len(self._top) != 1 or not isinstance(self._top[0], Node):
            raise _malformed("it is not one complete node")
        return self._top[0]

    def _open_node(self, name: str) -> None:
        node = Node(name)
        self._expect_name = False
        self._values[-1].append(node)
        self._open.append(node)
        self._values.append([])

    def _open_list(self) -> None:
        items: list[Item] = []
        self._values[-1].append(items)
        self._open.append(items)
        self._values.append(items)

    def _close(self, word: str) -> None:
        wanted = Node if word == "}" else list
        if not self._open or not isinstance(self._open.pop(), wanted):
            raise _malformed(f'"{word}" closes nothing')
        self._values.pop()


def _malformed(why: str) -> InvalidFilter:
    return InvalidFilter(
        "cannot read the stored form of a row filter",
        detail=f"This is not a node tree of PostgreSQL 15 to 18: {why}.",
        hint="Check that the publisher's version is supported.",
        rule="R3.15",
    )


# ---- nodes to expressions


def _translate(node: Node, depth: int) -> Expression:
    builder = _BUILDERS.get(node.name)
    if depth > MAX_DEPTH:
        return Unmodelled("an expression nested too deeply", _attnums(node))
    if builder is None:
        return Unmodelled(f"expression node {node.name}", _attnums(node))
    return builder(node, depth + 1)


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


def _arguments(node: Node, depth: int, name: str = "args") -> tuple[Expression, ...]:
    return tuple(_translate(each, depth) for each in node.nodes(name))


def _column(node: Node, _depth: int) -> Expression:
    return Column(node.number("varattno"), node.number("vartype"), node.number("varcollid"))


def _constant(node: Node, _depth: int) -> Expression:
    type_oid = node.number("consttype")
    if node.token("constisnull") == "true":
        return Constant(type_oid, None)
    decoded = decode_datum(type_oid, _datum(node))
    return decoded or Unmodelled(f"a constant of {_type_name(type_oid)} that is not understood", frozenset())


def _operator(node: Node, depth: int) -> Expression:
    return Operator(node.number("opno"), node.number("inputcollid"), _arguments(node, depth))


def _distinct(node: Node, depth: int) -> Expression:
    return Distinct(node.number("opno"), node.number("inputcollid"), _arguments(node, depth))


def _null_if(node: Node, depth: int) -> Expression:
    return NullIf(node.number("opno"), node.number("inputcollid"), _arguments(node, depth))


def _array_comparison(node: Node, depth: int) -> Expression:
    left, array = _arguments(node, depth)
    is_any = node.token("useOr") == "true"
    return ArrayComparison(node.number("opno"), node.number("inputcollid"), is_any, left, array)


def _array(node: Node, depth: int) -> Expression:
    if node.token("multidims") == "true":
        return Unmodelled("an array of several dimensions", _attnums(node))
    return Array(_arguments(node, depth, "elements"))


def _function(node: Node, depth: int) -> Expression:
    return Function(node.number("funcid"), _arguments(node, depth))


def _bool(node: Node, depth: int) -> Expression:
    return Bool(BoolOp(node.token("boolop")), _arguments(node, depth))


def _null_test(node: Node, depth: int) -> Expression:
    if node.token("argisrow") == "true":
        return Unmodelled("a NULL test of a row", _attnums(node))
    return NullTest(_translate(node.node("arg"), depth), negated=node.number("nulltesttype") == 1)


def _truth_test(node: Node, depth: int) -> Expression:
    return TruthTest(_translate(node.node("arg"), depth), Truth(node.number("booltesttype")))


def _relabel(node: Node, depth: int) -> Expression:
    argument = _translate(node.node("arg"), depth)
    match argument:
        case Column(type_oid=source) | Constant(type_oid=source) | Relabel(type_oid=source):
            return Relabel(argument, source, node.number("resulttype"))
        case _:
            return Unmodelled("a cast of an expression", _attnums(node))


def _collate(node: Node, depth: int) -> Expression:
    return Collate(_translate(node.node("arg"), depth))


def _coalesce(node: Node, depth: int) -> Expression:
    return Coalesce(_arguments(node, depth))


def _case(node: Node, depth: int) -> Expression:
    if node.one("arg") != _NULL:
        return Unmodelled("CASE with an operand", _attnums(node))
    branches = tuple(
        (_translate(when.node("expr"), depth), _translate(when.node("result"), depth))
        for when in node.nodes("args")
    )
    return Case(branches, _translate(node.node("defresult"), depth))


_BUILDERS: Final[Mapping[str, Callable[[Node, int], Expression]]] = {
    "VAR": _column,
    "CONST": _constant,
    "OPEXPR": _operator,
    "DISTINCTEXPR": _distinct,
    "NULLIFEXPR": _null_if,
    "SCALARARRAYOPEXPR": _array_comparison,
    "ARRAYEXPR": _array,
    "ARRAY": _array,  # 15
    "FUNCEXPR": _function,
    "BOOLEXPR": _bool,
    "NULLTEST": _null_test,
    "BOOLEANTEST": _truth_test,
    "RELABELTYPE": _relabel,
    "COLLATEEXPR": _collate,
    "COLLATE": _collate,  # 15
    "COALESCEEXPR": _coalesce,
    "COALESCE": _coalesce,  # 15
    "CASEEXPR": _case,
    "CASE": _case,  # 15
}


def _datum(node: Node) -> bytes:
    """The bytes of a constant: `length [ byte … ]`, eight of them where the type is passed by value."""
    match node.fields.get("constvalue"):
        case [str(), "[", *numbers, "]"]:
            return bytes(int(number) & 0xFF for number in numbers if isinstance(number, str))
        case _:
            raise _malformed("a constant has no value")


def _type_name(type_oid: int) -> str:
    known = {member.value: member.sql_name for member in Type}
    return known.get(type_oid, f"the type with oid {type_oid}")
