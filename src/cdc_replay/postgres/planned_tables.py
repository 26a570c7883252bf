"""Tables of the publisher, held as they were planned while a transaction reads them.

Every statement looks a name up anew. Between the plan, which knows a table by its oid, and the statement
that reads it, its owner can give the name to a view, or a column to a type of their own: the view's
functions, or the type's casts, would run with the rights of the role that reads. So a table is locked first,
and then looked at; what is found cannot change before the transaction ends.

| step                                               | what it tells, as of now                        |
|----------------------------------------------------|-------------------------------------------------|
| `select *` of the name is parsed, and not executed | numbers and types of the columns; the server    |
|                                                    | has locked (ACCESS SHARE) whatever has the name |
| to_regclass                                        | which relation it is                            |
| pg_relation_filenode                               | that it still stores rows: on 15 a rule makes a |
|                                                    | view of a table, which keeps its oid            |

Catalog rows would be those of the transaction's snapshot, which may be older. LOCK TABLE would ask for SELECT
on the whole table, where reading needs it on some columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

import psycopg
from psycopg import errors as pg
from psycopg import pq, sql

from cdc_replay.errors import InvalidFilter, PublisherNotReady, ServerUnavailable
from cdc_replay.model.publication import Table
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, translated_errors

_MAY_READ: Final = (
    "On the publisher, grant the role SELECT on the table and USAGE on its schema. Where row-level security"
    " restricts it, give it BYPASSRLS, or use the role of an owner whom no policy restricts."
)

_RUN_AGAIN: Final = "The table changed while the command ran: run it again."

_RESTRICT: Final = """
    select pg_catalog.set_config(name, %s, true)
      from pg_catalog.pg_settings where name = 'restrict_nonsystem_relation_kind'
"""

_STATEMENT: Final = b"cdc_replay_planned_table"
_PARSE: Final = sql.SQL("prepare cdc_replay_planned_table as select * from {}{}")
_FORGET: Final = sql.SQL("deallocate cdc_replay_planned_table")

_FOUND: Final = """
    select pg_catalog.to_regclass(%(name)s)::oid::bigint,
           pg_catalog.pg_relation_filenode(%(oid)s::oid) is not null,
           pg_catalog.pg_describe_object(
               'pg_catalog.pg_class'::regclass, pg_catalog.to_regclass(%(name)s)::oid, 0)
"""


_BASE_TYPES: Final = """
    with recursive below (domain, type) as (
        select oid, typbasetype from pg_catalog.pg_type where oid = any (%s::oid[]) and typtype = 'd'
        union all
        select domain, typbasetype
        from below join pg_catalog.pg_type on pg_type.oid = below.type where typtype = 'd'
    )
    select domain::bigint, type::bigint from below join pg_catalog.pg_type on pg_type.oid = below.type
    where typtype <> 'd'
"""


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """A plain or partitioned table as a plan knows it; picklable.

    `columns` are attribute number and type by name.
    """

    oid: int
    name: QualifiedName
    is_partitioned: bool
    columns: Mapping[str, tuple[int, int]]

    @classmethod
    def from_catalog(cls, table: Table) -> Self:
        """The table of a catalog."""
        columns = {column.name: (column.attnum, column.type_oid) for column in table.columns}
        return cls(int(table.id), table.name, table.is_partitioned, columns)

    @property
    def identifier(self) -> sql.Identifier:
        """The table in SQL."""
        return sql.Identifier(self.name.schema, self.name.name)


def read_only_tables(connection: Connection, *, foreign: bool = False) -> None:
    """Let the transaction read no view, where the server can be told so (15.8, 16.4, 17), nor foreign tables.

    `foreign` ones are partitions that are read through their root, as they are natively (R7.6).
    """
    connection.execute(_RESTRICT, ("view" if foreign else "view, foreign-table",))


@contextlib.contextmanager
def publisher_read_errors(table: QualifiedName) -> Iterator[None]:
    """Errors of the publisher while rows are read, which name the table.

    Raises:
        InvalidFilter: if a query fails on a value, which only a row filter can cause.
        PublisherNotReady: if the table is not there any more, or the query fails for another reason.
        MissingPrivilege, ServerUnavailable: as `translated_errors`.
    """
    what = f'cannot read table "{table}" of the publisher'
    try:
        with translated_errors(what, grant=_MAY_READ):
            yield
    except pg.DataError as error:
        raise InvalidFilter(
            f"{what}: {error.diag.message_primary}",
            detail=error.diag.message_detail,
            hint="A row filter fails on a row: correct the row, or the filter of the publication.",
            rule="R7.6",
        ) from error
    except (pg.UndefinedTable, pg.UndefinedColumn, pg.InvalidSchemaName) as error:
        raise PublisherNotReady(
            f"{what}: {error.diag.message_primary}",
            hint=_RUN_AGAIN,
            rule="R7.6",
        ) from error
    except pg.ObjectNotInPrerequisiteState as error:  # a view, or a foreign table: see `read_only_tables`
        raise PublisherNotReady(
            f"{what}: {error.diag.message_primary}", hint=_RUN_AGAIN, rule="R2.1"
        ) from error
    except psycopg.OperationalError as error:  # canceled, out of memory or space, a conflict with recovery
        raise ServerUnavailable(
            f"{what}: {error.diag.message_primary}", detail=error.diag.message_detail
        ) from error
    except psycopg.Error as error:
        raise PublisherNotReady(
            f"{what}: {error.diag.message_primary}", detail=error.diag.message_detail
        ) from error


def same_key(
    column: sql.Composable, type_sql: str, equality: tuple[str, str], text: sql.Composable
) -> sql.Composed:
    """The condition that a column has the value of a text, by the operator of its key's index.

    Only types of pg_catalog are read from the text. Another type, and its operator, would be looked up by
    names that their owners can give away, and a domain in it calls functions; so its own text is compared.
    """
    # Only types of pg_catalog are written without their schema.
    if "." in type_sql:
        return sql.SQL("pg_catalog.concat({}) operator(pg_catalog.=) {}").format(column, text)
    schema, name = equality
    return sql.SQL("{} operator({}.{}) {}::{}").format(
        column, sql.Identifier(schema), sql.SQL(name), text, sql.SQL(type_sql)
    )


def lock_planned_tables(connection: Connection, tables: Iterable[PlannedTable]) -> None:
    """Lock the tables until the transaction ends; a partitioned one is read through itself.

    Columns that were dropped or added since are none of its business.

    Raises:
        PublisherNotReady: if something else has the name of one, or a column is another one.
        MissingPrivilege, ServerUnavailable: as every statement.
    """
    for table in tables:
        with publisher_read_errors(table.name):
            _hold(connection, table)


def _hold(connection: Connection, table: PlannedTable) -> None:
    if table.is_partitioned:
        read_only_tables(connection, foreign=True)
    columns = dict(_parsed_columns(connection, table))
    values = {"name": table.identifier.as_string(connection), "oid": table.oid}
    ((oid, is_stored, described),) = connection.execute(_FOUND, values).fetchall()
    if oid != table.oid:
        raise _changed(table, f"its name is that of another relation now, {described}")
    if not is_stored and not table.is_partitioned:
        raise _changed(table, f"it stores no rows any more, and is {described}")
    others = [name for name, planned in table.columns.items() if columns.get(name, planned) != planned]
    if others:
        bases = _base_types(connection, [table.columns[name][1] for name in others])
        others = [name for name in others if columns[name] != _below_domains(table.columns[name], bases)]
    if others:
        raise _changed(table, f"other columns, or other types, have the names {', '.join(others)}")


def _base_types(connection: Connection, types: list[int]) -> dict[int, int]:
    """What is below the domains among these types: a statement's result is described by that."""
    return dict(connection.execute(_BASE_TYPES, (types,)).fetchall())


def _below_domains(planned: tuple[int, int], bases: Mapping[int, int]) -> tuple[int, int]:
    number, type_oid = planned
    return number, bases.get(type_oid, type_oid)


def _parsed_columns(connection: Connection, table: PlannedTable) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name, number and type of its columns, from a statement that is never executed."""
    only = sql.SQL("" if table.is_partitioned else "only ")
    connection.execute(_PARSE.format(only, table.identifier))
    described = connection.pgconn.describe_prepared(_STATEMENT)
    if described.status != pq.ExecStatus.COMMAND_OK:
        raise pg.error_from_result(described)
    connection.execute(_FORGET)
    for number in range(described.nfields):
        name = described.fname(number) or b""
        yield name.decode(), (described.ftablecol(number), described.ftype(number))


def _changed(table: PlannedTable, why: str) -> PublisherNotReady:
    return PublisherNotReady(
        f'cannot read table "{table.name}" of the publisher: {why}',
        hint=_RUN_AGAIN,
        rule="R2.1",
    )
