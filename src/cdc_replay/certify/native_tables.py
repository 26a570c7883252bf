"""The tables of the native subscriber: plain copies of ours, as far as a bare server can hold them.

Nothing of the table's owner is copied: no defaults, triggers, constraints, generated columns, partitions or
functions. A native apply worker needs columns that accept the values, and the key that finds a row.

| a column's type on our subscriber       | on the throw-away server                                         |
|-----------------------------------------|------------------------------------------------------------------|
| of pg_catalog, a domain over such a one | the same, below the domain                                       |
| of a user or an extension, as published | text: it stores what was sent, the type's own output (R8.2)      |
| `xml`, `money`, `regclass` and such     | text: their input depends on the build, the locale, the objects  |
| another one than the publisher's        | the table is left out: only that type's input knows the value    |

A partitioned table is one plain table, so that rows are found as they are here (R8.11, R8.12).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.model.publication import PublisherCatalog, Table
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.identifiers import commas, names
from cdc_replay.publication.resolve import SyncedTable, resolve, synced_tables
from cdc_replay.subscriber.target_tables import TargetTable

TEXT: Final = "text"
_TEXT_IS_SAFER: Final = ("xml", "money", "reg")
"""Beginnings of the names of types of pg_catalog whose input functions need more than the text."""

_KNOWN_TYPE: Final = "select pg_catalog.to_regtype(%s) is not null"


@dataclass(frozen=True, slots=True)
class NativeTable:
    """A table to create: columns with their types, and the columns of its primary key, or none.

    `why_left_out` is set if it exists only because CREATE SUBSCRIPTION asks for it, and is not compared.
    """

    name: QualifiedName
    columns: Mapping[str, str]
    key: tuple[str, ...]
    why_left_out: str | None = None
    is_subscribed: bool = True


def plan_native_tables(
    catalog: PublisherCatalog,
    publications: Sequence[str],
    targets: Mapping[QualifiedName, TargetTable | None],
    server: Connection,
) -> tuple[NativeTable, ...]:
    """The tables that a native subscription to `publications` needs, in the order of their names.

    `targets` are the subscription's tables, None for those that do not exist on our subscriber.

    Raises:
        PublicationRefused: if PostgreSQL refuses the publications.
    """
    listed = {synced.table.name: synced for synced in synced_tables(catalog, publications)}
    planned = [_planned(synced, targets, server) for synced in listed.values()]
    planned += [
        NativeTable(table.name, _types_of(table, server), (), "only changes name it, and no copy", False)
        for table in _named_by_changes(catalog, publications)
        if table.name not in listed
    ]
    return tuple(sorted(planned, key=lambda table: table.name))


def create_native_tables(server: Connection, tables: Collection[NativeTable]) -> None:
    """Create schemas and tables in one transaction."""
    with server.transaction():
        for schema in sorted({table.name.schema for table in tables} - {"public"}):
            server.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))
        for table in tables:
            server.execute(_create(table))


def _planned(
    synced: SyncedTable, targets: Mapping[QualifiedName, TargetTable | None], server: Connection
) -> NativeTable:
    name = synced.table.name
    target = targets.get(name)
    published = synced.columns or synced.unpublished
    types = {
        column: type_sql
        for column, type_sql in _types_of(synced.table, server).items()
        if column in published
    }
    key = tuple(synced.table.key_columns or synced.table.primary_key)
    reason: str | None = None
    if not synced.columns:
        reason = (
            "none of its columns is published, and a native copy of it fails unless the table fits (R6.9)"
        )
    elif target is not None:
        key = target.identity
        own = {column.name: column for column in target.columns}
        for column in set(published) & own.keys():
            own_type = own[column].base_type_sql
            if _exists(server, own_type):
                types[column] = own_type
            elif own[column].type_sql == synced.table.column(column).type_sql or own_type.startswith(
                _TEXT_IS_SAFER
            ):
                types[column] = TEXT
            else:
                reason = (
                    f"its column {column} is of type {own[column].type_sql} here, which a throw-away server"
                    f" lacks, and of type {synced.table.column(column).type_sql} on the publisher"
                )
    complete = tuple(key) if set(key) <= set(types) else ()
    return NativeTable(name, types, complete, reason, name in targets)


def _types_of(table: Table, server: Connection) -> dict[str, str]:
    """The publisher's own types, and text for those that the server lacks."""
    return {
        column.name: column.type_sql if _exists(server, column.type_sql) else TEXT for column in table.columns
    }


def _exists(server: Connection, type_sql: str) -> bool:
    """Whether a type is one of pg_catalog that the server has; others are written with their schema."""
    if "." in type_sql or type_sql.startswith(_TEXT_IS_SAFER):
        return False
    return bool(server.execute(_KNOWN_TYPE, (type_sql,)).fetchall()[0][0])


def _named_by_changes(catalog: PublisherCatalog, publications: Sequence[str]) -> Iterator[Table]:
    """The relations as which changes are published: an apply worker opens each, also if it skips it."""
    named = {}
    for table in catalog.tables.values():
        published = None if table.is_partitioned else resolve(catalog, publications, table.id)
        if published is not None:
            named[published.table.name] = published.table
    yield from named.values()


def _create(table: NativeTable) -> sql.Composed:
    columns: list[sql.Composable] = [
        # A type of pg_catalog, which the server has looked up, or text.
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(type_sql))
        for name, type_sql in table.columns.items()
    ]
    if table.key:
        columns.append(sql.SQL("primary key ({})").format(names(table.key)))
    name = sql.Identifier(table.name.schema, table.name.name)
    return sql.SQL("create table {} ({})").format(name, commas(columns))
