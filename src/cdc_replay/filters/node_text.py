r"""PostgreSQL's stored node trees (`pg_publication_rel.prqual`, 15 to 18) as nested nodes and lists.

The text is that of `outfuncs.c`:

| text                            | meaning                                                         |
|---------------------------------|-----------------------------------------------------------------|
| `{OPEXPR :opno 96 :args (…) …}` | a node with named fields                                        |
| `(a b c)`                       | a list, of nodes, strings or numbers                            |
| `<>`                            | no value                                                        |
| `4 [ 10 0 0 0 0 0 0 0 ]`        | a datum: its length, and its bytes as signed numbers            |
| `\(`                            | a backslash escapes the next character                          |

`read_node` reads this syntax for any node, without recursion, so every tree that a server stores is readable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from cdc_replay.errors import InvalidFilter

_TOKEN: Final = re.compile(r"[(){}]|(?:\\.|[^\s(){}\\])+", re.DOTALL)
_INTEGER: Final = re.compile(r"-?[0-9]{1,10}")

NULL: Final = "<>"
"""Written for a missing value."""


@dataclass(slots=True)
class Node:
    """A node as written; a field has the values between its name and the next name."""

    name: str
    fields: dict[str, list[FieldValue]] = field(default_factory=dict)

    def single(self, name: str) -> FieldValue:
        """The only value of a field.

        Raises:
            InvalidFilter: if there is not exactly one.
        """
        values = self.fields.get(name, [])
        if len(values) != 1:
            raise malformed_tree(f"node {self.name} has {len(values)} values for {name}")
        return values[0]

    def integer(self, name: str) -> int:
        """A field that holds an integer, an oid or an enumerator."""
        token = self.token(name)
        if not _INTEGER.fullmatch(token):
            raise malformed_tree(f"field {name} of node {self.name} is not a number")
        return int(token)

    def flag(self, name: str) -> bool:
        """A field that holds a truth value."""
        return self.token(name) == "true"

    def token(self, name: str) -> str:
        """A field that holds one word."""
        value = self.single(name)
        if not isinstance(value, str):
            raise malformed_tree(f"field {name} of node {self.name} is not a word")
        return value

    def node(self, name: str) -> Node:
        """A field that holds one node."""
        value = self.single(name)
        if not isinstance(value, Node):
            raise malformed_tree(f"field {name} of node {self.name} is not a node")
        return value

    def items(self, name: str) -> list[FieldValue]:
        """A field that holds a list; `<>` is the empty one."""
        value = self.single(name)
        if value == NULL:
            return []
        if not isinstance(value, list):
            raise malformed_tree(f"field {name} of node {self.name} is not a list")
        return value

    def nodes(self, name: str) -> list[Node]:
        """A field that holds a list of nodes."""
        return [node for node in self.items(name) if isinstance(node, Node)]

    def oids(self, name: str) -> tuple[int, ...]:
        """A field that holds a list of oids: `(o 96 521)`."""
        match self.single(name):
            case ["o", *words] if all(isinstance(word, str) and _INTEGER.fullmatch(word) for word in words):
                return tuple(int(word) for word in words if isinstance(word, str))
            case _:
                raise malformed_tree(f"field {name} of node {self.name} is not a list of oids")

    def walk(self) -> Iterator[Node]:
        """This node and all below it, in no order; without recursion."""
        pending: list[FieldValue] = [self]
        while pending:
            entry = pending.pop()
            if isinstance(entry, Node):
                yield entry
                pending.extend(value for values in entry.fields.values() for value in values)
            elif isinstance(entry, list):
                pending.extend(entry)


FieldValue: TypeAlias = "str | Node | list[FieldValue]"


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
    """Builds a node from words; `_open` are the nodes and lists that are not closed yet, outermost first."""

    def __init__(self) -> None:
        self._top: list[FieldValue] = []
        self._open: list[Node | list[FieldValue]] = []
        self._values: list[list[FieldValue]] = [self._top]
        self._expect_name = False

    def take(self, word: str) -> None:
        """Read the next word."""
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
        """The node that was read.

        Raises:
            InvalidFilter: if it is not exactly one.
        """
        if self._open or self._expect_name or len(self._top) != 1 or not isinstance(self._top[0], Node):
            raise malformed_tree("it is not one complete node")
        return self._top[0]

    def _open_node(self, name: str) -> None:
        node = Node(name)
        self._expect_name = False
        self._values[-1].append(node)
        self._open.append(node)
        self._values.append([])

    def _open_list(self) -> None:
        items: list[FieldValue] = []
        self._values[-1].append(items)
        self._open.append(items)
        self._values.append(items)

    def _close(self, word: str) -> None:
        expected = Node if word == "}" else list
        if not self._open or not isinstance(self._open.pop(), expected):
            raise malformed_tree(f'"{word}" closes nothing')
        self._values.pop()


def unescape(token: str) -> str:
    """A word without its escapes."""
    return re.sub(r"\\(.)", r"\1", token, flags=re.DOTALL)


def attnums_in(node: Node) -> frozenset[int]:
    """The attribute numbers of the columns that `node` or a node below it reads."""
    return frozenset(variable.integer("varattno") for variable in node.walk() if variable.name == "VAR")


def datum_of(node: Node) -> bytes:
    """The bytes of a constant: `length [ byte … ]`, eight of them where the type is passed by value."""
    match node.fields.get("constvalue"):
        case [str(), "[", *octets, "]"]:
            return bytes(int(octet) & 0xFF for octet in octets if isinstance(octet, str))
        case _:
            raise malformed_tree("a constant has no value")


UNKNOWN: Final = 705
"""The type of a literal without a type, as in `num_nulls('a')`."""

_VARLENA_TEXTS: Final = frozenset({25, 114, 142, 1042, 1043})
"""text, json, xml, bpchar, varchar."""
_C_STRINGS: Final = frozenset({19, UNKNOWN})
"""name, and literals without a type."""

TEXTS: Final = _VARLENA_TEXTS | _C_STRINGS
"""Types whose values are plain characters."""


def varlena(datum: bytes) -> bytes | None:
    """The content of a plain varlena; None if it is compressed or out of line."""
    if datum and datum[0] & 1:
        return datum[1:] if datum[0] >> 1 == len(datum) else None
    return datum[4:] if int.from_bytes(datum[:4], "little") == len(datum) << 2 else None


def text_datum(constant: Node) -> bytes | None:
    """The characters of a constant of `TEXTS`, in the encoding of the server; None of any other constant."""
    type_oid = constant.integer("consttype")
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
    """The type of an expression's value, if the node has it."""
    while node.name == "COLLATEEXPR":
        node = node.node("arg")
    name = _RESULT_TYPES.get(node.name)
    return None if name is None else node.integer(name)


def malformed_tree(why: str) -> InvalidFilter:
    """The error for a tree that no server has stored."""
    return InvalidFilter(
        "cannot read the stored form of a row filter",
        detail=f"This is not a node tree of PostgreSQL 15 to 18: {why}.",
        hint="Check that the publisher's version is supported.",
        rule="R3.15",
    )
