"""After a backfill, rows are what a native subscription holds: none that was never sent, no other values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from cdc_replay.commands.backfill import backfill
from cdc_replay.model.lsn import Lsn
from fixtures.postgres import Database
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

PUBLISHER = "create table t (id int primary key, a int, b text)"
SUBSCRIBER = "create table t (id int primary key, a int, b text, own text default 'own')"

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Range:
    """A range of the log, and the native subscriber's rows at both of its ends."""

    twin: Twin
    start: Lsn
    end: Lsn
    before: Mapping[str, list[Row]]
    after: Mapping[str, list[Row]]

    @property
    def ours(self) -> Database:
        return self.twin.pairs["s"].ours

    def check(self, subscriber: str = SUBSCRIBER) -> None:
        """Neither the subscriber nor another database, which had `before`, differs from native afterwards."""
        self.fill()
        other = self.twin.database(subscriber)
        for table, rows in self.before.items():
            put(other, table, rows)
        self.fill(into=other)
        for table, rows in self.after.items():
            assert self.ours.rows(f"table {table} order by 1") == rows, table
            assert other.rows(f"table {table} order by 1") == rows, table

    def fill(self, into: Database | None = None) -> None:
        backfill(
            self.twin.config, "s", str(self.start), str(self.end), into=None if into is None else into.dsn
        )


def put(database: Database, table: str, rows: list[Row]) -> None:
    with database.connect() as connection:
        for row in rows:
            values = ", ".join(["%s"] * len(row))
            connection.execute(f"insert into {table} values ({values})".encode(), row)


def apply_range(twin: Twin, script: str, table: str = "t") -> Range:
    """Publish the statements, and apply them on both sides."""
    twin.sync()
    before, start = {table: natively(twin, table)}, twin.position()
    twin.publish(script)
    end = twin.position()
    twin.sync()
    return Range(twin, start, end, before, {table: natively(twin, table)})


def natively(twin: Twin, table: str) -> list[Row]:
    twin.rows("s", table)
    return twin.pairs["s"].native.rows(f"table {table} order by 1")


def test_moved_row_keeps_the_columns_that_are_not_sent_in_another_database(twin: Twin) -> None:
    """R8.3: those of a narrowed column list, and those that only the subscriber has."""
    twin.publisher.run(f"{PUBLISHER}; create publication p for table t; insert into t values (1, 0, 'b')")
    twin.subscribe("s", "p", tables=SUBSCRIBER)
    twin.sync()
    for database in (twin.pairs["s"].ours, twin.pairs["s"].native):
        database.run("update t set own = 'kept'")
    twin.publish("alter publication p set table t (id, a)")

    moved = apply_range(twin, "update t set id = 2, a = 5")

    assert moved.after == {"t": [(2, 5, "b", "kept")]}
    moved.check()
