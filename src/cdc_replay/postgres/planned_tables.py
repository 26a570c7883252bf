"""Lock the publisher's tables as they were planned, while a transaction reads them.

Every statement looks up a name again. Between the plan, which identifies a table by oid, and the statement
that reads it, the owner can give the name to a view, or a column a type of their own: the view's functions,
or the type's casts, would run with the rights of the reading role. So a table is first locked and then
checked; it cannot change before the transaction ends.

| step                                               | what it returns, as of now                      |
|----------------------------------------------------|-------------------------------------------------|
| `select *` of the name is parsed, and not executed | numbers and types of the columns; the server    |
|                                                    | locks (ACCESS SHARE) the relation of that name  |
| to_regclass                                        | which relation it is                            |
| pg_relation_filenode                               | that it still stores rows: on 15 a rule makes a |
|                                                    | view of a table, which keeps its oid            |

Catalog queries would use the transaction's snapshot, which may be older. LOCK TABLE requires SELECT on the
whole table, while reading needs it on some columns only.

What was done to a table between the snapshot and the lock cannot be seen in its rows. TRUNCATE and rewrites
give it another file, which has none of the rows for an older snapshot, and a partitioned table is read with
the partitions of now. So who reads rows checks that afterwards (`check_unchanged`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import psycopg
from psycopg import errors as pg
from psycopg import pq, sql

from cdc_replay.errors import CdcReplayError, InvalidFilter, PublisherNotReady, ServerUnavailable
from cdc_replay.model.publication import Table
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, translated_errors

_MAY_READ: Final = (
    "On the publisher, grant the role SELECT on the table and USAGE on its schema. If row-level security"
    " restricts the role, give it BYPASSRLS, or use an owner's role that no policy restricts."
)

_RUN_AGAIN: Final = "The table changed while the command ran: run it again."

# The view pg_settings lists all settings for one, in a millisecond; `plan` needs it for each table.
_RESTRICT: Final = """
    select pg_catalog.set_config('restrict_nonsystem_relation_kind', %s, true)
     where pg_catalog.current_setting('restrict_nonsystem_relation_kind', true) is not null
"""

_STATEMENT: Final = b"cdc_replay_planned_table"
_PARSE: Final = sql.SQL("prepare cdc_replay_planned_table as select * from {}{}")
_FORGET: Final = sql.SQL("deallocate cdc_replay_planned_table")

_RELATION: Final = """
    select pg_catalog.to_regclass(%(name)s)::oid::bigint,
           pg_catalog.pg_relation_filenode(%(oid)s::oid) is not null,
           pg_catalog.pg_describe_object(
               'pg_catalog.pg_class'::regclass, pg_catalog.to_regclass(%(name)s)::oid, 0)
"""


# Catalog rows are as of the snapshot; functions return what is there now.
_CHANGED_TABLES: Final = """
    with recursive requested (oid) as (
        select unnest(%s::oid[])
    ),
    before (oid) as (
        select requested.oid from requested
        union
        select inhrelid
        from before
        join pg_catalog.pg_class as class on class.oid = before.oid and class.relkind = 'p'
        join pg_catalog.pg_inherits on inhparent = before.oid
    ),
    now (oid) as (
        select requested.oid from requested
        union
        select relid::oid from requested, pg_catalog.pg_partition_tree(requested.oid)
    )
    select case
        when class.oid is null then pg_catalog.pg_describe_object('pg_catalog.pg_class'::regclass, now.oid, 0)
        else pg_catalog.format('%%I.%%I', nspname, relname)
    end
    from (
        before
        left join pg_catalog.pg_class as class on class.oid = before.oid
        left join pg_catalog.pg_namespace as namespace on namespace.oid = relnamespace
    )
    full join now on now.oid = before.oid
    where before.oid is null or now.oid is null
        or coalesce(pg_catalog.pg_relation_filenode(class.oid), 0) <> relfilenode
    order by 1
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
    """A plain or partitioned table as planned; picklable.

    `columns` maps names to attribute number and type.
    """

    oid: int
    name: QualifiedName
    is_partitioned: bool
    columns: Mapping[str, tuple[int, int]]

    @classmethod
    def from_catalog(cls, table: Table) -> Self:
        """The planned table for a table of a catalog."""
        columns = {column.name: (column.attnum, column.type_oid) for column in table.columns}
        return cls(int(table.id), table.name, table.is_partitioned, columns)

    @property
    def identifier(self) -> sql.Identifier:
        """The table's name in SQL."""
        return sql.Identifier(self.name.schema, self.name.name)


def read_only_tables(connection: Connection, *, foreign: bool = False) -> None:
    """Forbid the transaction to read views, if the server supports that (15.8, 16.4, 17), and foreign tables.

    With `foreign`, foreign tables are allowed: partitions that are read through their root, as natively
    (R7.6).
    """
    connection.execute(_RESTRICT, ("view" if foreign else "view, foreign-table",))


@contextlib.contextmanager
def publisher_read_errors(table: QualifiedName) -> Iterator[None]:
    """Raise the publisher's errors while rows of `table` are read as errors that name it.

    Raises:
        InvalidFilter: if a query fails on a value, which only a row filter can cause.
        PublisherNotReady: if the table does not exist any more, or the query fails for another reason.
        MissingPrivilege, ServerUnavailable: as `translated_errors`.
    """
    action = f'cannot read table "{table}" of the publisher'
    try:
        with translated_errors(action, grant=_MAY_READ):
            yield
    except psycopg.Error as error:
        raise _read_error(f"{action}: {error.diag.message_primary or error}", error) from error


def _read_error(message: str, error: psycopg.Error) -> CdcReplayError:
    detail = error.diag.message_detail
    match error:
        case pg.DataError():
            hint = "A row filter fails on a row: correct the row, or the filter of the publication."
            return InvalidFilter(message, detail=detail, hint=hint, rule="R7.6")
        case pg.UndefinedTable() | pg.UndefinedColumn() | pg.InvalidSchemaName():
            return PublisherNotReady(message, hint=_RUN_AGAIN, rule="R7.6")
        case pg.ObjectNotInPrerequisiteState():  # a view, or a foreign table: see `read_only_tables`
            return PublisherNotReady(message, hint=_RUN_AGAIN, rule="R2.1")
        case psycopg.OperationalError():  # canceled, out of memory or space, a conflict with recovery
            return ServerUnavailable(message, detail=detail)
        case _:
            return PublisherNotReady(message, detail=detail)


def same_key(
    column: sql.Composable, type_sql: str, equality: tuple[str, str], text: sql.Composable
) -> sql.Composed:
    """The condition that a column equals the value of a text, by the operator of its key's index.

    The text is cast only to types of pg_catalog. Another type and its operator would be looked up by name,
    which their owners can give away, and a domain in it calls functions; so such a column is compared as
    text.
    """
    # Only types of pg_catalog have no schema in their name.
    if "." in type_sql:
        return sql.SQL("pg_catalog.concat({}) operator(pg_catalog.=) {}").format(column, text)
    schema, name = equality
    return sql.SQL("{} operator({}.{}) {}::{}").format(
        column, sql.Identifier(schema), sql.SQL(name), text, sql.SQL(type_sql)
    )


def lock_planned_tables(connection: Connection, tables: Iterable[PlannedTable]) -> None:
    """Lock the tables until the transaction ends; a partitioned table only itself.

    Dropped or added columns are not checked.

    Raises:
        PublisherNotReady: if another relation has a table's name, or a column has changed.
        MissingPrivilege, ServerUnavailable: as every statement.
    """
    for table in tables:
        with publisher_read_errors(table.name):
            _lock(connection, table)


def check_unchanged(connection: Connection, tables: Sequence[PlannedTable]) -> None:
    """Check that the snapshot saw all rows of these tables, and of their partitions, when they were read.

    The tables are locked; the locks of partitions were taken by reading them. VACUUM FULL and CLUSTER, which
    keep old rows, look like a rewrite.

    Raises:
        PublisherNotReady: naming the tables that lost or gained rows.
        MissingPrivilege, ServerUnavailable: as every statement.
    """
    action = f'cannot read table "{tables[0].name}" of the publisher' if tables else ""
    with translated_errors(action):
        rows = connection.execute(_CHANGED_TABLES, ([table.oid for table in tables],)).fetchall()
    if rows:
        raise PublisherNotReady(
            f"{action}: {', '.join(name for (name,) in rows)} was truncated, rewritten, attached or detached"
            " meanwhile",
            hint=_RUN_AGAIN,
            rule="R7.6",
        )


def _lock(connection: Connection, table: PlannedTable) -> None:
    if table.is_partitioned:
        read_only_tables(connection, foreign=True)
    columns = dict(_parsed_columns(connection, table))
    values = {"name": table.identifier.as_string(connection), "oid": table.oid}
    ((oid, is_stored, described),) = connection.execute(_RELATION, values).fetchall()
    if oid != table.oid:
        raise _changed(table, f"its name refers to another relation now, {described}")
    if not is_stored and not table.is_partitioned:
        raise _changed(table, f"it stores no rows any more, and is {described}")
    changed = [name for name, planned in table.columns.items() if columns.get(name, planned) != planned]
    if changed:
        bases = _base_types(connection, [table.columns[name][1] for name in changed])
        changed = [name for name in changed if columns[name] != _below_domains(table.columns[name], bases)]
    if changed:
        raise _changed(table, f"columns were replaced, or changed their types: {', '.join(changed)}")


def _base_types(connection: Connection, types: list[int]) -> dict[int, int]:
    """The base types of the domains among these types, which a statement's result description contains."""
    return dict(connection.execute(_BASE_TYPES, (types,)).fetchall())


def _below_domains(planned: tuple[int, int], bases: Mapping[int, int]) -> tuple[int, int]:
    attnum, type_oid = planned
    return attnum, bases.get(type_oid, type_oid)


def _parsed_columns(connection: Connection, table: PlannedTable) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name, number and type of the columns, from a statement that is never executed."""
    only = sql.SQL("" if table.is_partitioned else "only ")
    connection.execute(_PARSE.format(only, table.identifier))
    described = connection.pgconn.describe_prepared(_STATEMENT)
    if described.status != pq.ExecStatus.COMMAND_OK:
        raise pg.error_from_result(described)
    connection.execute(_FORGET)
    for index in range(described.nfields):
        name = described.fname(index) or b""
        yield name.decode(), (described.ftablecol(index), described.ftype(index))


def _changed(table: PlannedTable, reason: str) -> PublisherNotReady:
    message = f'cannot read table "{table.name}" of the publisher: {reason}'
    return PublisherNotReady(message, hint=_RUN_AGAIN, rule="R2.1")
