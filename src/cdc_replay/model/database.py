"""Which database of a cluster changes come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Database:
    """A database of one cluster: `oid` is the same for as long as it is there, `name` may change."""

    oid: int
    name: str

    def __str__(self) -> str:
        return f'"{self.name}" (oid {self.oid})'
