"""Chunks in tasks: the biggest first, and no more tasks than readers are allowed."""

from __future__ import annotations

import random

import pytest

from cdc_replay.model.table_state import Pending
from cdc_replay.snapshot.copy_chunk import ChunkCopy, TableCopy
from cdc_replay.snapshot.copy_tables import TASK_BYTES, TASK_CHUNKS, tasks
from fixtures.target_tables import target_table

TABLE = TableCopy(("id",), Pending(), target_table("t"))


def chunks(*sizes: int) -> list[ChunkCopy]:
    return [ChunkCopy(TABLE, chunk_id, (), (), size, staging=None) for chunk_id, size in enumerate(sizes)]


@pytest.mark.parametrize("readers", [None, 1, 3, 8])
def test_every_chunk_is_in_one_task(readers: int | None) -> None:
    chance = random.Random(readers)
    given = chunks(*(chance.choice([0, 10, TASK_BYTES // 3, 10 * TASK_BYTES]) for _ in range(100)))
    chunk_ids = [chunk.chunk_id for task in tasks(given, readers) for chunk in task]
    assert sorted(chunk_ids) == list(range(100))


def test_readers_bound_the_tasks_and_share_the_bytes() -> None:
    groups = tasks(chunks(60, 50, 40, 30, 20, 10), 2)
    assert [sum(chunk.bytes for chunk in group) for group in groups] == [110, 100]


def test_tasks_are_no_more_than_chunks() -> None:
    assert len(tasks(chunks(1, 1), 8)) == 2


def test_small_chunks_share_a_task_and_big_ones_come_first() -> None:
    groups = tasks(chunks(1, 2 * TASK_BYTES, 1, 1), None)
    assert [[chunk.chunk_id for chunk in group] for group in groups] == [[1], [0, 2, 3]]
    assert max(len(group) for group in tasks(chunks(*[1] * 100), None)) == TASK_CHUNKS
