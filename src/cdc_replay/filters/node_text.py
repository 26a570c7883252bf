r"""PostgreSQL's stored node trees (`pg_publication_rel.prqual`, 15 to 18) as nested nodes and lists.

The text is that of `outfuncs.c`:

| text                            | is                                                              |
|---------------------------------|-----------------------------------------------------------------|
| `{OPEXPR :opno 96 :args (…) …}` | a node with named fields                                        |
| `(a b c)`                       | a list, of nodes, strings or numbers                            |
| `<>`                            | no value                                                        |
| `4 [ 10 0 0 0 0 0 0 0 ]`        | a datum: its length, and its bytes as signed numbers            |
| `\(`                            | a backslash takes the special meaning from the next character   |

`read_node` knows this syntax and no node at all, and works without recursion, so any tree that a server has
stored is readable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from cdc_replay.errors import InvalidFilter

_TOKEN: Final = re.compile(r"[(){}]|(?:\\.|[^\s(){}\\])+", re.DOTALL)
_NUMBER: Final = re.compile(r"-?[0-9]{1,10}")

NULL: Final = "<>"
"""What is written where there is no value."""


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
            raise malformed(f"node {self.name} has {len(values)} values for {name}")
        return values[0]

    def number(self, name: str) -> int:
        """A field that holds an integer, an oid or an enumerator."""
        token = self.token(name)
        if not _NUMBER.fullmatch(token):
            raise malformed(f"field {name} of node {self.name} is not a number")
        return int(token)

    def flag(self, name: str) -> bool:
        """A field that holds a truth value."""
        return self.token(name) == "true"

    def token(self, name: str) -> str:
        """A field that holds one word."""
        value = self.one(name)
        if not isinstance(value, str):
            raise malformed(f"field {name} of node {self.name} is not a word")
        return value

    def node(self, name: str) -> Node:
        """A field that holds one node."""
        value = self.one(name)
        if not isinstance(value, Node):
            raise malformed(f"field {name} of node {self.name} is not a node")
        return value

    def items(self, name: str) -> list[Item]:
        """A field that holds a list; `<>` is the empty one."""
        value = self.one(name)
        if value == NULL:
            return []
        if not isinstance(value, list):
            raise malformed(f"field {name} of node {self.name} is not a list")
        return value

    def nodes(self, name: str) -> list[Node]:
        """A field that holds a list of nodes."""
        return [item for item in self.items(name) if isinstance(item, Node)]

    def oids(self, name: str) -> tuple[int, ...]:
        """A field that holds a list of oids: `(o 96 521)`."""
        match self.one(name):
            case ["o", *words] if all(isinstance(word, str) and _NUMBER.fullmatch(word) for word in words):
                return tuple(int(word) for word in words if isinstance(word, str))
            case _:
                raise malformed(f"field {name} of node {self.name} is not a list of oids")

    def walk(self) -> Iterator[Node]:
        """This node and all below it, in no order; without recursion."""
        todo: list[Item] = [self]
        while todo:
            item = todo.pop()
            if isinstance(item, Node):
                yield item
                todo.extend(value for values in item.fields.values() for value in values)
            elif isinstance(item, list):
                todo.extend(item)


Item: TypeAlias = "str | Node | list[Item]"


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
            raise malformed("it is not one complete node")
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
            raise malformed(f'"{word}" closes nothing')
        self._values.pop()


def unescaped(token: str) -> str:
    """A word as it was before it was written."""
    return re.sub(r"\\(.)", r"\1", token, flags=re.DOTALL)


def attnums_in(node: Node) -> frozenset[int]:
    """The numbers of the columns that are read in `node` or below it."""
    return frozenset(each.number("varattno") for each in node.walk() if each.name == "VAR")


def datum_of(node: Node) -> bytes:
    """The bytes of a constant: `length [ byte … ]`, eight of them where the type is passed by value."""
    match node.fields.get("constvalue"):
        case [str(), "[", *numbers, "]"]:
            return bytes(int(number) & 0xFF for number in numbers if isinstance(number, str))
        case _:
            raise malformed("a constant has no value")


UNKNOWN: Final = 705
"""The type of a literal that has none yet, as in `num_nulls('a')`."""

_VARLENA_TEXTS: Final = frozenset({25, 114, 142, 1042, 1043})
"""text, json, xml, bpchar, varchar."""
_C_STRINGS: Final = frozenset({19, UNKNOWN})
"""name, and literals without a type."""

TEXTS: Final = _VARLENA_TEXTS | _C_STRINGS
"""Types whose values are characters and nothing else."""


def varlena(datum: bytes) -> bytes | None:
    """What a plain varlena holds; None if it is compressed or stored elsewhere."""
    if datum and datum[0] & 1:
        return datum[1:] if datum[0] >> 1 == len(datum) else None
    return datum[4:] if int.from_bytes(datum[:4], "little") == len(datum) << 2 else None


def text_datum(constant: Node) -> bytes | None:
    """The characters of a constant of `TEXTS`, in the encoding of the server; None of any other constant."""
    type_oid = constant.number("consttype")
    if type_oid not in TEXTS or constant.flag("constisnull"):
        return None
    datum = datum_of(constant)
    return varlena(datum) if type_oid in _VARLENA_TEXTS else datum.split(b"\0", 1)[0]


_RESULT_TYPES: Final[Mapping[str, str]] = {
    "VAR": "vartype",
    "CONST": "consttype",
    "FUNCEXPR": "funcresulttype",
    "OPEXPR": "opresulttype",
    "NULLIFEXPR": "opresulttype",
    "RELABELTYPE": "resulttype",
    "COERCEVIAIO": "resulttype",
    "ARRAYCOERCEEXPR": "resulttype",
    "SUBSCRIPTINGREF": "refrestype",
    "ARRAYEXPR": "array_typeid",
    "COALESCEEXPR": "coalescetype",
    "CASEEXPR": "casetype",
    "MINMAXEXPR": "minmaxtype",
    "CASETESTEXPR": "typeId",
}


def result_type(node: Node) -> int | None:
    """The type of an expression's value, where the node says it."""
    while node.name == "COLLATEEXPR":
        node = node.node("arg")
    name = _RESULT_TYPES.get(node.name)
    return None if name is None else node.number(name)


def malformed(why: str) -> InvalidFilter:
    """The error for a tree that no server has stored."""
    return InvalidFilter(
        "cannot read the stored form of a row filter",
        detail=f"This is not a node tree of PostgreSQL 15 to 18: {why}.",
        hint="Check that the publisher's version is supported.",
        rule="R3.15",
    )
