"""Indexes of an empty target are built after its rows are copied: this saves a third of the load time.

Only where the result is the same. Inside a savepoint, on the empty table, all indexes are dropped and created
again from their definitions. If the catalogs then describe them exactly as before, the same is done with the
rows in between; otherwise the table stays as it is:

| differs, or refused                  | because                                                           |
|--------------------------------------|-------------------------------------------------------------------|
| a comment, storage parameters, a     | not part of the index definition                                  |
| tablespace, statistics targets, the  |                                                                   |
| replica identity, the clustered mark |                                                                   |
| a foreign key or a view              | depends on the index: the server refuses to drop it               |
| the index of a partition             | belongs to that of the partitioned table                          |
| the table is in use                  | we do not wait for the lock                                       |
| the table has rows                   | indexing them again takes the saved time                          |
| a trigger fires for inserted rows    | may need the indexes, or be pending when they are built           |
| the role does not own the table      | it may only insert                                                |
| less than a megabyte is copied       | the attempt takes longer than indexing the rows one by one        |

The lock blocks readers until the transaction ends; before, they saw an empty table. Indexes and rows are one
transaction: a kill leaves the indexes as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from cdc_replay.postgres.connection import Connection

INDEXES: Final = """
    select class.oid, class.relname::text, conname::text,
           pg_catalog.pg_get_indexdef(class.oid), pg_catalog.pg_get_constraintdef(pg_constraint.oid)
      from pg_catalog.pg_index
      join pg_catalog.pg_class as class on class.oid = indexrelid
      left join pg_catalog.pg_constraint
        on conindid = indexrelid and conrelid = indrelid and contype in ('p', 'u', 'x')
     where indrelid = %s::regclass
     order by class.oid
"""

# Everything in the catalogs, without object ids and statistics. Before 17 a stored expression has the
# positions of its parts in the statement that created the index.
DESCRIBED: Final = """
    select pg_catalog.jsonb_build_object(
        'table', (select pg_catalog.to_jsonb(c) - '{relfilenode,relpages,reltuples,relallvisible,
                relallfrozen,relfrozenxid,relminmxid,relhasindex}'::text[]
            from pg_catalog.pg_class as c where oid = target.oid),
        'columns', (select pg_catalog.jsonb_agg(pg_catalog.to_jsonb(a) order by attnum)
            from pg_catalog.pg_attribute as a where attrelid = target.oid),
        'indexes', (select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(
                    pg_catalog.to_jsonb(i) - '{indexrelid,indexprs,indpred}'::text[],
                    pg_catalog.regexp_replace(i.indexprs::text, ' :location -?[0-9]+', '', 'g'),
                    pg_catalog.regexp_replace(i.indpred::text, ' :location -?[0-9]+', '', 'g'),
                    pg_catalog.to_jsonb(c)
                        - '{oid,relfilenode,relpages,reltuples,relfrozenxid,relminmxid}'::text[],
                    pg_catalog.pg_get_indexdef(c.oid), pg_catalog.obj_description(c.oid, 'pg_class'),
                    (select pg_catalog.jsonb_agg(pg_catalog.to_jsonb(a) - 'attrelid' order by attnum)
                        from pg_catalog.pg_attribute as a where attrelid = c.oid),
                    (select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(
                                refclassid, refobjid, refobjsubid, deptype)
                            order by refclassid, refobjid, refobjsubid, deptype)
                        from pg_catalog.pg_depend
                        where classid = 'pg_catalog.pg_class'::regclass and objid = c.oid
                            and refclassid <> 'pg_catalog.pg_constraint'::regclass)) order by c.relname)
            from pg_catalog.pg_index as i join pg_catalog.pg_class as c on c.oid = indexrelid
            where indrelid = target.oid),
        'constraints', (select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(
                    pg_catalog.to_jsonb(o) - '{oid,conindid}'::text[],
                    pg_catalog.pg_get_constraintdef(o.oid),
                    pg_catalog.obj_description(o.oid, 'pg_constraint'))
                order by conname)
            from pg_catalog.pg_constraint as o where conrelid = target.oid),
        'referenced', (select pg_catalog.count(*) from pg_catalog.pg_constraint where confrelid = target.oid),
        'published', (select pg_catalog.jsonb_agg(pg_catalog.to_jsonb(p) order by oid)
            from pg_catalog.pg_publication_rel as p where prrelid = target.oid)
    )::text
    from (select %s::regclass::oid) as target (oid)
"""


REBUILD_FROM_BYTES: Final = 1 << 20
"""Copies of less are not worth the dozen statements: 500 tables of a hundred rows took twice as long."""


@dataclass(frozen=True, slots=True)
class _Index:
    name: str
    constraint: str | None
    definition: str
    constraint_definition: str | None


@contextlib.contextmanager
def indexes_rebuilt_after(connection: Connection, schema: str, table: str, size_bytes: int) -> Iterator[None]:
    """Drop the table's indexes while the context fills it, in the caller's transaction, then rebuild them.

    If they cannot be rebuilt exactly, or about `size_bytes` of rows are not worth it, nothing is dropped, and
    rows are indexed one by one.
    """
    is_worth_it = size_bytes >= REBUILD_FROM_BYTES
    indexes = _find_rebuildable(connection, schema, table) if is_worth_it else ()
    target = sql.Identifier(schema, table)
    _drop(connection, schema, target, indexes)
    yield
    _create(connection, target, indexes)


def _find_rebuildable(connection: Connection, schema: str, table: str) -> tuple[_Index, ...]:
    """The table's indexes if they can be rebuilt exactly, with the table locked; else none."""
    target = sql.Identifier(schema, table)
    with contextlib.suppress(psycopg.Error), connection.transaction():
        connection.execute(sql.SQL("lock table only {} in access exclusive mode nowait").format(target))
        rows = connection.execute(INDEXES, [target.as_string(connection)]).fetchall()
        indexes = tuple(_Index(*row[1:]) for row in rows)
        if _is_empty_without_triggers(connection, target) and _rebuild_changes_nothing(
            connection, schema, target, indexes
        ):
            return indexes
    return ()


def _is_empty_without_triggers(connection: Connection, target: sql.Identifier) -> bool:
    """Whether it is a plain table without rows, and without triggers that fire for an apply worker."""
    query = sql.SQL(
        "select relkind = 'r' and not exists (select from only {}) and not exists ("
        " select from pg_catalog.pg_trigger where tgrelid = class.oid and not tgisinternal"
        " and tgenabled in ('A', 'R'))"
        " from pg_catalog.pg_class as class where oid = %s::regclass"
    ).format(target)
    ((is_empty,),) = connection.execute(query, [target.as_string(connection)]).fetchall()
    return bool(is_empty)


def _rebuild_changes_nothing(
    connection: Connection, schema: str, target: sql.Identifier, indexes: tuple[_Index, ...]
) -> bool:
    before = _describe(connection, target)
    with connection.transaction(force_rollback=True):
        _drop(connection, schema, target, indexes)
        _create(connection, target, indexes)
        return _describe(connection, target) == before


def _describe(connection: Connection, target: sql.Identifier) -> str:
    ((description,),) = connection.execute(DESCRIBED, [target.as_string(connection)]).fetchall()
    return str(description)


def _drop(connection: Connection, schema: str, target: sql.Identifier, indexes: tuple[_Index, ...]) -> None:
    for index in indexes:
        if index.constraint is not None:
            statement = sql.SQL("alter table only {} drop constraint {}")
            connection.execute(statement.format(target, sql.Identifier(index.constraint)))
        else:
            connection.execute(sql.SQL("drop index {}").format(sql.Identifier(schema, index.name)))


def _create(connection: Connection, target: sql.Identifier, indexes: tuple[_Index, ...]) -> None:
    for index in indexes:
        if index.constraint is not None and index.constraint_definition is not None:
            statement = sql.SQL("alter table only {} add constraint {} ").format(
                target, sql.Identifier(index.constraint)
            )
            connection.execute(
                statement.as_string(connection).encode() + index.constraint_definition.encode()
            )
        else:
            connection.execute(index.definition.encode())
