"""Tables of the subscriber that hold the chunks of a big table until all of them are there.

A table that is copied in several chunks becomes visible at once: every chunk is copied into a staging table
of its own, created by the transaction that fills it, so that an attempt that is repeated replaces what an
earlier one left. When all chunks are there, one transaction moves them into the target and records the
table as ready.

| killed                      | left behind                      | the next run                        |
|-----------------------------|----------------------------------|-------------------------------------|
| while a chunk is copied     | nothing of it                    | copies the table again              |
| between chunks, before move | staging tables                   | drops them, copies the table again  |
| during the move             | staging tables, target untouched | drops them, copies the table again  |
| after the move              | nothing                          | leaves the table alone: it is ready |

The name of a staging table holds the subscription, the table, the snapshot and the chunk. Staging tables
are unlogged and have the types of the target's columns but none of its constraints: the move checks those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from psycopg import sql

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.postgres.copy import column_list
from cdc_replay.subscriber.state import SCHEMA

LEFTOVERS: Final = """
    select relname from pg_catalog.pg_class
     where relnamespace = (select oid from pg_catalog.pg_namespace where nspname = %s)
       and relkind = 'r' and pg_catalog.starts_with(relname::text, %s)
"""


def staging_name(subscription: str, table: QualifiedName, consistent_point: Lsn, number: int) -> str:
    """The name of the table for one chunk."""
    return f"{_prefix(subscription)}{_short_hash(str(table))}_{consistent_point.value:016x}_{number}"


def _prefix(subscription: str) -> str:
    return f"snapshot_{_short_hash(subscription)}_"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def staging_table(name: str) -> sql.Identifier:
    """The staging table in SQL."""
    return sql.Identifier(SCHEMA, name)


def create_staging(connection: Connection, name: str, target: sql.Composable, columns: Sequence[str]) -> None:
    """An empty staging table for `columns` of `target`, instead of one that an earlier attempt left."""
    table = staging_table(name)
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    with translated_errors(f'cannot create staging table "{SCHEMA}.{name}"'):
        connection.execute(sql.SQL("drop table if exists {}").format(table))
        connection.execute(
            sql.SQL("create unlogged table {} as select {} from {} with no data").format(table, names, target)
        )


def move_staged(
    connection: Connection, names: Sequence[str], target: sql.Composable, columns: Sequence[str]
) -> None:
    """Insert the rows of all staging tables into the target and drop them, in the caller's transaction."""
    listed = sql.SQL(", ").join(map(sql.Identifier, columns))
    parts = (sql.SQL("select {} from {}").format(listed, staging_table(name)) for name in names)
    connection.execute(
        # Identity columns take the publisher's value, as they do from COPY (R8.14).
        sql.SQL("insert into {}{} overriding system value {}").format(
            target, column_list(columns), sql.SQL(" union all ").join(parts)
        )
    )
    _drop(connection, names)


def drop_leftovers(connection: Connection, subscription: str) -> int:
    """Drop the subscription's staging tables, which only a killed run leaves; the count of them."""
    rows = connection.execute(LEFTOVERS, (SCHEMA, _prefix(subscription))).fetchall()
    _drop(connection, [name for (name,) in rows])
    return len(rows)


def _drop(connection: Connection, names: Sequence[str]) -> None:
    if names:
        tables = sql.SQL(", ").join(map(staging_table, names))
        connection.execute(sql.SQL("drop table if exists {}").format(tables))
