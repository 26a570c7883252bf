"""Staging tables of the subscriber hold the chunks of a table until all are complete.

A table of several chunks becomes visible at once. The transaction that copies a chunk creates its staging
table, so that a repeated attempt replaces the table of an earlier one. When all chunks are staged, one
transaction moves them into the target and records the table as ready.

| killed                      | durable                          | the next run                              |
|-----------------------------|----------------------------------|-------------------------------------------|
| while a chunk is copied     | the complete chunks              | reads the missing ones (`resume.py`)      |
| between chunks, before move | staging tables                   | as above                                  |
| during the move             | staging tables, target unchanged | as above                                  |
| after the move              | the complete table               | skips the table: it is ready              |

The comment of a staging table describes its rows, and commits with them: the table, the snapshot's LSN, the
page ranges, and the fingerprint (`fingerprint.py`). There is no other record of it.

The name of a staging table contains subscription, table, snapshot and chunk. Staging tables have the target's
column types but none of its constraints: the move checks those. They are unlogged. A subscriber that crashes
empties such tables completely: a table without pages whose comment counts rows is lost, and read again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.postgres.identifiers import commas
from cdc_replay.postgres.identifiers import names as column_names
from cdc_replay.subscriber.as_owner import TargetSession
from cdc_replay.subscriber.staged_columns import StagedColumns
from cdc_replay.subscriber.state_schema import SCHEMA
from cdc_replay.subscriber.target_statements import insert_rows
from cdc_replay.subscriber.target_tables import TargetTable

STAGED: Final = """
    select relname::text, pg_catalog.obj_description(oid, 'pg_class'),
           pg_catalog.pg_relation_size(oid)::bigint
      from pg_catalog.pg_class
     where relnamespace = (select oid from pg_catalog.pg_namespace where nspname = %s)
       and relkind = 'r' and pg_catalog.starts_with(relname::text, %s)
     order by relname
"""

_VIEW: Final = sql.Identifier("pg_temp", "cdc_replay_moved")


@dataclass(frozen=True, slots=True)
class PageRange:
    """The pages `[first_page, end_page)` of a physical table (oid); None: to the last page."""

    leaf: int
    first_page: int
    end_page: int | None


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """The contents of a staging table: the rows of `pages` as of `lsn`, read under `fingerprint`.

    `bytes` is their size as COPY text, `size` the estimated size on the publisher's disk.
    """

    table: QualifiedName
    lsn: Lsn
    fingerprint: str
    pages: tuple[PageRange, ...]
    rows: int
    bytes: int
    size: int

    def to_comment(self) -> str:
        """The comment of the staging table."""
        return json.dumps(
            {
                "table": [self.table.schema, self.table.name],
                "lsn": str(self.lsn),
                "definition": self.fingerprint,
                "pages": [
                    [page_range.leaf, page_range.first_page, page_range.end_page] for page_range in self.pages
                ],
                "rows": self.rows,
                "bytes": self.bytes,
                "size": self.size,
            }
        )

    @classmethod
    def from_comment(cls, text: str) -> StagedChunk:
        """Parse the comment of a staging table."""
        fields = json.loads(text)
        return cls(
            table=QualifiedName(*fields["table"]),
            lsn=Lsn.parse(fields["lsn"]),
            fingerprint=fields["definition"],
            pages=tuple(PageRange(*page_range) for page_range in fields["pages"]),
            rows=fields["rows"],
            bytes=fields["bytes"],
            size=fields["size"],
        )


def staging_name(subscription: str, table: QualifiedName, consistent_point: Lsn, part: int | str) -> str:
    """The staging table's name for one chunk, or for another part of a table's copy."""
    return f"{_prefix(subscription)}{_short_hash(str(table))}_{consistent_point.value:016x}_{part}"


def _prefix(subscription: str) -> str:
    return f"snapshot_{_short_hash(subscription)}_"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def staging_table(name: str) -> sql.Identifier:
    """The staging table in SQL."""
    return sql.Identifier(SCHEMA, name)


def create_staging(connection: Connection, name: str, target: TargetTable, columns: Sequence[str]) -> None:
    """Create an empty staging table for `columns` of `target`, replacing that of an earlier attempt."""
    table = staging_table(name)
    with translated_errors(f'cannot create staging table "{SCHEMA}.{name}" on the subscriber'):
        connection.execute(sql.SQL("drop table if exists {}").format(table))
        StagedColumns.from_target(target, columns).create(connection, "unlogged", table)


def describe_staging(connection: Connection, name: str, chunk: StagedChunk) -> None:
    """Set the comment of the staging table, in the transaction that fills it."""
    comment = sql.SQL("comment on table {} is {}").format(staging_table(name), chunk.to_comment())
    connection.execute(comment)


def staged_chunks(connection: Connection, subscription: str) -> dict[str, StagedChunk]:
    """The complete chunks of the subscription's tables, by the name of their staging table."""
    staged = connection.execute(STAGED, (SCHEMA, _prefix(subscription))).fetchall()
    chunks = ((name, StagedChunk.from_comment(comment), size) for name, comment, size in staged if comment)
    return {name: chunk for name, chunk, size in chunks if size > 0 or chunk.rows == 0}


@dataclass(frozen=True, slots=True)
class Overlay:
    """Rows that replace those with the same key in the chunks.

    `rows` and `keys` name staging tables: complete rows, and texts of keys whose rows in the chunks are
    outdated. `key` are the columns of the key, in the order of the texts; a row with NULL in one is outdated.
    """

    key: tuple[str, ...]
    rows: tuple[str, ...]
    keys: tuple[str, ...]


def key_text(table: str, column: str) -> sql.Composed:
    """The output function's text of a key column: a cast to text strips a `char`."""
    return sql.SQL("pg_catalog.format('%s', {})").format(sql.Identifier(table, column))


def key_names(count: int) -> tuple[str, ...]:
    """Column names for the texts of a key of so many columns."""
    return tuple(f"k{index}" for index in range(count))


def create_keys(connection: Connection, name: str, count: int) -> None:
    """Create an empty staging table for keys of `count` columns, replacing that of an earlier attempt."""
    table = staging_table(name)
    columns = commas(
        sql.SQL('{} text collate "C" not null').format(sql.Identifier(column)) for column in key_names(count)
    )
    with translated_errors(f'cannot create staging table "{SCHEMA}.{name}" on the subscriber'):
        connection.execute(sql.SQL("drop table if exists {}").format(table))
        connection.execute(sql.SQL("create unlogged table {} ({})").format(table, columns))


def move_staged(
    connection: Connection,
    session: TargetSession,
    names: Sequence[str],
    target: TargetTable,
    columns: Sequence[str],
    overlay: Overlay | None = None,
) -> int:
    """Insert the staged rows into the target and drop their tables, in the caller's transaction."""
    rows = _rows_to_move(names, columns, overlay)
    if session.runs_as_owner:
        shared = sql.SQL("({}) as rows").format(rows)
        StagedColumns.from_target(target, columns).share(connection, session, shared, _VIEW)
        rows = sql.SQL("select * from {}").format(_VIEW)
    inserted = session.execute(insert_rows(target, columns, rows))
    if session.runs_as_owner:
        connection.execute(sql.SQL("drop view {}").format(_VIEW))
    drop_tables(connection, [*names, *((*overlay.rows, *overlay.keys) if overlay else ())])
    return inserted


def _rows_to_move(names: Sequence[str], columns: Sequence[str], overlay: Overlay | None) -> sql.Composable:
    rows = _union_all(names, columns)
    if overlay is not None and overlay.keys:
        rows = sql.SQL("{}{}").format(
            _without_keys(rows, overlay),
            sql.SQL("").join(sql.SQL(" union all {}").format(_rows(name, columns)) for name in overlay.rows),
        )
    return rows


def _without_keys(rows: sql.Composable, overlay: Overlay) -> sql.Composed:
    names = key_names(len(overlay.key))
    same = sql.SQL(" and ").join(
        sql.SQL("touched.{} = {}").format(sql.Identifier(name), key_text("staged", column))
        for name, column in zip(names, overlay.key, strict=True)
    )
    whole = sql.SQL(" and ").join(
        sql.SQL("{} is not null").format(sql.Identifier("staged", column)) for column in overlay.key
    )
    return sql.SQL(
        "select * from ({}) as staged where {} and not exists (select from ({}) as touched where {})"
    ).format(rows, whole, _union_all(overlay.keys, names), same)


def _union_all(names: Iterable[str], columns: Sequence[str]) -> sql.Composable:
    return sql.SQL(" union all ").join(_rows(name, columns) for name in names)


def _rows(name: str, columns: Sequence[str]) -> sql.Composed:
    return sql.SQL("select {} from {}").format(column_names(columns), staging_table(name))


def drop_leftovers(connection: Connection, subscription: str, *, keep: Iterable[str] = ()) -> int:
    """Drop staging tables of killed runs of the subscription except `keep`; returns their number."""
    names = [name for name, *_ in connection.execute(STAGED, (SCHEMA, _prefix(subscription))).fetchall()]
    dropped = sorted(set(names) - set(keep))
    drop_tables(connection, dropped)
    return len(dropped)


def drop_tables(connection: Connection, names: Sequence[str]) -> None:
    """Drop staging tables."""
    if names:
        tables = commas(map(staging_table, names))
        connection.execute(sql.SQL("drop table if exists {}").format(tables))
