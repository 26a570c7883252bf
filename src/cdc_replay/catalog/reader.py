"""Reads the publisher's system catalogs into a `PublisherCatalog`.

The queries are values (`CatalogRows`), because the event triggers use them too, for the objects of a DDL
command (`capture.ddl.event_triggers`); `ddl_change` parses their rows.

Five statements under one snapshot, for any number of tables. Columns that only later versions have (18:
`pg_publication.pubgencols`; 19: `pg_publication_rel.prexcept`) are read through `to_jsonb`.

Catalog rows come from the snapshot, but `pg_get_expr` and `format_type` use the newest definitions. So
concurrent DDL can show in printed expressions; node trees, names and oids are those of the snapshot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final, LiteralString, TypeAlias

from psycopg import errors as pg
from psycopg import sql
from psycopg.pq import TransactionStatus

from cdc_replay.errors import PublisherNotReady
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import (
    Generated,
    Membership,
    Publication,
    PublishAction,
    PublisherCatalog,
    RowFilter,
    Table,
    TableColumn,
)
from cdc_replay.model.relation import QualifiedName, RelationId, ReplicaIdentity
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.postgres.server_version import check_version

CatalogRow: TypeAlias = Sequence[Any]
"""A tuple of the reader, or a JSON array of a catalog message, which has the same elements."""

_Names: TypeAlias = Mapping[int, str]

# A standby has no flush position of its own; what it has replayed is what it can decode (R1.21).
_POSITION: Final = """
    select case when pg_is_in_recovery() then pg_last_wal_replay_lsn()::text
        else pg_current_wal_flush_lsn()::text end
"""


@dataclass(frozen=True, slots=True)
class CatalogRows:
    """The query for one kind of catalog rows.

    `row` is a list of expressions, for `select …` and for `json_build_array(…)`; `source` has a condition
    `{only}` on the aliases of its tables; `text` replaces `{text}` in `row`: an expression's text, which the
    server prints under a lock on its table, or fails to print; `no_text` is without it.
    """

    row: LiteralString
    source: LiteralString
    order: LiteralString
    text: LiteralString = ""
    no_text: LiteralString = ""

    def select(self, only: sql.Composable, *, texts: bool = True) -> sql.Composed:
        """Select the rows as tuples; without `texts` these are NULL and no lock is needed."""
        source = sql.SQL(self.source).format(only=only)
        return sql.SQL("select {} {} order by {}").format(self._row(texts), source, sql.SQL(self.order))

    def select_json(self, only: sql.Composable, *, texts: bool = True) -> sql.Composed:
        """The same as one JSON array of arrays."""
        source = sql.SQL(self.source).format(only=only)
        return sql.SQL(
            "select coalesce(json_agg(json_build_array({}) order by {}), '[]') {}"
        ).format(self._row(texts), sql.SQL(self.order), source)  # fmt: skip

    def _row(self, texts: bool) -> sql.Composed:
        return sql.SQL(self.row).format(text=sql.SQL(self.text if texts else self.no_text))


# R2.1: an unlogged table is never published, but it can be a partition or the root of published tables.
# R1.8: the identity of a table is an index that is unique, valid, immediate and not partial, or nothing.
TABLES: Final = CatalogRows(
    row="""c.oid::bigint, n.nspname, c.relname, c.relkind = 'p', c.relpersistence = 'p', i.inhparent::bigint,
        c.relreplident, (identity.indkey::int2[])[0:identity.indnkeyatts - 1],
        (pk.indkey::int2[])[0:pk.indnkeyatts - 1], c.relnatts""",
    source="""from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    left join pg_inherits i on i.inhrelid = c.oid and c.relispartition and not i.inhdetachpending
    left join pg_index pk on pk.indrelid = c.oid and pk.indisprimary
    left join pg_index identity on identity.indrelid = c.oid
        and identity.indisunique and identity.indisvalid and identity.indimmediate
        and identity.indpred is null
        and case c.relreplident when 'd' then identity.indisprimary when 'i' then identity.indisreplident end
    where c.relkind in ('r', 'p') and c.oid >= 16384
        and (c.relpersistence = 'p' or c.relpersistence = 'u' and (c.relkind = 'p' or c.relispartition))
        and {only}""",
    order="c.oid",
)
"""Publishable tables `c`."""

# Only a row filter of the same table makes anybody read a generation expression. Printing it takes a lock on
# its table, without limit, and the stack depth of a nested one: the owner of any other table could make every
# command wait or fail. The limits bound the catalog, and are those of trees, which need neither.
COLUMNS: Final = CatalogRows(
    row="""a.attrelid::bigint, a.attnum, a.attname, a.atttypid::bigint, a.atttypmod,
        format_type(a.atttypid, a.atttypmod),
        case when a.attcollation <> t.typcollation
            then quote_ident(collation_schema.nspname) || '.' || quote_ident(l.collname) end,
        a.attgenerated,
        case when a.attgenerated <> '' and octet_length(d.adbin::text) <= 65536
            and exists (
                select from pg_publication_rel f where f.prrelid = a.attrelid and f.prqual is not null
            )
            then {text} end,
        case when a.attgenerated <> '' and octet_length(d.adbin::text) <= case when exists (
                select from pg_publication_rel f where f.prrelid = a.attrelid and f.prqual is not null
            ) then 65536 else 4096 end
            then d.adbin::text end""",
    source="""from pg_attribute a
    join pg_type t on t.oid = a.atttypid
    left join pg_collation l on l.oid = a.attcollation
    left join pg_namespace collation_schema on collation_schema.oid = l.collnamespace
    left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where a.attnum > 0 and not a.attisdropped and {only}""",
    order="a.attrelid, a.attnum",
    text="pg_get_expr(d.adbin, d.adrelid)",
    no_text="null::text",
)
"""Live columns `a`. Generation expressions: the text only of tables with a row filter; none that is long."""

PUBLICATIONS: Final = CatalogRows(
    row="""p.oid::bigint, p.pubname, p.puballtables, p.pubviaroot,
        p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate,
        array(select n.nspname::text from pg_publication_namespace m join pg_namespace n on n.oid = m.pnnspid
            where m.pnpubid = p.oid),
        coalesce(to_jsonb(p) ->> 'pubgencols' = 's', false)""",
    source="from pg_publication p where {only}",
    order="p.pubname",
)
"""Publications `p`."""

MEMBERSHIPS: Final = CatalogRows(
    row="""m.prpubid::bigint, m.prrelid::bigint, m.prqual::text, {text}, m.prattrs::int2[],
        coalesce((to_jsonb(m) ->> 'prexcept')::boolean, false)""",
    source="from pg_publication_rel m where {only}",
    order="m.prpubid, m.prrelid",
    text="pg_get_expr(m.prqual, m.prrelid)",
    no_text="null::text",
)
"""Tables `m` that publications list or except (R2.18)."""

_SHORT_TREE_BYTES: Final = 4096
"""Of a generation expression that no row filter can read, as in `COLUMNS`."""

_CANNOT_READ: Final = "cannot read the publisher's catalog"

_EVERYTHING: Final = sql.SQL("true")

_SET_LOCK_TIMEOUT: Final = """
    select pg_catalog.current_setting('lock_timeout'), pg_catalog.set_config('lock_timeout', %s, true)
"""

_NO_TEXTS: Final = (pg.LockNotAvailable, pg.StatementTooComplex, pg.ProgramLimitExceeded, pg.InternalError_)
"""Errors for texts: another session has locked the table, or the expression is nested too deeply."""


def read_catalog(connection: Connection, lsn: Lsn | None = None, *, texts: bool = True) -> PublisherCatalog:
    """All publications and publishable tables of the connection's database, from one snapshot.

    `texts`: also read the texts of row filters, and of generated columns of tables with one. A table that is
    locked, or cannot be printed, has none, and is waited for half a second. An open transaction of the caller
    is used; it must be repeatable read. `lsn` becomes the catalog's position (default: the current WAL flush
    position).

    Raises:
        PublisherNotReady: if the server's version is not supported (R2.18), or a name is not UTF-8 (R1.11).
        MissingPrivilege, ServerUnavailable: if the catalogs cannot be read.
    """
    check_version(connection)
    with _readable_names(), translated_errors(_CANNOT_READ), single_snapshot(connection):
        position = lsn or Lsn.parse(connection.execute(_POSITION).fetchall()[0][0])
        tables = connection.execute(TABLES.select(_EVERYTHING)).fetchall()
        relations = [row[0] for row in tables]
        publications = connection.execute(PUBLICATIONS.select(_EVERYTHING)).fetchall()
        columns, memberships = _read_texts(connection, relations) if texts else _read(connection, relations)
    parsed_tables = parse_tables(tables, columns)
    memberships_by_publication = parse_memberships(memberships, parsed_tables)
    return PublisherCatalog(
        lsn=position,
        server_version=connection.info.server_version,
        publications={
            row[1]: parse_publication(row, memberships_by_publication.get(row[0], {})) for row in publications
        },
        tables=parsed_tables,
    )


@contextlib.contextmanager
def _readable_names() -> Iterator[None]:
    try:
        yield
    except (pg.UntranslatableCharacter, pg.CharacterNotInRepertoire) as error:
        raise PublisherNotReady(
            f"{_CANNOT_READ}: {error.diag.message_primary}",
            detail="A table, column, type or publication, perhaps of an unpublished table, has such a name.",
            hint="Let its owner or a superuser rename or drop it, then run the command again.",
            rule="R1.11",
        ) from error


def _read(
    connection: Connection, relations: Sequence[int], *, texts: bool = False
) -> tuple[list[CatalogRow], list[CatalogRow]]:
    """The rows of `COLUMNS` and `MEMBERSHIPS` of the relations."""
    columns = connection.execute(COLUMNS.select(_any_of("a.attrelid"), texts=texts), (relations,))
    memberships = connection.execute(MEMBERSHIPS.select(_any_of("m.prrelid"), texts=texts), (relations,))
    return [*columns], [*memberships]


def _read_texts(
    connection: Connection, relations: Sequence[int]
) -> tuple[list[CatalogRow], list[CatalogRow]]:
    """The same with texts, but for a table that is locked or cannot be printed."""
    with contextlib.suppress(*_NO_TEXTS):
        return _read_within(connection, relations, "500ms")
    columns, memberships = _read(connection, relations)
    filtered = {row[1] for row in memberships if row[2] is not None}
    columns = [row for row in columns if row[0] not in filtered]
    memberships = [row for row in memberships if row[1] not in filtered]
    for relation in sorted(filtered):
        try:
            more = _read_within(connection, [relation], "1ms")
        except _NO_TEXTS:
            more = _read(connection, [relation])
        columns += more[0]
        memberships += more[1]
    return sorted(columns, key=lambda row: (int(row[0]), int(row[1]))), memberships


def _read_within(
    connection: Connection, relations: Sequence[int], lock_timeout: str
) -> tuple[list[CatalogRow], list[CatalogRow]]:
    with connection.transaction():
        ((before, _),) = connection.execute(_SET_LOCK_TIMEOUT, (lock_timeout,))
        rows = _read(connection, relations, texts=True)
        connection.execute(_SET_LOCK_TIMEOUT, (before,))
        return rows


def _any_of(column: LiteralString) -> sql.Composed:
    return sql.SQL("{} = any(%s)").format(sql.SQL(column))


@contextlib.contextmanager
def single_snapshot(connection: Connection) -> Iterator[None]:
    """Run the block in one repeatable read transaction; an open transaction is used as it is.

    Raises:
        psycopg.Error: if the server fails.
    """
    if connection.info.transaction_status is not TransactionStatus.IDLE:
        yield
        return
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read, read only")
        # format_type and pg_get_expr omit schemas that are in the search path.
        connection.execute("set local search_path = ''")
        yield


def parse_tables(rows: Iterable[CatalogRow], columns: Iterable[CatalogRow]) -> dict[RelationId, Table]:
    """The tables of rows of `TABLES` and (ordered) `COLUMNS`."""
    columns_of = {
        relation: tuple(rows_of_table) for relation, rows_of_table in groupby(columns, key=lambda row: row[0])
    }
    return {RelationId(row[0]): _table(row, columns_of.get(row[0], ())) for row in rows}


def _table(row: CatalogRow, columns: Sequence[CatalogRow]) -> Table:
    (
        oid,
        schema,
        name,
        is_partitioned,
        is_permanent,
        parent,
        replica_identity,
        identity,
        primary_key,
        width,
    ) = row
    names = {column[1]: column[2] for column in columns}
    return Table(
        id=RelationId(oid),
        name=QualifiedName(schema, name),
        is_partitioned=is_partitioned,
        parent=None if parent is None else RelationId(parent),
        replica_identity=ReplicaIdentity(replica_identity),
        key_columns=_column_names(identity, names),
        primary_key=_column_names(primary_key, names),
        columns=tuple(_column(column) for column in columns),
        dropped_columns=width - len(columns),
        is_publishable=is_permanent,
    )


def _column_names(attnums: Iterable[int] | None, names: _Names) -> tuple[str, ...]:
    return tuple(names[attnum] for attnum in attnums or ())


def _column(row: CatalogRow) -> TableColumn:
    _, attnum, name, type_oid, typmod, type_sql, collation_sql, generated, generation_sql, tree = row
    return TableColumn(
        attnum=attnum,
        name=name,
        type_oid=type_oid,
        typmod=typmod,
        type_sql=type_sql,
        collation_sql=collation_sql,
        generated=Generated(generated),
        generation_sql=generation_sql,
        generation_tree=tree,
    )


def without_generation_texts(table: Table) -> Table:
    """The table as `COLUMNS` describes one without a row filter."""
    columns = tuple(
        column
        if column.generated is Generated.NO
        else replace(column, generation_sql=None, generation_tree=_short(column.generation_tree))
        for column in table.columns
    )
    return replace(table, columns=columns)


def _short(tree: str | None) -> str | None:
    return None if tree is None or len(tree.encode()) > _SHORT_TREE_BYTES else tree


def parse_publication(row: CatalogRow, memberships: Mapping[RelationId, Membership]) -> Publication:
    """The publication of a row of `PUBLICATIONS`."""
    oid, name, all_tables, via_root, insert, update, delete, truncate, schemas, publish_generated = row
    published = zip(PublishAction, (insert, update, delete, truncate), strict=True)
    return Publication(
        oid=oid,
        name=name,
        all_tables=all_tables,
        via_root=via_root,
        actions=frozenset(action for action, is_published in published if is_published),
        schemas=frozenset(schemas),
        memberships=memberships,
        publish_generated=publish_generated,
    )


def parse_memberships(
    rows: Iterable[CatalogRow], tables: Mapping[RelationId, Table]
) -> dict[int, dict[RelationId, Membership]]:
    """Rows of `MEMBERSHIPS` by publication oid and table; those of unknown tables are skipped.

    A text is missing if it was not asked for or could not be had, also if the table was dropped after the
    snapshot.
    """
    memberships: dict[int, dict[RelationId, Membership]] = {}
    for publication, relation, node_tree, text, attnums, is_exception in rows:
        if relation not in tables:
            continue
        names = {column.attnum: column.name for column in tables[relation].columns}
        memberships.setdefault(publication, {})[RelationId(relation)] = Membership(
            relation=RelationId(relation),
            row_filter=None if node_tree is None else _row_filter(node_tree, text),
            # A message of a transaction with an old snapshot may have a column that the table row does not.
            columns=None
            if attnums is None
            else frozenset(names[attnum] for attnum in attnums if attnum in names),
            is_exception=is_exception,
        )
    return memberships


def _row_filter(node_tree: str, text: str | None) -> RowFilter:
    row_filter = RowFilter(node_tree, text or "")
    return row_filter if text is not None else replace(row_filter, sql=row_filter.unprinted_sql)
