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

The row filter is the OR of what the publications attach to the published relation, whatever actions they
publish (R7.3, R7.4). PostgreSQL evaluates it, as `pg_get_expr` prints it with an empty search_path.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from cdc_replay.model.publication import RowFilter, Table
from cdc_replay.model.relation import RelationId
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.publication.resolve import SyncedTable

CHUNK_BYTES: Final = 256 * 1024 * 1024
"""How much of a table one chunk reads, unless that makes more than `MAX_CHUNKS`."""

MAX_CHUNKS: Final = 64
"""Most chunks of one table: each is a staging table on the subscriber until the table is complete."""

STORAGE: Final = """
    select c.oid::bigint,
           (pg_catalog.pg_relation_size(c.oid)
               / pg_catalog.current_setting('block_size')::bigint)::bigint as pages,
           pg_catalog.pg_table_size(c.oid)::bigint as bytes,
           pg_catalog.has_table_privilege(c.oid, 'select')
               and not pg_catalog.row_security_active(c.oid) as is_open
      from pg_catalog.pg_class c
     where c.oid = any (%s::oid[])
"""


@dataclass(frozen=True, slots=True)
class Storage:
    """A physical table as it lies on disk: pages of the main fork, bytes with TOAST.

    `is_open`: the role may read all of its rows directly.
    """

    pages: int
    bytes: int
    is_open: bool


@dataclass(frozen=True, slots=True)
class Slice:
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
    slices: tuple[Slice, ...]
    bytes: int


def read_storage(connection: Connection, tables: Iterable[SyncedTable]) -> dict[RelationId, Storage]:
    """Sizes and readability of the tables and of their leaves."""
    oids = {table.id for synced in tables for table in (synced.table, *synced.leaves)}
    with translated_errors("cannot read the sizes of the published tables"):
        rows = connection.execute(STORAGE, [sorted(oids)]).fetchall()
    return {RelationId(oid): Storage(pages, size, is_open) for oid, pages, size, is_open in rows}


def plan_table(
    synced: SyncedTable, storage: Mapping[RelationId, Storage], *, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Chunk, ...]:
    """The chunks of one table, at least one; their slices hold every row of it exactly once."""
    if not synced.table.is_partitioned:
        return _cut((synced.table,), storage, chunk_bytes)
    if all(_of(storage, table).is_open for table in (synced.table, *synced.leaves)):
        return _cut(synced.leaves, storage, chunk_bytes)
    size = sum(_of(storage, leaf).bytes for leaf in synced.leaves)
    return (Chunk(0, (Slice(synced.table, only=False),), size),)


def _of(storage: Mapping[RelationId, Storage], table: Table) -> Storage:
    # A table that was dropped since the catalog was read: its copy will say so by name.
    return storage.get(table.id, Storage(0, 0, is_open=True))


def _cut(
    tables: Sequence[Table], storage: Mapping[RelationId, Storage], chunk_bytes: int
) -> tuple[Chunk, ...]:
    """Lay the tables end to end and cut the line into equal parts; a part is a chunk."""
    sizes = [_of(storage, table).bytes for table in tables]
    wanted = min(MAX_CHUNKS, max(1, round(sum(sizes) / chunk_bytes)))
    length = max(1, -(-sum(sizes) // wanted))
    slices: dict[int, list[Slice]] = defaultdict(list)
    for table, start in zip(tables, itertools.accumulate(sizes, initial=0), strict=False):
        for number, piece in _pieces(table, _of(storage, table), start, length):
            slices[min(number, wanted - 1)].append(piece)
    chunks = enumerate(slices[number] for number in sorted(slices))
    return tuple(Chunk(number, tuple(pieces), length) for number, pieces in chunks) or (Chunk(0, (), 0),)


def _pieces(table: Table, stored: Storage, start: int, length: int) -> Iterator[tuple[int, Slice]]:
    """The parts of the line that `table` lies in, from byte `start`, with its pages there."""
    first, last = start // length, max(start, start + stored.bytes - 1) // length
    page = 0
    for number in range(first, last):
        end = round(stored.pages * ((number + 1) * length - start) / stored.bytes)
        if page < end < stored.pages:
            yield number, Slice(table, first_page=page, end_page=end)
            page = end
    yield last, Slice(table, first_page=page)


def select(piece: Slice, columns: Sequence[str], filters: tuple[RowFilter, ...] | None) -> sql.Composed:
    """The query for the rows of `piece` that pass the filters, with these columns in this order."""
    conditions = [*_page_conditions(piece), *_filter_conditions(filters)]
    return sql.SQL("select {} from {}{}{}").format(
        sql.SQL(", ").join(map(sql.Identifier, columns)),
        sql.SQL("only " if piece.only else ""),
        sql.Identifier(piece.table.name.schema, piece.table.name.name),
        sql.SQL(" where " if conditions else "") + sql.SQL(" and ").join(conditions),
    )


def _page_conditions(piece: Slice) -> Iterator[sql.Composable]:
    if piece.first_page > 0:
        yield sql.SQL("ctid >= {}::tid").format(f"({piece.first_page},0)")
    if piece.end_page is not None:
        yield sql.SQL("ctid < {}::tid").format(f"({piece.end_page},0)")


def _filter_conditions(filters: tuple[RowFilter, ...] | None) -> Iterator[sql.Composable]:
    if filters is not None:
        alternatives = (sql.SQL("(") + sql.SQL(row_filter.sql) + sql.SQL(")") for row_filter in filters)
        yield sql.SQL("({})").format(sql.SQL(" or ").join(alternatives))
