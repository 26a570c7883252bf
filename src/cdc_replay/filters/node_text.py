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
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from cdc_replay.errors import InvalidFilter

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
            raise malformed(f"node {self.name} has {len(values)} values for {name}")
        return values[0]

    def number(self, name: str) -> int:
        """A field that holds an integer, an oid or an enumerator."""
        return int(self.token(name))

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

    def nodes(self, name: str) -> list[Node]:
        """A field that holds a list of nodes; `<>` is the empty one."""
        value = self.one(name)
        if value == _NULL:
            return []
        if not isinstance(value, list):
            raise malformed(f"field {name} of node {self.name} is not a list")
        return [item for item in value if isinstance(item, Node)]


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


def malformed(why: str) -> InvalidFilter:
    """The error for a tree that no server has stored."""
    return InvalidFilter(
        "cannot read the stored form of a row filter",
        detail=f"This is not a node tree of PostgreSQL 15 to 18: {why}.",
        hint="Check that the publisher's version is supported.",
        rule="R3.15",
    )
