"""Columns of tables of ours in which values for a target wait, and how statements read them.

They have the target's types below all domains, so that its input functions read the publisher's text (R8.1).
Where the target is of another role, what runs code of the type's owner waits as text: COPY into it would run
that with our rights. It gets its type where statements with the owner's rights read it (R8.21).
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


def staged_type(column: TargetColumn, *, is_of_another: bool) -> sql.Composed:
    """The type of values that wait for the column, as DDL wants it."""
    if is_of_another and column.is_opaque:
        return sql.SQL("{}").format(sql.SQL("text"))
    return sql.SQL("{}{}").format(sql.SQL(column.base_type_sql), collate(column))


def collate(column: TargetColumn) -> sql.Composable:
    """The collation of a column of this one's type, as DDL wants it."""
    if column.collation is None:
        return sql.SQL("")
    return sql.SQL(" collate {}").format(sql.Identifier(*column.collation))


def typed_value(value: sql.Composable, column: TargetColumn, *, is_of_another: bool) -> sql.Composable:
    """A value that has waited, as one of the column's type below all domains."""
    if is_of_another and column.is_opaque:
        return sql.SQL("{}::{}").format(value, sql.SQL(column.base_type_sql))
    return value


def check_types(connection: Connection, table: sql.Identifier, target: QualifiedName) -> None:
    """No type of a table in which values for `target` wait is another one by now than that of the target was.

    A name in DDL leads to whatever has it when the table is made.

    Raises:
        TargetMismatch: if reading values into it might run code of somebody else.
    """
    if connection.execute(_OPAQUE, (table.as_string(connection),)).fetchall():
        raise renamed_target(target)
