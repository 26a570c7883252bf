"""Tables of the subscriber that hold the chunks of a table until all of them are there.

A table that is copied in several chunks becomes visible at once: every chunk is copied into a staging table
of its own, created by the transaction that fills it, so that an attempt that is repeated replaces what an
earlier one left. When all chunks are there, one transaction moves them into the target and records the
table as ready.

| killed                      | left behind                      | the next run                              |
|-----------------------------|----------------------------------|-------------------------------------------|
| while a chunk is copied     | the chunks that are complete     | reads what is missing (`resume.py`)       |
| between chunks, before move | staging tables                   | as above                                  |
| during the move             | staging tables, target untouched | as above                                  |
| after the move              | nothing                          | leaves the table alone: it is ready       |

What a staging table holds is in its comment, which is one commit with its rows: of which table it is, the
snapshot's LSN, the ranges of pages, and the definition under which they were read (`definition.py`). No other
record of it exists that could disagree.

The name of a staging table holds the subscription, the table, the snapshot and the chunk. Staging tables
have the types of the target's columns but none of its constraints: the move checks those. They are unlogged.
A subscriber that crashes empties such a table when it starts again, and never a part of it: one that has no
page although its comment counts rows is lost, and read again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.postgres.copy import column_list
from cdc_replay.subscriber.as_owner import TargetSession
from cdc_replay.subscriber.staged_columns import check_types, staged_type, typed_value
from cdc_replay.subscriber.state_schema import SCHEMA
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
    """The pages `[first_page, end_page)` of a physical table (oid); no end means to the last page."""

    leaf: int
    first_page: int
    end_page: int | None


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """What a staging table holds: the rows of `pages` as of `lsn`.

    `definition` is what they were read under; `bytes` is their size as COPY text, `size` what the chunk was
    estimated to be on the publisher's disk.
    """

    table: QualifiedName
    lsn: Lsn
    definition: str
    pages: tuple[PageRange, ...]
    rows: int
    bytes: int
    size: int

    def to_comment(self) -> str:
        """The chunk as the comment of its staging table."""
        return json.dumps(
            {
                "table": [self.table.schema, self.table.name],
                "lsn": str(self.lsn),
                "definition": self.definition,
                "pages": [[each.leaf, each.first_page, each.end_page] for each in self.pages],
                "rows": self.rows,
                "bytes": self.bytes,
                "size": self.size,
            }
        )

    @classmethod
    def of_comment(cls, text: str) -> StagedChunk:
        """The chunk that a comment describes."""
        found = json.loads(text)
        return cls(
            table=QualifiedName(*found["table"]),
            lsn=Lsn.parse(found["lsn"]),
            definition=found["definition"],
            pages=tuple(PageRange(*each) for each in found["pages"]),
            rows=found["rows"],
            bytes=found["bytes"],
            size=found["size"],
        )


def staging_name(subscription: str, table: QualifiedName, consistent_point: Lsn, part: int | str) -> str:
    """The name of the table for one chunk, or for another part of a table's copy."""
    return f"{_prefix(subscription)}{_short_hash(str(table))}_{consistent_point.value:016x}_{part}"


def _prefix(subscription: str) -> str:
    return f"snapshot_{_short_hash(subscription)}_"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def staging_table(name: str) -> sql.Identifier:
    """The staging table in SQL."""
    return sql.Identifier(SCHEMA, name)


def create_staging(connection: Connection, name: str, target: TargetTable, columns: Sequence[str]) -> None:
    """An empty staging table for `columns` of `target`, instead of one that an earlier attempt left."""
    table, owner_is_untrusted = staging_table(name), target.acting.rights.owner_is_untrusted
    typed = sql.SQL(", ").join(
        sql.SQL("{} {}").format(
            sql.Identifier(column), staged_type(target.column(column), owner_is_untrusted=owner_is_untrusted)
        )
        for column in columns
    )
    with translated_errors(f'cannot create staging table "{SCHEMA}.{name}" on the subscriber'):
        connection.execute(sql.SQL("drop table if exists {}").format(table))
        connection.execute(sql.SQL("create unlogged table {} ({})").format(table, typed))
    if owner_is_untrusted:
        check_types(connection, table, target.name)


def describe_staging(connection: Connection, name: str, chunk: StagedChunk) -> None:
    """Record what the staging table holds, in the transaction that has filled it."""
    comment = sql.SQL("comment on table {} is {}").format(staging_table(name), chunk.to_comment())
    connection.execute(comment)


def staged_chunks(connection: Connection, subscription: str) -> dict[str, StagedChunk]:
    """The complete chunks of the subscription's tables, by the name of their staging table."""
    return dict(_staged_chunks(connection, subscription))


def _staged_chunks(connection: Connection, subscription: str) -> Iterator[tuple[str, StagedChunk]]:
    for name, comment, size in connection.execute(STAGED, (SCHEMA, _prefix(subscription))).fetchall():
        if comment is None:
            continue
        chunk = StagedChunk.of_comment(comment)
        if size > 0 or chunk.rows == 0:
            yield name, chunk


@dataclass(frozen=True, slots=True)
class Overlay:
    """Rows that take the place of those with the same key in the chunks.

    `rows` and `keys` name staging tables: complete rows, and texts of the keys that the chunks do not decide.
    `key` are the columns of the key, in the order of the texts; a row with NULL in one is out of date.
    """

    key: tuple[str, ...]
    rows: tuple[str, ...]
    keys: tuple[str, ...]


def key_text(table: str, column: str) -> sql.Composed:
    """The text of a key column as its type's output function writes it: a cast to text strips a `char`."""
    return sql.SQL("pg_catalog.format('%s', {})").format(sql.Identifier(table, column))


def key_names(count: int) -> tuple[str, ...]:
    """The names of the columns that hold the texts of a key of so many columns."""
    return tuple(f"k{number}" for number in range(count))


def create_keys(connection: Connection, name: str, count: int) -> None:
    """An empty staging table for texts of keys of `count` columns, instead of one that was left."""
    table = staging_table(name)
    columns = sql.SQL(", ").join(
        sql.SQL('{} text collate "C" not null').format(sql.Identifier(each)) for each in key_names(count)
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
    """Insert the staged rows into the target and drop the tables, in the caller's transaction; the count."""
    rows = _rows_to_move(names, columns, overlay)
    if session.runs_as_owner:
        # The table that it reads are ours, and the casts in it are made with the rights of who reads it.
        connection.execute(
            sql.SQL("create temporary view {} as {}").format(_VIEW, _typed(rows, target, columns))
        )
        session.share(_VIEW)
        rows = sql.SQL("select * from {}").format(_VIEW)
    # Identity columns take the publisher's value, as they do from COPY (R8.14).
    inserted = session.execute(
        sql.SQL("insert into {}{} overriding system value {}").format(
            sql.Identifier(target.name.schema, target.name.name), column_list(columns), rows
        )
    )
    if session.runs_as_owner:
        connection.execute(sql.SQL("drop view {}").format(_VIEW))
    drop_tables(connection, [*names, *((*overlay.rows, *overlay.keys) if overlay else ())])
    return inserted


def _typed(rows: sql.Composable, target: TargetTable, columns: Sequence[str]) -> sql.Composed:
    values = (
        sql.SQL("{} as {}").format(
            typed_value(
                sql.Identifier("rows", name),
                target.column(name),
                owner_is_untrusted=target.acting.rights.owner_is_untrusted,
            ),
            sql.Identifier(name),
        )
        for name in columns
    )
    return sql.SQL("select {} from ({}) as rows").format(sql.SQL(", ").join(values), rows)


def _rows_to_move(names: Sequence[str], columns: Sequence[str], overlay: Overlay | None) -> sql.Composable:
    rows = _union(names, columns)
    if overlay is not None and overlay.keys:
        rows = sql.SQL("{}{}").format(
            _without_keys(rows, overlay),
            sql.SQL("").join(sql.SQL(" union all {}").format(_rows(each, columns)) for each in overlay.rows),
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
    ).format(rows, whole, _union(overlay.keys, names), same)


def _union(names: Iterable[str], columns: Sequence[str]) -> sql.Composable:
    return sql.SQL(" union all ").join(_rows(name, columns) for name in names)


def _rows(name: str, columns: Sequence[str]) -> sql.Composed:
    listed = sql.SQL(", ").join(map(sql.Identifier, columns))
    return sql.SQL("select {} from {}").format(listed, staging_table(name))


def drop_leftovers(connection: Connection, subscription: str, *, kept: Iterable[str] = ()) -> int:
    """Drop the staging tables that killed runs of the subscription have left, but those `kept`; the count."""
    found = [name for name, *_ in connection.execute(STAGED, (SCHEMA, _prefix(subscription))).fetchall()]
    dropped = sorted(set(found) - set(kept))
    drop_tables(connection, dropped)
    return len(dropped)


def drop_tables(connection: Connection, names: Sequence[str]) -> None:
    """Drop staging tables."""
    if names:
        tables = sql.SQL(", ").join(map(staging_table, names))
        connection.execute(sql.SQL("drop table if exists {}").format(tables))
