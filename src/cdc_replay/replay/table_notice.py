"""Notices about tables whose rows may differ from what is published, each with the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cdc_replay.model.relation import QualifiedName


@dataclass(frozen=True, slots=True)
class TableNotice:
    """One sentence about a table, with the remedy, and the rule that it follows from."""

    table: QualifiedName
    text: str
    rule: str

    def __str__(self) -> str:
        return f"{self.table}: {self.text} ({self.rule})"


def join_notices(*notices: Mapping[QualifiedName, TableNotice]) -> dict[QualifiedName, str]:
    """The texts of all notices by table."""
    texts: dict[QualifiedName, list[str]] = {}
    for by_table in notices:
        for table, notice in by_table.items():
            texts.setdefault(table, []).append(notice.text)
    return {table: "; ".join(parts) for table, parts in texts.items()}
