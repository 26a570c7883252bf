"""Chunks of a copy have every row exactly once, and only published rows and columns (R7.3-R7.6)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from psycopg import sql

from cdc_replay.model.publication import Table
from cdc_replay.model.relation import RelationId
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.snapshot.plan import MAX_CHUNKS, Chunk, PageSlice, Storage, plan_table, select
from fixtures import catalogs

PAGE = 8192
CHUNK = 100 * PAGE


def table(oid: int, *, is_partitioned: bool = False) -> Table:
    return catalogs.table(oid, f"public.t{oid}", is_partitioned=is_partitioned)


def plain(pages: int) -> tuple[SyncedTable, dict[RelationId, Storage]]:
    leaf = table(1)
    return SyncedTable(leaf, (leaf,), None, ("a",)), {leaf.id: Storage(pages, pages * PAGE, is_open=True)}


def partitioned(sizes: Sequence[int]) -> tuple[SyncedTable, dict[RelationId, Storage]]:
    root = table(1, is_partitioned=True)
    leaves = tuple(table(chunk_id) for chunk_id in range(2, 2 + len(sizes)))
    storage = {
        leaf.id: Storage(pages, pages * PAGE, is_open=True) for leaf, pages in zip(leaves, sizes, strict=True)
    }
    return SyncedTable(root, leaves, None, ("a",)), storage | {root.id: Storage(0, 0, is_open=True)}


def assert_every_page_once(chunks: Sequence[Chunk], storage: Mapping[RelationId, Storage]) -> None:
    """Per table, the slices follow each other from page 0 without gap or overlap to an open end."""
    reached: dict[RelationId, int | None] = {}
    for chunk in chunks:
        for page_slice in chunk.slices:
            assert page_slice.only
            assert reached.get(page_slice.table.id, 0) == page_slice.first_page
            reached[page_slice.table.id] = page_slice.end_page
    assert all(end is None for end in reached.values())
    assert {oid for oid, stored in storage.items() if stored.pages} <= reached.keys()


def test_small_table_is_one_chunk_without_page_range() -> None:
    synced, storage = plain(pages=3)
    ((page_slice,),) = [chunk.slices for chunk in plan_table(synced, storage, chunk_bytes=CHUNK)]
    assert page_slice == PageSlice(synced.table)


def test_big_table_is_cut_into_equal_ranges_with_an_open_end() -> None:
    synced, storage = plain(pages=300)
    chunks = plan_table(synced, storage, chunk_bytes=CHUNK)
    ranges = [(page_slice.first_page, page_slice.end_page) for chunk in chunks for page_slice in chunk.slices]
    assert ranges == [(0, 100), (100, 200), (200, None)]
    assert [chunk.chunk_id for chunk in chunks] == [0, 1, 2]


def test_small_leaves_share_a_chunk_and_big_ones_are_cut() -> None:
    synced, storage = partitioned([50, 50, 200])
    chunks = plan_table(synced, storage, chunk_bytes=CHUNK)
    assert [len(chunk.slices) for chunk in chunks] == [2, 1, 1]
    assert_every_page_once(chunks, storage)


@pytest.mark.parametrize("seed", range(20))
def test_every_page_is_in_exactly_one_chunk(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        sizes = [chance.choice([0, 1, 7, 99, 100, 101, 5000]) for _ in range(chance.randrange(1, 8))]
        synced, storage = partitioned(sizes)
        chunks = plan_table(synced, storage, chunk_bytes=chance.choice([1, PAGE, CHUNK, 10 * CHUNK]))
        assert_every_page_once(chunks, storage)
        assert 1 <= len(chunks) <= MAX_CHUNKS


def test_number_of_chunks_is_bounded() -> None:
    synced, storage = plain(pages=10_000_000)
    assert len(plan_table(synced, storage, chunk_bytes=CHUNK)) == MAX_CHUNKS


def test_partitioned_table_without_partitions_is_one_empty_chunk() -> None:
    synced, storage = partitioned([])
    assert [chunk.slices for chunk in plan_table(synced, storage)] == [()]


def test_dropped_table_is_still_read_by_name() -> None:
    synced, _ = plain(pages=1)
    ((page_slice,),) = [chunk.slices for chunk in plan_table(synced, {})]
    assert page_slice == PageSlice(synced.table)


def test_unreadable_leaf_makes_the_root_the_source() -> None:
    synced, storage = partitioned([1, 1])
    storage[synced.leaves[1].id] = Storage(1, PAGE, is_open=False)
    ((page_slice,),) = [chunk.slices for chunk in plan_table(synced, storage)]
    assert page_slice == PageSlice(synced.table, only=False)


def test_query_names_columns_in_order_and_quotes_them() -> None:
    query = select(PageSlice(table(1)), ("b", 'A "x"', "select"), None)
    assert query.as_string(None) == 'select "b", "A ""x""", "select" from only "public"."t1"'


def test_query_combines_range_and_filters() -> None:
    passes = sql.SQL("({} or {})").format(sql.SQL("(a > 1)"), sql.SQL("(b like {})").format("%{}%s"))
    query = select(PageSlice(table(1), first_page=5, end_page=9), ("a",), passes)
    assert query.as_string(None) == (
        """select "a" from only "public"."t1" where ctid >= '(5,0)'::tid and ctid < '(9,0)'::tid"""
        " and ((a > 1) or (b like '%{}%s'))"
    )


def test_root_is_read_with_its_partitions() -> None:
    query = select(PageSlice(table(1), only=False), ("a",), None)
    assert query.as_string(None) == 'select "a" from "public"."t1"'


@pytest.mark.parametrize("seed", range(20))
def test_exactly_the_completed_pages_are_left_out(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        sizes = [chance.choice([0, 1, 7, 100, 5000]) for _ in range(chance.randrange(1, 6))]
        synced, storage = partitioned(sizes)
        first = plan_table(synced, storage, chunk_bytes=chance.choice([PAGE, CHUNK]))
        completed = chance.sample(first, chance.randrange(1, len(first) + 1))
        slices = tuple(page_slice for chunk in completed for page_slice in chunk.slices)
        remaining = plan_table(synced, storage, chunk_bytes=chance.choice([PAGE, CHUNK]), completed=slices)
        slices_read = [*slices, *(page_slice for chunk in remaining for page_slice in chunk.slices)]
        in_order = tuple(sorted(slices_read, key=lambda page_slice: page_slice.first_page))
        assert_every_page_once((Chunk(0, in_order, 0),), storage)


def test_completed_table_has_no_chunks() -> None:
    synced, storage = plain(pages=10)
    assert plan_table(synced, storage, completed=(PageSlice(synced.table),)) == ()
