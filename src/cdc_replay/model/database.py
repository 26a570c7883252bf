"""The database of a cluster that changes come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Database:
    """A database of one cluster: `oid` never changes, `name` may."""

    oid: int
    name: str

    def __str__(self) -> str:
        return f'"{self.name}" (oid {self.oid})'
