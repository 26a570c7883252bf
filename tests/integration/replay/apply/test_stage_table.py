"""Staging tables, which the tasks of a window create at the same time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.replay.apply.stage_table import StageTable
from cdc_replay.subscriber import state_schema
from fixtures.postgres import Database

TASKS = 2
TABLES = 800
"""Each is created by all tasks at once: the server refuses about a hundredth of them by their row type."""

TABLE = StageTable(0, QualifiedName("public", "t"), "", (), (), (), True, True, True)


@pytest.mark.parametrize("create", [StageTable.create, StageTable.create_changes])
def test_tasks_create_a_table_at_the_same_time(
    create: Callable[[StageTable, Connection], None], subscriber: Database
) -> None:
    with subscriber.connect() as connection:
        state_schema.install(connection)
    together = threading.Barrier(TASKS)

    def create_all(_task: int) -> None:
        try:
            with subscriber.connect() as connection:
                for number in range(TABLES):
                    together.wait(timeout=300)
                    create(dataclasses.replace(TABLE, name=f"stage_{number}"), connection)
        except BaseException:
            together.abort()  # the others need not wait for this one
            raise

    with ThreadPoolExecutor(TASKS) as threads:
        done = [threads.submit(create_all, task) for task in range(TASKS)]
    assert [each.exception() for each in done] == [None] * TASKS
    of_tasks = "relkind = 'r' and starts_with(relname, 'stage_')"
    assert subscriber.rows(f"select count(*) from pg_class where {of_tasks}") == [(TABLES,)]
