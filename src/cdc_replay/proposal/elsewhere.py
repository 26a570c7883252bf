"""Parses a proposal on a throw-away server that has the publisher's table definitions, and nothing of others.

| of the publisher                     | there                                                               |
|--------------------------------------|---------------------------------------------------------------------|
| a publishable table                  | an empty one: same columns at the same attribute numbers            |
| a column of a type of pg_catalog     | the same type and collation                                         |
| a column of any other type           | a domain over text, which no row filter may read either (R5.3)      |
| a generated column                   | generated as NULL                                                   |
| a partition                          | a hash partition of the copied parent: bounds do not matter         |
| an inheritance child                 | likewise a child (R2.16)                                            |
| a publication that is altered        | the same, its row filters printed from their trees                  |

The definitions that result are those of the publisher, with the publications that the proposal changed. A
row filter must mean the same there: it may have no oid that the servers assign themselves. Privileges are not
checked, and OWNER TO, which changes nothing of what is published, is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.errors import PublisherNotReady
from cdc_replay.filters.names import BUILT_IN, SAME_EVERYWHERE
from cdc_replay.filters.node_text import read_node
from cdc_replay.filters.printed import print_filters
from cdc_replay.model.proposed_change import ProposalRefused
from cdc_replay.model.publication import (
    Generated,
    Membership,
    Publication,
    PublishAction,
    PublisherCatalog,
    Table,
    TableColumn,
)
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.postgres.connection import Connection, connect, translated_errors
from cdc_replay.postgres.identifiers import commas, names
from cdc_replay.postgres.throwaway_server import throwaway_server
from cdc_replay.proposal.execution import Definitions, execute
from cdc_replay.proposal.statements import Statement

THROWAWAY: Final = "a throw-away server of the same version, with the publisher's table definitions"

_OWN_SCHEMA: Final = "cdc_replay_placeholders"
_PLACEHOLDER: Final = sql.Identifier(_OWN_SCHEMA, "user_defined")
_VERSION_UNIT: Final = 10_000
_GENERATED_SINCE: Final = 180_000
_OBJECT_NAMES: Final = frozenset({24, 2202, 2203, 2204, 2205, 2206, 3734, 3769, 4089, 4096, 4191})
"""Types whose values are oids: regproc and the like."""

_SHAPES: Final = """
    select (select pg_catalog.json_agg(nspname) from pg_catalog.pg_namespace
             where nspname !~ '^pg_' and nspname <> 'information_schema'),
           (select pg_catalog.json_agg(pg_catalog.json_build_array(inhrelid::bigint, inhparent::bigint))
              from pg_catalog.pg_inherits join pg_catalog.pg_class on pg_class.oid = inhparent
             where relkind = 'r'),
           (select pg_catalog.json_agg(
                       pg_catalog.json_build_array(attrelid::bigint, attnum, nspname, collname))
              from pg_catalog.pg_attribute
              join pg_catalog.pg_type on pg_type.oid = atttypid and attcollation <> typcollation
              join pg_catalog.pg_collation on pg_collation.oid = attcollation
              join pg_catalog.pg_namespace on pg_namespace.oid = collnamespace
             where attnum > 0 and attrelid = any (%s::oid[])),
           pg_catalog.getdatabaseencoding()
"""
_TYPES: Final = """
    select pg_type.oid::bigint, typmod, pg_catalog.format_type(pg_type.oid, typmod)
      from unnest(%s::oid[], %s::int4[]) as wanted (oid, typmod)
      join pg_catalog.pg_type using (oid)
      join pg_catalog.pg_namespace on pg_namespace.oid = typnamespace
     where nspname = 'pg_catalog'
"""
_COLLATIONS: Final = """
    select collname from pg_catalog.pg_collation
     where collnamespace = 'pg_catalog'::regnamespace and collname = any (%s::name[])
       and collencoding in (-1, pg_catalog.pg_char_to_encoding(pg_catalog.getdatabaseencoding()))
"""


@dataclass(frozen=True, slots=True)
class _Shapes:
    """What the catalog lacks of the publisher's tables: schemas, inheritance, collations, encoding."""

    schemas: tuple[str, ...]
    inheritance: tuple[tuple[RelationId, RelationId], ...]
    collations: Mapping[tuple[RelationId, int], tuple[str, str]]
    encoding: str

    @classmethod
    def read(cls, publisher: Connection, catalog: PublisherCatalog) -> _Shapes:
        ((schemas, inheritance, collations, encoding),) = publisher.execute(
            _SHAPES, (list(catalog.tables),)
        ).fetchall()
        return cls(
            schemas=tuple(schemas or ()),
            inheritance=tuple((RelationId(child), RelationId(parent)) for child, parent in inheritance or ()),
            collations={
                (RelationId(table), attnum): (schema, name)
                for table, attnum, schema, name in collations or ()
            },
            encoding=encoding,
        )


def parse_elsewhere(
    dsn: str, purpose: str, statements: Sequence[Statement], because: str, bin_folder: Path | None = None
) -> Definitions:
    """What the proposal would make of the publisher's catalog; `because`: why not parsed there.

    Raises:
        ServerUnavailable, MissingPrivilege: if the publisher does not answer, or its catalog cannot be read.
        ServerProgramsMissing, ThrowawayServerFailed: if there can be no throw-away server.
        PublisherNotReady: if definitions cannot be copied, or a row filter means something else there.
    """
    with connect(dsn, purpose=purpose) as publisher:
        present = read_catalog(publisher)
        with translated_errors("cannot read the publisher's catalog"):
            shapes = _Shapes.read(publisher, present)
        altered = _altered(publisher, present, statements)
    major = present.server_version // _VERSION_UNIT
    with throwaway_server(major, bin_folder=bin_folder) as server:
        with connect(server.dsn, purpose=purpose) as connection:
            _create_database(connection, shapes.encoding)
        with (
            connect(make_conninfo(server.dsn, dbname=_OWN_SCHEMA), purpose=purpose) as connection,
            translated_errors("cannot copy the publisher's definitions"),
        ):
            _copy(connection, present, shapes, altered)
            before = read_catalog(connection)
            refusal = _try(connection, statements)
            after = read_catalog(connection)
    if refusal is not None:
        return Definitions(present, None, THROWAWAY, because, refusal)
    proposed = dataclasses.replace(present, publications=_graft(present, before, after, statements))
    return Definitions(present, proposed, THROWAWAY, because)


def _create_database(connection: Connection, encoding: str) -> None:
    create = "create database {} template template0 encoding {} lc_collate 'C' lc_ctype 'C'"
    connection.execute(sql.SQL(create).format(sql.Identifier(_OWN_SCHEMA), sql.Literal(encoding)))


def _try(connection: Connection, statements: Sequence[Statement]) -> ProposalRefused | None:
    with connection.transaction():
        return execute(connection, [statement for statement in statements if not statement.new_owner])


# ---- definitions


def _altered(
    publisher: Connection, catalog: PublisherCatalog, statements: Sequence[Statement]
) -> tuple[sql.Composed, ...]:
    """The statements that create the publications that the proposal names, as they are now."""
    mentioned = dict.fromkeys(name for statement in statements for name in statement.publications)
    existing = catalog.existing(tuple(mentioned))
    return tuple(_create_publication(publisher, catalog, publication) for publication in existing)


def _create_publication(
    publisher: Connection, catalog: PublisherCatalog, publication: Publication
) -> sql.Composed:
    parts: list[sql.Composable] = [sql.SQL("create publication {}").format(sql.Identifier(publication.name))]
    members: list[sql.Composable] = [
        _member(publisher, catalog.tables[relation], membership)
        for relation, membership in publication.memberships.items()
    ]
    members += [
        sql.SQL("tables in schema {}").format(sql.Identifier(schema))
        for schema in sorted(publication.schemas)
    ]
    if publication.all_tables:
        parts.append(sql.SQL("for all tables"))
    elif members:
        parts.append(sql.SQL("for {}").format(commas(members)))
    actions = ", ".join(action.value for action in PublishAction if action in publication.actions)
    options: list[sql.Composable] = [
        sql.SQL("publish = {}").format(sql.Literal(actions)),
        sql.SQL("publish_via_partition_root = {}").format(sql.Literal(publication.via_root)),
    ]
    if publication.publish_generated and catalog.server_version >= _GENERATED_SINCE:
        options.append(sql.SQL("publish_generated_columns = stored"))
    return sql.SQL(" ").join([*parts, sql.SQL("with ({})").format(commas(options))])


def _member(publisher: Connection, table: Table, membership: Membership) -> sql.Composed:
    parts: list[sql.Composable] = [sql.SQL("table only {}").format(_name(table.name))]
    if membership.columns is not None:
        parts.append(sql.SQL("({})").format(names(sorted(membership.columns))))
    if membership.row_filter is not None:
        parts.append(sql.SQL("where ({})").format(print_filters(publisher, table, [membership.row_filter])))
    return sql.SQL(" ").join(parts)


def _name(name: QualifiedName) -> sql.Identifier:
    return sql.Identifier(name.schema, name.name)


def _copy(
    connection: Connection, catalog: PublisherCatalog, shapes: _Shapes, publications: Sequence[sql.Composed]
) -> None:
    copied = _Copy(connection, catalog, shapes, _known_types(connection, catalog), _known(connection, shapes))
    with connection.transaction():
        for statement in (*copied.statements(), *publications):
            connection.execute(statement)


def _known_types(connection: Connection, catalog: PublisherCatalog) -> dict[tuple[int, int], str]:
    """The types of pg_catalog, with lengths, as this server prints them."""
    columns = {
        (column.type_oid, column.typmod) for table in catalog.tables.values() for column in table.columns
    }
    wanted = sorted(pair for pair in columns if pair[0] < BUILT_IN)
    oids, typmods = ([pair[index] for pair in wanted] for index in range(2))
    rows = connection.execute(_TYPES, (oids, typmods)).fetchall()
    return {(oid, typmod): text for oid, typmod, text in rows}


def _known(connection: Connection, shapes: _Shapes) -> frozenset[str]:
    wanted = sorted({name for schema, name in shapes.collations.values() if schema == "pg_catalog"})
    return frozenset(name for (name,) in connection.execute(_COLLATIONS, (wanted,)).fetchall())


@dataclass(frozen=True, slots=True)
class _Copy:
    """The statements that create the tables; `types` are those of pg_catalog, by oid and length."""

    connection: Connection
    catalog: PublisherCatalog
    shapes: _Shapes
    types: Mapping[tuple[int, int], str]
    collations: frozenset[str]

    def statements(self) -> Iterator[sql.Composed]:
        """In the order of execution."""
        schemas = {*self.shapes.schemas, *(table.name.schema for table in self.catalog.tables.values())}
        for schema in sorted({*schemas, _OWN_SCHEMA}):
            yield sql.SQL("create schema if not exists {}").format(sql.Identifier(schema))
        yield sql.SQL("create domain {} as text").format(_PLACEHOLDER)
        yield sql.SQL("create collation {} (locale = 'C')").format(_PLACEHOLDER)
        for table in self.catalog.tables.values():
            yield from self._create(table)
        for table in self.catalog.tables.values():
            if table.is_partitioned and _partition_key(table) is not None:
                yield from self._attach(table)
        for child, parent in self.shapes.inheritance:
            if child in self.catalog.tables and parent in self.catalog.tables:
                yield sql.SQL("alter table {} inherit {}").format(
                    *(_name(self.catalog.tables[relation].name) for relation in (child, parent))
                )

    def _create(self, table: Table) -> Iterator[sql.Composed]:
        live = {column.attnum: column for column in table.columns}
        width = len(table.columns) + table.dropped_columns
        gaps = {attnum: sql.Identifier(f"dropped {attnum}") for attnum in range(1, width + 1)}
        columns = [
            self._column(table, live[attnum]) if attnum in live else sql.SQL("{} int").format(gap)
            for attnum, gap in gaps.items()
        ]
        key = _partition_key(table) if table.is_partitioned else None
        # A partition key is an expression: it does not matter, and every type can be asked for NULL.
        by = sql.SQL("" if key is None else " partition by hash (({} is null))")
        yield sql.SQL("create {}table {} ({}){}").format(
            sql.SQL("" if table.is_publishable or table.is_partitioned else "unlogged "),
            _name(table.name),
            commas(columns),
            by if key is None else by.format(sql.Identifier(key)),
        )
        for attnum, gap in gaps.items():
            if attnum not in live:
                yield sql.SQL("alter table {} drop column {}").format(_name(table.name), gap)

    def _column(self, table: Table, column: TableColumn) -> sql.Composed:
        printed = self.types.get((column.type_oid, column.typmod))
        # The text comes from the throw-away server itself.
        parts: list[sql.Composable] = [
            sql.Identifier(column.name),
            _PLACEHOLDER if printed is None else sql.SQL(printed),
        ]
        schema, collation = self.shapes.collations.get((table.id, column.attnum), ("", ""))
        if printed is not None and schema:
            is_builtin = schema == "pg_catalog" and collation in self.collations
            found_there = sql.Identifier(schema, collation) if is_builtin else _PLACEHOLDER
            parts.append(sql.SQL("collate {}").format(found_there))
        if column.generated is not Generated.NO:
            kind = sql.SQL("stored" if column.generated is Generated.STORED else "virtual")
            parts.append(sql.SQL("generated always as (null) {}").format(kind))
        return sql.SQL(" ").join(parts)

    def _attach(self, parent: Table) -> Iterator[sql.Composed]:
        children = [table for table in self.catalog.tables.values() if table.parent == parent.id]
        for remainder, child in enumerate(children):
            yield sql.SQL(
                "alter table {} attach partition {} for values with (modulus {}, remainder {})"
            ).format(_name(parent.name), _name(child.name), len(children), remainder)


def _partition_key(table: Table) -> str | None:
    return next((column.name for column in table.columns if column.generated is Generated.NO), None)


# ---- publications, as the publisher would have them


def _graft(
    present: PublisherCatalog,
    before: PublisherCatalog,
    after: PublisherCatalog,
    statements: Sequence[Statement],
) -> dict[str, Publication]:
    """The publisher's publications, with those that the proposal creates, changes or drops.

    What the proposal leaves as it was keeps its form: a row filter is compared by its tree.
    """
    relations = {table.name: table.id for table in present.tables.values()}
    publishers = {
        publication.oid: present.publications[name]
        for name, publication in before.publications.items()
        if name in present.publications
    }
    earlier = {publication.oid: publication for publication in before.publications.values()}
    mentioned = {name for statement in statements for name in statement.publications}
    kept = {name: entry for name, entry in present.publications.items() if name not in mentioned}
    for name, publication in after.publications.items():
        memberships = {}
        for relation, membership in publication.memberships.items():
            own = relations[after.tables[relation].name]
            was = earlier.get(publication.oid)
            if was is not None and was.memberships.get(relation) == membership:
                memberships[own] = publishers[publication.oid].memberships[own]
            else:
                memberships[own] = _portable(dataclasses.replace(membership, relation=own), own, present)
        kept[name] = dataclasses.replace(publication, memberships=memberships)
    return kept


def _portable(membership: Membership, relation: RelationId, catalog: PublisherCatalog) -> Membership:
    """The membership, if its row filter means the same on the publisher.

    Raises:
        PublisherNotReady: if it has an oid that each server assigns itself.
    """
    if membership.row_filter is None:
        return membership
    for node in read_node(membership.row_filter.node_tree).walk():
        is_object = node.name == "CONST" and node.integer("consttype") in _OBJECT_NAMES
        if is_object or any(_is_assigned(name, value) for name, value in node.fields.items()):
            raise PublisherNotReady(
                f'a row filter of table "{catalog.tables[relation].name}" cannot be planned on a throw-away'
                " server: it names an object, or a collation, that has another oid there",
                detail=f"The filter is {membership.row_filter.sql}.",
                hint="Let a role plan it that may execute it on the publisher.",
                rule="R5.3",
            )
    return membership


def _is_assigned(name: str, value: Sequence[Any]) -> bool:
    """Whether a field has the oid of a collation that a server has assigned."""
    if "coll" not in name.lower():
        return False
    with contextlib.suppress(TypeError, ValueError):
        return any(int(part) >= SAME_EVERYWHERE for part in value)
    return False
