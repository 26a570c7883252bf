"""What an administrator grants the capturing role once, so that it owns nothing and is no superuser.

| the role needs              | for                                                             |
|-----------------------------|-----------------------------------------------------------------|
| REPLICATION                 | the slot (R1.33), exported snapshots                            |
| USAGE on schemas, SELECT on | initial copies, validation, unsent values (R4.6), read from the |
| tables and their partitions | published root and from the partitions                          |
| BYPASSRLS                   | tables with policies that would hide rows (R7.10)               |
| TEMPORARY on the database   | row filters that PostgreSQL evaluates                           |

Only missing privileges are granted, and only on tables that are published today: a table that is added later
needs its own grant, or another `setup --dry-run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psycopg import sql

from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.postgres.connection import Connection
from cdc_replay.publication.partition_root import publishes

_ROLE: Final = """
    select rolname::text, rolsuper, rolsuper or rolreplication,
        pg_catalog.has_database_privilege(pg_catalog.current_database(), 'temporary'),
        pg_catalog.current_database()::text
    from pg_catalog.pg_roles where rolname = current_user
"""

_TABLES: Final = """
    select n.nspname::text, c.relname::text,
        pg_catalog.has_schema_privilege(n.oid, 'usage'),
        pg_catalog.has_table_privilege(c.oid, 'select'),
        pg_catalog.row_security_active(c.oid)
    from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where c.oid = any(%s::oid[])
    order by n.nspname, c.relname
"""


def plan_grants(
    connection: Connection, catalog: PublisherCatalog, publications: Sequence[str]
) -> tuple[sql.Composed, ...]:
    """The statements that grant the session's role the missing privileges to read the published tables."""
    name, is_superuser, may_replicate, may_make_temporary, database = _role(connection)
    if is_superuser:
        return ()
    role = sql.Identifier(name)
    tables = connection.execute(_TABLES, (_published_oids(catalog, publications),)).fetchall()
    statements = []
    if not may_replicate:
        statements.append(sql.SQL("alter role {} replication").format(role))
    if any(is_restricted for *_, is_restricted in tables):
        statements.append(sql.SQL("alter role {} bypassrls").format(role))
    if not may_make_temporary:
        statements.append(
            sql.SQL("grant temporary on database {} to {}").format(sql.Identifier(database), role)
        )
    unusable_schemas = dict.fromkeys(schema for schema, _, may_use, *_ in tables if not may_use)
    statements += [
        sql.SQL("grant usage on schema {} to {}").format(sql.Identifier(schema), role)
        for schema in unusable_schemas
    ]
    statements += [
        sql.SQL("grant select on table {} to {}").format(sql.Identifier(schema, table), role)
        for schema, table, _, may_read, _ in tables
        if not may_read
    ]
    return tuple(statements)


def _role(connection: Connection) -> tuple[str, bool, bool, bool, str]:
    (row,) = connection.execute(_ROLE).fetchall()
    return row


def _published_oids(catalog: PublisherCatalog, publications: Sequence[str]) -> list[int]:
    existing = catalog.existing(publications)
    oids: set[int] = set()
    for table in catalog.tables.values():
        ancestors = catalog.ancestors(table.id)
        if any(publishes(publication, table, ancestors) for publication in existing):
            oids.update(relative.id for relative in (table, *ancestors))
    return sorted(oids)
