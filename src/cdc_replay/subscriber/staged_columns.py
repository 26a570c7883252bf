"""Columns of our own tables in which values for a target are staged, and how statements read them.

They have the target's types below all domains, so that its input functions read the publisher's text (R8.1).
If the target is owned by another role, values whose type could run its owner's code are staged as text,
because COPY would run that code with our rights. Statements that run with the owner's rights cast them
(R8.21).
"""

from __future__ import annotations

from typing import Final

from psycopg import sql

from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.target_checks import renamed_target
from cdc_replay.subscriber.target_tables import TargetColumn

_OPAQUE: Final = """
    with recursive element (oid) as (
        select atttypid from pg_catalog.pg_attribute
        where attrelid = %s::regclass and attnum > 0 and not attisdropped
        union
        select typelem from element join pg_catalog.pg_type using (oid) where typelem <> 0
    )
    select from element join pg_catalog.pg_type using (oid) where oid >= 16384 and typtype not in ('b', 'e')
"""


def staged_type(column: TargetColumn, *, owner_is_untrusted: bool) -> sql.Composed:
    """The type of staged values of the column, for DDL."""
    if owner_is_untrusted and column.is_opaque:
        return sql.SQL("{}").format(sql.SQL("text"))
    return sql.SQL("{}{}").format(sql.SQL(column.base_type_sql), collate(column))


def collate(column: TargetColumn) -> sql.Composable:
    """The COLLATE clause for a column of this one's type, for DDL."""
    if column.collation is None:
        return sql.SQL("")
    return sql.SQL(" collate {}").format(sql.Identifier(*column.collation))


def typed_value(value: sql.Composable, column: TargetColumn, *, owner_is_untrusted: bool) -> sql.Composable:
    """A staged value, cast to the column's type below all domains."""
    if owner_is_untrusted and column.is_opaque:
        return sql.SQL("{}::{}").format(value, sql.SQL(column.base_type_sql))
    return value


def check_types(connection: Connection, table: sql.Identifier, target: QualifiedName) -> None:
    """Check that the types of a staging table for `target` are still those of the target.

    A type name in DDL is resolved when the staging table is created, so its owner may have given the name
    away.

    Raises:
        TargetMismatch: if reading values into it might run another role's code.
    """
    if connection.execute(_OPAQUE, (table.as_string(connection),)).fetchall():
        raise renamed_target(target)
