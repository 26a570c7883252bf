"""A role that may log in to a server, and has no other right that it was not given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cdc_replay.postgres.connection import connect
from fixtures.postgres import Database


@dataclass(frozen=True)
class Stranger:
    database: Database
    name: str

    def enter(self) -> None:
        self.database.run(f"create role {self.name} login")

    def leave(self) -> None:
        self.database.run(f"drop owned by {self.name} cascade; drop role {self.name}")

    @property
    def dsn(self) -> str:
        return self.database.cluster.dsn(self.database.name, self.name)

    def run(self, script: str, *values: object) -> list[tuple[Any, ...]]:
        """Execute a statement as the stranger."""
        with connect(self.dsn, purpose="test") as connection:
            cursor = connection.execute(script.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def is_superuser(self) -> bool:
        [(answer,)] = self.database.rows(f"select rolsuper from pg_roles where rolname = '{self.name}'")
        return bool(answer)
