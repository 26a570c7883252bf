"""What a node is written as: words of SQL, names and values, and nodes that have still to be written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, LiteralString, TypeAlias

from cdc_replay.filters.node_text import Node

if TYPE_CHECKING:
    from psycopg import sql

Part: TypeAlias = "LiteralString | sql.Composable | Node"


def listed(nodes: Sequence[Node], separator: LiteralString = ", ") -> list[Part]:
    """The nodes with something between them."""
    parts: list[Part] = []
    for node in nodes:
        parts += [separator, node]
    return parts[1:]
