"""The privileges that an administrator grants the applying role once, so that it needs no superuser.

| the role needs                          | for                                                      |
|-----------------------------------------|----------------------------------------------------------|
| SET on `session_replication_role`       | triggers and foreign keys as in a native worker (R8.13)  |
| schema `cdc_replay`                     | its state and staging tables                             |
| TEMPORARY on the database               | rows that exchange keys, reconciliation                  |
| CREATE on the database                  | code of the tables' owners (`as_owner`)                  |
| EXECUTE on `pg_replication_origin_…`    | changes marked as replicated (R8.18)                     |
| membership in the roles that own tables | writing rows with the owners' rights (R8.21)             |
| with `run_as_owner: true` instead:      | writing rows with its own rights                         |
| USAGE, SELECT, INSERT, UPDATE, DELETE,  |                                                          |
| TRUNCATE; USAGE on the sequences of     |                                                          |
| their defaults                          |                                                          |

Only missing privileges are granted. No role becomes a member of a superuser role: it would be one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.model.publication import STATE_SCHEMA
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, superuser
from cdc_replay.postgres.identifiers import commas
from cdc_replay.subscriber.replication_origin import FUNCTIONS

_ROLE: Final = """
    select rolname::text, rolsuper, pg_catalog.current_database()::text,
        array(
            select privilege from pg_catalog.unnest(array['temporary', 'create']) as privilege
            where not pg_catalog.has_database_privilege(pg_catalog.current_database(), privilege)
        ),
        pg_catalog.has_parameter_privilege('session_replication_role', 'set'),
        pg_catalog.to_regnamespace(%s) is not null
    from pg_catalog.pg_roles where rolname = current_user
"""

_CLOSED_FUNCTIONS: Final = """
    select name from pg_catalog.unnest(%s::text[]) with ordinality as called (name, place)
    where not pg_catalog.has_function_privilege('pg_catalog.' || name, 'execute')
    order by place
"""

_TABLES: Final = """
    select n.nspname::text, c.relname::text, owner.rolname::text, owner.rolsuper,
        pg_catalog.pg_has_role(owner.oid, 'usage'),
        pg_catalog.has_schema_privilege(n.oid, 'usage'),
        (select pg_catalog.bool_and(pg_catalog.has_table_privilege(c.oid, privilege))
         from pg_catalog.unnest(%s::text[]) as privilege)
    from unnest(%s::text[], %s::text[]) as wanted (schema_name, table_name)
    join pg_catalog.pg_namespace n on n.nspname = wanted.schema_name
    join pg_catalog.pg_class c
        on c.relnamespace = n.oid and c.relname = wanted.table_name and c.relkind in ('r', 'p')
    join pg_catalog.pg_roles owner on owner.oid = c.relowner
    order by n.nspname, c.relname
"""

_SEQUENCES_OF_DEFAULTS: Final = """
    select distinct n.nspname::text, sequence.relname::text
    from unnest(%s::text[], %s::text[]) as wanted (schema_name, table_name)
    join pg_catalog.pg_namespace of_table on of_table.nspname = wanted.schema_name
    join pg_catalog.pg_class c on c.relnamespace = of_table.oid and c.relname = wanted.table_name
    join pg_catalog.pg_attrdef on pg_attrdef.adrelid = c.oid
    join pg_catalog.pg_depend on pg_depend.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass
        and pg_depend.objid = pg_attrdef.oid
        and pg_depend.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
    join pg_catalog.pg_class sequence on sequence.oid = pg_depend.refobjid
    join pg_catalog.pg_namespace n on n.oid = sequence.relnamespace
    where case when sequence.relkind = 'S'
        then not pg_catalog.has_sequence_privilege(sequence.oid, 'usage') end
    order by 1, 2
"""

_PRIVILEGES: Final = ("select", "insert", "update", "delete", "truncate")


@dataclass(frozen=True, slots=True)
class _Role:
    name: str
    is_superuser: bool
    database: str
    lacks_on_database: Sequence[str]
    may_set_replication_role: bool
    has_schema: bool


@dataclass(frozen=True, slots=True)
class _Table:
    schema: str
    name: str
    owner: str
    has_superuser_owner: bool
    has_owners_rights: bool
    may_use_schema: bool
    has_privileges: bool


def plan_grants(
    connection: Connection, tables: Iterable[QualifiedName], *, run_as_owner: bool
) -> tuple[sql.Composed, ...]:
    """The statements that grant the session's role what it lacks to write to the tables.

    Tables that do not exist are skipped.
    """
    role = _role(connection)
    if role.is_superuser:
        return ()
    existing = _read_tables(connection, tables)
    on_tables = (
        (*_as_itself(role, existing), *_on_sequences(connection, role, existing))
        if run_as_owner
        else _as_owners(role, existing)
    )
    needed = {"temporary"} if run_as_owner else {"temporary", "create"}
    return (*_on_database(connection, role, needed), *on_tables)


def plan_role_script(
    connection: Connection, tables: Sequence[QualifiedName], *, run_as_owner: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The grants for the session's role, and warnings of tables that it cannot be given."""
    statements = plan_grants(connection, tables, run_as_owner=run_as_owner)
    warnings: tuple[str, ...] = ()
    if not run_as_owner and superuser(connection) is None:
        warnings = _owner_warnings(superuser_owned_tables(connection, tables))
    return tuple(statement.as_string(connection) for statement in statements), warnings


def superuser_owned_tables(
    connection: Connection, tables: Iterable[QualifiedName]
) -> tuple[QualifiedName, ...]:
    """The tables that only a superuser can write to with their owner's rights."""
    existing = _read_tables(connection, tables)
    return tuple(QualifiedName(table.schema, table.name) for table in existing if table.has_superuser_owner)


def _owner_warnings(tables: Sequence[QualifiedName]) -> tuple[str, ...]:
    if not tables:
        return ()
    names = ", ".join(map(str, tables))
    warning = (
        f"tables that belong to a superuser: {names}; give them to another role, or set `run_as_owner: true`"
        " for the subscription, and run this again"
    )
    return (warning,)


def _read_tables(connection: Connection, tables: Iterable[QualifiedName]) -> list[_Table]:
    """The tables that exist."""
    names = list(tables)
    columns = ([name.schema for name in names], [name.name for name in names])
    return [_Table(*row) for row in connection.execute(_TABLES, (list(_PRIVILEGES), *columns))]


def _role(connection: Connection) -> _Role:
    (row,) = connection.execute(_ROLE, (STATE_SCHEMA,)).fetchall()
    return _Role(*row)


def _on_database(connection: Connection, role: _Role, needed: Collection[str]) -> Iterator[sql.Composed]:
    name = sql.Identifier(role.name)
    if not role.may_set_replication_role:
        yield sql.SQL("grant set on parameter session_replication_role to {}").format(name)
    if not role.has_schema:
        yield sql.SQL("create schema {} authorization {}").format(sql.Identifier(STATE_SCHEMA), name)
    if lacking := [sql.SQL(privilege) for privilege in role.lacks_on_database if privilege in needed]:
        yield sql.SQL("grant {} on database {} to {}").format(
            commas(lacking), sql.Identifier(role.database), name
        )
    for (function,) in connection.execute(_CLOSED_FUNCTIONS, (list(FUNCTIONS),)).fetchall():
        # The text is from our own list.
        yield sql.SQL("grant execute on function pg_catalog.{} to {}").format(sql.SQL(function), name)


def _as_owners(role: _Role, tables: Sequence[_Table]) -> Iterator[sql.Composed]:
    missing = (
        table.owner for table in tables if not table.has_owners_rights and not table.has_superuser_owner
    )
    for owner in dict.fromkeys(missing):
        yield sql.SQL("grant {} to {}").format(sql.Identifier(owner), sql.Identifier(role.name))


def _as_itself(role: _Role, tables: Sequence[_Table]) -> Iterator[sql.Composed]:
    name = sql.Identifier(role.name)
    for schema in dict.fromkeys(table.schema for table in tables if not table.may_use_schema):
        yield sql.SQL("grant usage on schema {} to {}").format(sql.Identifier(schema), name)
    for table in tables:
        if not table.has_privileges:
            yield sql.SQL("grant {} on table {} to {}").format(
                commas(map(sql.SQL, _PRIVILEGES)), sql.Identifier(table.schema, table.name), name
            )


def _on_sequences(connection: Connection, role: _Role, tables: Sequence[_Table]) -> Iterator[sql.Composed]:
    names = ([table.schema for table in tables], [table.name for table in tables])
    for schema, sequence in connection.execute(_SEQUENCES_OF_DEFAULTS, names).fetchall():
        yield sql.SQL("grant usage on sequence {} to {}").format(
            sql.Identifier(schema, sequence), sql.Identifier(role.name)
        )
