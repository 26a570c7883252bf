"""Chunks of an initial copy: queries that together return every row of a table exactly once.

| published relation | read from                                                                  |
|--------------------|----------------------------------------------------------------------------|
| plain table        | the table itself with ONLY: inheritance children are not part of it (R7.6) |
| partitioned table  | its leaves, each with the columns in the root's order, by name             |
| partitioned table, | the root, in one chunk: the rows that a role sees through the root can     |
| leaf not readable  | differ from those that it sees in a leaf (privileges and policies, R7.10)  |

Physical tables are cut into ranges of pages (`ctid`), which the server scans without an index and without
reading the other ranges. The ranges of one table are contiguous and the last one is open, so that it includes
pages added later. Tables below `CHUNK_BYTES` are not cut; the small leaves of a partitioned table share a
chunk.

Page ranges staged by a killed run are left out (`completed`); the gaps between them are cut in the same way.
A range is valid only while the rows stay in the same file, `Storage.filenode`: TRUNCATE, VACUUM FULL, CLUSTER
and a rewriting ALTER TABLE create a new one.

The row filter is the OR of the publications' filters for the published relation, whatever actions they
publish (R7.3, R7.4). PostgreSQL evaluates it, as printed by `filters.printed`.
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
from cdc_replay.postgres.identifiers import names
from cdc_replay.publication.resolve import SyncedTable

CHUNK_BYTES: Final = 256 * 1024 * 1024
"""Size of a chunk, unless that makes more than `MAX_CHUNKS`."""

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
"""The functions return NULL for a table that was dropped after the snapshot."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A physical table on disk: pages of the main fork, bytes with TOAST.

    `is_open`: the role may read all of its rows directly. `filenode` is the file as of the snapshot; 0 for a
    table without a file.
    """

    pages: int
    bytes: int
    is_open: bool
    filenode: int = 0


@dataclass(frozen=True, slots=True)
class PageSlice:
    """The rows of a physical table in the pages `[first_page, end_page)`; None: to the last page.

    `only` excludes inheritance children and partitions; it is False for a root that is read with its
    partitions.
    """

    table: Table
    only: bool = True
    first_page: int = 0
    end_page: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it has all pages."""
        return self.first_page == 0 and self.end_page is None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit of a copy, one transaction. `bytes` is an estimate of its size on disk."""

    chunk_id: int
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
    """Whether the role may read all physical tables directly; otherwise the root is read as one chunk."""
    return not synced.table.is_partitioned or all(
        _storage_of(storage, table).is_open for table in (synced.table, *synced.leaves)
    )


def plan_table(
    synced: SyncedTable,
    storage: Mapping[RelationId, Storage],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    completed: Sequence[PageSlice] = (),
) -> tuple[Chunk, ...]:
    """The chunks of one table; their slices and `completed` have every row exactly once.

    There is at least one chunk unless the whole table is completed.
    """
    if is_read_by_pages(synced, storage):
        tables = synced.leaves if synced.table.is_partitioned else (synced.table,)
        spans = tuple(
            span
            for table in tables
            for span in _remaining_spans(table, _storage_of(storage, table), completed)
        )
        return _cut(spans, chunk_bytes) or (() if completed else (Chunk(0, (), 0),))
    size = sum(_storage_of(storage, leaf).bytes for leaf in synced.leaves)
    return (Chunk(0, (PageSlice(synced.table, only=False),), size),)


def _storage_of(storage: Mapping[RelationId, Storage], table: Table) -> Storage:
    # For a table dropped since the catalog was read, the copy reports the error.
    return storage.get(table.id, Storage(0, 0, is_open=True))


@dataclass(frozen=True, slots=True)
class _PageSpan:
    """A range of pages to read, with its current pages and bytes."""

    slice: PageSlice
    pages: int
    bytes: int


def _remaining_spans(table: Table, stored: Storage, completed: Iterable[PageSlice]) -> Iterator[_PageSpan]:
    """The page ranges outside `completed`, in order."""
    page = 0
    for page_slice in sorted(
        (page_slice for page_slice in completed if page_slice.table.id == table.id),
        key=lambda page_slice: page_slice.first_page,
    ):
        if page < page_slice.first_page:
            yield _page_span(stored, PageSlice(table, first_page=page, end_page=page_slice.first_page))
        if page_slice.end_page is None:
            return
        page = page_slice.end_page
    yield _page_span(stored, PageSlice(table, first_page=page))


def _page_span(stored: Storage, page_slice: PageSlice) -> _PageSpan:
    if page_slice.is_whole:
        return _PageSpan(page_slice, stored.pages, stored.bytes)
    end = stored.pages if page_slice.end_page is None else min(page_slice.end_page, stored.pages)
    pages = max(0, end - page_slice.first_page)
    return _PageSpan(page_slice, pages, round(stored.bytes * pages / max(1, stored.pages)))


def _cut(spans: Sequence[_PageSpan], chunk_bytes: int) -> tuple[Chunk, ...]:
    """Concatenate the spans and cut them into chunks of equal length."""
    sizes = [span.bytes for span in spans]
    chunk_count = min(MAX_CHUNKS, max(1, round(sum(sizes) / chunk_bytes)))
    length = max(1, -(-sum(sizes) // chunk_count))
    slices: dict[int, list[PageSlice]] = defaultdict(list)
    for span, start in zip(spans, itertools.accumulate(sizes, initial=0), strict=False):
        for chunk_id, page_slice in _slices_by_chunk(span, start, length):
            slices[min(chunk_id, chunk_count - 1)].append(page_slice)
    chunks = enumerate(slices[chunk_id] for chunk_id in sorted(slices))
    return tuple(Chunk(chunk_id, tuple(chunk_slices), length) for chunk_id, chunk_slices in chunks)


def _slices_by_chunk(span: _PageSpan, start: int, length: int) -> Iterator[tuple[int, PageSlice]]:
    """The pages of `span`, which starts at byte `start`, by index of their chunk."""
    first, last = start // length, max(start, start + span.bytes - 1) // length
    page = 0
    begin = span.slice.first_page
    for chunk_id in range(first, last):
        end = round(span.pages * ((chunk_id + 1) * length - start) / span.bytes)
        if page < end < span.pages:
            yield chunk_id, PageSlice(span.slice.table, first_page=begin + page, end_page=begin + end)
            page = end
    yield last, PageSlice(span.slice.table, first_page=begin + page, end_page=span.slice.end_page)


def source(page_slice: PageSlice, columns: tuple[str, ...], passes: sql.Composable | None) -> Source:
    """The source of the rows of `page_slice` that pass the row filters, with these columns in order.

    COPY of a table supports no conditions, child tables, generated columns, or empty column list (R7.6).
    """
    names = {column.name for column in page_slice.table.columns if column.generated is Generated.NO}
    if page_slice.is_whole and page_slice.only and passes is None and columns and names.issuperset(columns):
        return WholeTable(sql.Identifier(page_slice.table.name.schema, page_slice.table.name.name), columns)
    return select(page_slice, columns, passes)


def select(
    page_slice: PageSlice,
    columns: Sequence[str],
    passes: sql.Composable | None,
    also: Sequence[sql.Composable] = (),
) -> sql.Composed:
    """The query of the rows of `page_slice` that pass the row filters and the conditions `also`."""
    conditions = [*_page_conditions(page_slice), *([] if passes is None else [passes]), *also]
    return sql.SQL("select {} from {}{}{}").format(
        names(columns),
        sql.SQL("only " if page_slice.only else ""),
        sql.Identifier(page_slice.table.name.schema, page_slice.table.name.name),
        sql.SQL(" where " if conditions else "") + sql.SQL(" and ").join(conditions),
    )


def _page_conditions(page_slice: PageSlice) -> Iterator[sql.Composable]:
    if page_slice.first_page > 0:
        yield sql.SQL("ctid >= {}::tid").format(f"({page_slice.first_page},0)")
    if page_slice.end_page is not None:
        yield sql.SQL("ctid < {}::tid").format(f"({page_slice.end_page},0)")
