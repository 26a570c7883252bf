"""The printed parts of a node: SQL keywords, names, values, and nodes that are still to be printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, LiteralString, TypeAlias

from cdc_replay.filters.node_text import Node

if TYPE_CHECKING:
    from psycopg import sql

Part: TypeAlias = "LiteralString | sql.Composable | Node"


def join_nodes(nodes: Sequence[Node], separator: LiteralString = ", ") -> list[Part]:
    """The nodes, separated."""
    parts: list[Part] = []
    for node in nodes:
        parts += [separator, node]
    return parts[1:]
