"""Columns of our own tables in which values for a target are staged, and how statements read them.

They have the target's types below all domains, so that its input functions read the publisher's text (R8.1).
If the target is owned by another role, values whose type could run its owner's code are staged as text,
because COPY would run that code with our rights. Statements that run with the owner's rights cast them
(R8.21): they read the staged values through a view, because the owner can read no table of ours.

Windows, copies and reconciliation stage their rows in this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self

from psycopg import sql

from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.identifiers import commas
from cdc_replay.subscriber.as_owner import TargetSession
from cdc_replay.subscriber.target_checks import renamed_target
from cdc_replay.subscriber.target_tables import TargetColumn, TargetTable

_OPAQUE: Final = """
    with recursive element (oid) as (
        select atttypid from pg_catalog.pg_attribute
        where attrelid = %s::regclass and attnum > 0 and not attisdropped
        union
        select typelem from element join pg_catalog.pg_type using (oid) where typelem <> 0
    )
    select from element join pg_catalog.pg_type using (oid) where oid >= 16384 and typtype not in ('b', 'e')
"""


@dataclass(frozen=True, slots=True)
class StagedColumns:
    """Columns with values for columns of a target, by their names in the staging table; picklable.

    `owner_is_untrusted`: another role owns the target, whose code must not run as ours.
    """

    target: QualifiedName
    columns: tuple[tuple[str, TargetColumn], ...]
    owner_is_untrusted: bool

    @classmethod
    def from_target(cls, target: TargetTable, names: Iterable[str]) -> Self:
        """Columns that have the names of the target's."""
        columns = tuple((name, target.column(name)) for name in names)
        return cls(target.name, columns, target.acting.rights.owner_is_untrusted)

    def definitions(self) -> list[sql.Composed]:
        """The columns, for DDL."""
        return [
            sql.SQL("{} text").format(sql.Identifier(name))
            if self._is_text(column)
            else _definition(name, column.base_type_sql, column)
            for name, column in self.columns
        ]

    def create(
        self, connection: Connection, persistence: Literal["temporary", "unlogged"], table: sql.Identifier
    ) -> None:
        """Create a table of these columns.

        Raises:
            TargetMismatch: as `check_types`.
        """
        statement = sql.SQL("create {} table {} ({})")
        connection.execute(statement.format(sql.SQL(persistence), table, commas(self.definitions())))
        self.check_types(connection, table)

    def check_types(self, connection: Connection, table: sql.Identifier) -> None:
        """Check that the types of a staging table are still those of an untrusted owner's target.

        A type name in DDL is resolved when the staging table is created, so its owner may have given the name
        away.

        Raises:
            TargetMismatch: if reading values into it might run another role's code.
        """
        if self.owner_is_untrusted and connection.execute(_OPAQUE, (table.as_string(connection),)).fetchall():
            raise renamed_target(self.target)

    def share(
        self,
        connection: Connection,
        session: TargetSession,
        rows: sql.Composable,
        view: sql.Identifier,
        *,
        others: Sequence[str] = (),
    ) -> None:
        """Create a temporary view of `rows` with the target's types, for an owner who cannot read them.

        The view reads our tables, and its casts run with the rights of the reader. `others` are columns
        besides.
        """
        values = (
            sql.SQL("{}::{} as {}").format(
                sql.Identifier(name), sql.SQL(column.base_type_sql), sql.Identifier(name)
            )
            if self._is_text(column)
            else sql.Identifier(name)
            for name, column in self.columns
        )
        columns = commas([*map(sql.Identifier, others), *values])
        connection.execute(
            sql.SQL("create temporary view {} as select {} from {}").format(view, columns, rows)
        )
        session.share(view)

    def _is_text(self, column: TargetColumn) -> bool:
        return self.owner_is_untrusted and column.is_opaque


def column_definition(name: str, column: TargetColumn) -> sql.Composed:
    """A column of the type of a target's column, for DDL of a table with rows of the target."""
    return _definition(name, column.type_sql, column)


def _definition(name: str, type_sql: str, column: TargetColumn) -> sql.Composed:
    if column.collation is None:
        return sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(type_sql))
    collation = sql.Identifier(*column.collation)
    return sql.SQL("{} {} collate {}").format(sql.Identifier(name), sql.SQL(type_sql), collation)
