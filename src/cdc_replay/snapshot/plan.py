"""Which pieces an initial copy is read in: queries that together return every row of a table exactly once.

| published relation | read from                                                                  |
|--------------------|----------------------------------------------------------------------------|
| plain table        | the table itself with ONLY: inheritance children are not part of it (R7.6) |
| partitioned table  | its leaves, each with the columns in the root's order, by name             |
| partitioned table, | the root, in one piece: the rows that a role sees through the root can     |
| leaf not readable  | differ from those that it sees in a leaf (privileges and policies, R7.10)  |

Physical tables are cut into ranges of pages (`ctid`), which the server scans without an index and without
reading the other ranges. The ranges of one table follow each other and the last one is open, so that pages
which appear after the size was taken belong to it. Tables below `CHUNK_BYTES` are not cut; the small leaves
of a partitioned table share a chunk.

Page ranges that an earlier, killed run has staged are left out (`done`): what is between them is cut in the
same way. A range says something about a table only as long as its rows stay in the same file, which
`Storage.filenode` names: TRUNCATE, VACUUM FULL, CLUSTER and ALTER TABLE with a rewrite begin a new one.

The row filter is the OR of what the publications attach to the published relation, whatever actions they
publish (R7.3, R7.4). PostgreSQL evaluates it, as `filters.printed` writes it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.model.publication import Generated, Table
from cdc_replay.model.relation import RelationId
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.postgres.copy import Source, WholeTable
from cdc_replay.publication.resolve import SyncedTable

CHUNK_BYTES: Final = 256 * 1024 * 1024
"""How much of a table one chunk reads, unless that makes more than `MAX_CHUNKS`."""

MAX_CHUNKS: Final = 256
"""Most chunks of one table: each is a staging table on the subscriber until the table is complete."""

STORAGE: Final = """
    select c.oid::bigint,
           (pg_catalog.pg_relation_size(c.oid)
               / pg_catalog.current_setting('block_size')::bigint)::bigint as pages,
           pg_catalog.pg_table_size(c.oid)::bigint as bytes,
           c.relfilenode::bigint as filenode,
           pg_catalog.has_table_privilege(c.oid, 'select')
               and not pg_catalog.row_security_active(c.oid) as is_open
      from pg_catalog.pg_class c
     where c.oid = any (%s::oid[]) and pg_catalog.pg_relation_size(c.oid) is not null
"""
"""Of a table that the snapshot has, and that was dropped since, the functions say NULL."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A physical table as it lies on disk: pages of the main fork, bytes with TOAST.

    `is_open`: the role may read all of its rows directly. `filenode` is the file as of the snapshot that this
    was read under; 0 for a table that has none.
    """

    pages: int
    bytes: int
    is_open: bool
    filenode: int = 0


@dataclass(frozen=True, slots=True)
class PageSlice:
    """The rows of a physical table in the pages `[first_page, end_page)`; no end means to the last page.

    `only` leaves out inheritance children and partitions; a root that is read as such has it unset.
    """

    table: Table
    only: bool = True
    first_page: int = 0
    end_page: int | None = None

    @property
    def is_whole(self) -> bool:
        """All pages."""
        return self.first_page == 0 and self.end_page is None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one transaction copies. `bytes` is an estimate of what it reads from disk."""

    number: int
    slices: tuple[PageSlice, ...]
    bytes: int


def read_storage(connection: Connection, tables: Iterable[SyncedTable]) -> dict[RelationId, Storage]:
    """Sizes and readability of the tables and of their leaves."""
    oids = {table.id for synced in tables for table in (synced.table, *synced.leaves)}
    with translated_errors("cannot read the sizes of the published tables"):
        rows = connection.execute(STORAGE, [sorted(oids)]).fetchall()
    return {
        RelationId(oid): Storage(pages, size, is_open, filenode)
        for oid, pages, size, filenode, is_open in rows
    }


def is_read_by_pages(synced: SyncedTable, storage: Mapping[RelationId, Storage]) -> bool:
    """Whether the role may read the physical tables themselves; a partitioned table is read as one else."""
    return not synced.table.is_partitioned or all(
        _of(storage, table).is_open for table in (synced.table, *synced.leaves)
    )


def plan_table(
    synced: SyncedTable,
    storage: Mapping[RelationId, Storage],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    done: Sequence[PageSlice] = (),
) -> tuple[Chunk, ...]:
    """The chunks of one table; their slices, and `done`, hold every row of it exactly once.

    There is at least one, unless all of the table is done.
    """
    if is_read_by_pages(synced, storage):
        tables = synced.leaves if synced.table.is_partitioned else (synced.table,)
        parts = tuple(part for table in tables for part in _undone(table, _of(storage, table), done))
        return _cut(parts, chunk_bytes) or (() if done else (Chunk(0, (), 0),))
    size = sum(_of(storage, leaf).bytes for leaf in synced.leaves)
    return (Chunk(0, (PageSlice(synced.table, only=False),), size),)


def _of(storage: Mapping[RelationId, Storage], table: Table) -> Storage:
    # A table that was dropped since the catalog was read: its copy will say so by name.
    return storage.get(table.id, Storage(0, 0, is_open=True))


@dataclass(frozen=True, slots=True)
class _PageSpan:
    """A range of pages that is to be read: how many pages and bytes it has by now."""

    slice: PageSlice
    pages: int
    bytes: int


def _undone(table: Table, stored: Storage, done: Iterable[PageSlice]) -> Iterator[_PageSpan]:
    """The ranges of pages that are not among `done`, in order."""
    page = 0
    for piece in sorted(
        (each for each in done if each.table.id == table.id), key=lambda each: each.first_page
    ):
        if page < piece.first_page:
            yield _part(stored, PageSlice(table, first_page=page, end_page=piece.first_page))
        if piece.end_page is None:
            return
        page = piece.end_page
    yield _part(stored, PageSlice(table, first_page=page))


def _part(stored: Storage, piece: PageSlice) -> _PageSpan:
    if piece.is_whole:
        return _PageSpan(piece, stored.pages, stored.bytes)
    end = stored.pages if piece.end_page is None else min(piece.end_page, stored.pages)
    pages = max(0, end - piece.first_page)
    return _PageSpan(piece, pages, round(stored.bytes * pages / max(1, stored.pages)))


def _cut(parts: Sequence[_PageSpan], chunk_bytes: int) -> tuple[Chunk, ...]:
    """Lay the parts end to end and cut the line into equal lengths; one length is a chunk."""
    sizes = [part.bytes for part in parts]
    wanted = min(MAX_CHUNKS, max(1, round(sum(sizes) / chunk_bytes)))
    length = max(1, -(-sum(sizes) // wanted))
    slices: dict[int, list[PageSlice]] = defaultdict(list)
    for part, start in zip(parts, itertools.accumulate(sizes, initial=0), strict=False):
        for number, piece in _pieces(part, start, length):
            slices[min(number, wanted - 1)].append(piece)
    chunks = enumerate(slices[number] for number in sorted(slices))
    return tuple(Chunk(number, tuple(pieces), length) for number, pieces in chunks)


def _pieces(part: _PageSpan, start: int, length: int) -> Iterator[tuple[int, PageSlice]]:
    """The lengths of the line that `part` lies in, from byte `start`, with its pages there."""
    first, last = start // length, max(start, start + part.bytes - 1) // length
    page = 0
    begin = part.slice.first_page
    for number in range(first, last):
        end = round(part.pages * ((number + 1) * length - start) / part.bytes)
        if page < end < part.pages:
            yield number, PageSlice(part.slice.table, first_page=begin + page, end_page=begin + end)
            page = end
    yield last, PageSlice(part.slice.table, first_page=begin + page, end_page=part.slice.end_page)


def source(piece: PageSlice, columns: tuple[str, ...], passes: sql.Composable | None) -> Source:
    """What reads the rows of `piece` that pass the row filters, with these columns in this order.

    COPY of a table has no form for conditions, other tables below it, generated columns, or no column (R7.6).
    """
    names = {column.name for column in piece.table.columns if column.generated is Generated.NO}
    if piece.is_whole and piece.only and passes is None and columns and names.issuperset(columns):
        return WholeTable(sql.Identifier(piece.table.name.schema, piece.table.name.name), columns)
    return select(piece, columns, passes)


def select(
    piece: PageSlice,
    columns: Sequence[str],
    passes: sql.Composable | None,
    also: Sequence[sql.Composable] = (),
) -> sql.Composed:
    """The query for the rows of `piece` that pass the row filters, with these columns in this order.

    `also` are further conditions.
    """
    conditions = [*_page_conditions(piece), *([] if passes is None else [passes]), *also]
    return sql.SQL("select {} from {}{}{}").format(
        sql.SQL(", ").join(map(sql.Identifier, columns)),
        sql.SQL("only " if piece.only else ""),
        sql.Identifier(piece.table.name.schema, piece.table.name.name),
        sql.SQL(" where " if conditions else "") + sql.SQL(" and ").join(conditions),
    )


def _page_conditions(piece: PageSlice) -> Iterator[sql.Composable]:
    if piece.first_page > 0:
        yield sql.SQL("ctid >= {}::tid").format(f"({piece.first_page},0)")
    if piece.end_page is not None:
        yield sql.SQL("ctid < {}::tid").format(f"({piece.end_page},0)")
