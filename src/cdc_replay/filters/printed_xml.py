"""XML expressions, which have a grammar of their own.

A tree has XML names; SQL has identifiers, which PostgreSQL maps to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, LiteralString

from psycopg import sql

from cdc_replay.filters.names import Names, NotPrintableError
from cdc_replay.filters.node_text import FieldValue, Node, unescape
from cdc_replay.filters.parts import Part, join_nodes


def xml_parts(node: Node, names: Names) -> list[Part]:
    """The parts of an XMLEXPR.

    Raises:
        NotPrintableError: if PostgreSQL has no such XML expression.
    """
    operation = node.integer("op")
    if operation == _SERIALIZE:
        return _text(node, names)
    if operation not in _WRITERS:
        raise NotPrintableError(f"XML expression {operation} is not known")
    return _WRITERS[operation](node)


def _concat(node: Node) -> list[Part]:
    return ["xmlconcat(", *join_nodes(node.nodes("args")), ")"]


def _element(node: Node) -> list[Part]:
    parts: list[Part] = ["xmlelement(name ", _name(node.token("name"))]
    if attributes := _named_values(node):
        parts += [", xmlattributes(", *attributes, ")"]
    for argument in node.nodes("args"):
        parts += [", ", argument]
    return [*parts, ")"]


def _forest(node: Node) -> list[Part]:
    return ["xmlforest(", *_named_values(node), ")"]


def _parse(node: Node) -> list[Part]:
    data, keeps_spaces = _arguments(node, 2)
    spaces: LiteralString = (
        " preserve whitespace" if _first_octet(keeps_spaces) == "1" else " strip whitespace"
    )
    return ["xmlparse(", _kind(node), data, spaces, ")"]


def _instruction(node: Node) -> list[Part]:
    value: list[Part] = [", ", *join_nodes(node.nodes("args"))] if node.nodes("args") else []
    return ["xmlpi(name ", _name(node.token("name")), *value, ")"]


def _root(node: Node) -> list[Part]:
    data, version, standalone = _arguments(node, 3)
    is_no_value = version.name == "CONST" and version.flag("constisnull")
    if (standalone_code := _first_octet(standalone)) not in _STANDALONE:
        raise NotPrintableError("the standalone property of an XML value is not known")
    return [
        "xmlroot(",
        data,
        ", version ",
        "no value" if is_no_value else version,
        _STANDALONE[standalone_code],
        ")",
    ]


def _text(node: Node, names: Names) -> list[Part]:
    (data,) = _arguments(node, 1)
    indent: LiteralString = " indent" if "indent" in node.fields and node.flag("indent") else ""
    return ["xmlserialize(", _kind(node), data, " as ", names.type(node.integer("type")), indent, ")"]


def _is_document(node: Node) -> list[Part]:
    (data,) = _arguments(node, 1)
    return ["(", data, " is document)"]


_WRITERS: Final[Mapping[int, Callable[[Node], list[Part]]]] = {
    0: _concat,
    1: _element,
    2: _forest,
    3: _parse,
    4: _instruction,
    5: _root,
    7: _is_document,
}
"""By `XmlExprOp`."""

_SERIALIZE: Final = 6

_STANDALONE: Final[Mapping[str, LiteralString]] = {
    "0": ", standalone yes",
    "1": ", standalone no",
    "2": ", standalone no value",
    "3": "",
}
"""By `XmlStandaloneType`."""


def _arguments(node: Node, count: int) -> list[Node]:
    arguments = node.nodes("args")
    if len(arguments) != count:
        raise NotPrintableError(f"an XML expression has {len(arguments)} arguments")
    return arguments


def _named_values(node: Node) -> list[Part]:
    values, names = node.nodes("named_args"), node.items("arg_names")
    if len(values) != len(names):
        raise NotPrintableError("an XML value has no name")
    parts: list[Part] = []
    for value, name in zip(values, names, strict=True):
        parts += [", ", value, " as ", _name(name)]
    return parts[1:]


def _kind(node: Node) -> LiteralString:
    return "content " if node.integer("xmloption") else "document "


def _first_octet(constant: Node) -> str:
    """The first byte of a constant that is passed by value, after length and bracket."""
    return "".join(map(str, constant.fields.get("constvalue", [])[2:3]))


def _name(value: FieldValue) -> sql.Identifier:
    if not isinstance(value, str):
        raise NotPrintableError("an XML value has no name")
    name = unescape(value.removeprefix('"').removesuffix('"'))
    return sql.Identifier(re.sub(r"_x([0-9A-F]{4,5})_", lambda code: chr(int(code[1], 16)), name))
