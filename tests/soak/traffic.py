"""Mixed random traffic that native replication never stops at, for as long as it is let flow.

| table   | what it shows                                                                          |
|---------|----------------------------------------------------------------------------------------|
| `t`     | a row filter that rows cross; the whole old row is sent, so no value is ever missing   |
| `k`     | no filter; values stored out of line, most of which UPDATEs leave as they are          |
| `notes` | no key: as many duplicates as the publisher has                                        |
| `parts` | a partitioned table via its root; rows move between partitions and in and out of it    |

Transactions have up to 60 statements, some of them rolled back to a savepoint; a few are large, a few empty a
table.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import psycopg

from fixtures.postgres import Database

KEYS: Final = 4000
COLUMNS: Final = """
    create table t (id int primary key, a int, note text);
    create table k (id int primary key, n int, body text);
    create table notes (n int, note text);
"""
PUBLISHER: Final = f"""
    {COLUMNS}
    create table parts (id int, region text, a int, primary key (id, region)) partition by list (region);
    create table parts_n partition of parts for values in ('north');
    create table parts_s partition of parts for values in ('south', 'southwest');
    create table parts_o partition of parts default;
    alter table t replica identity full;
    alter table notes replica identity full;
    alter table parts_n replica identity full;
    alter table parts_s replica identity full;
    alter table parts_o replica identity full;
    alter table k alter body set storage external;
    create publication filtered for table t where (a > 50 and id % 7 <> 0);
    create publication whole for table k, notes;
    create publication rooted for table parts where (region <> 'west')
        with (publish_via_partition_root = true)
"""
SUBSCRIBER: Final = f"""
    {COLUMNS}
    create table parts (id int, region text, a int, primary key (id, region))
"""
PUBLICATIONS: Final = ("filtered", "whole", "rooted")
TABLES: Final = ("t", "k", "notes", "parts")

_STATEMENTS: Final = (
    ("insert into t select {key} + n, {number} + n, 'new' from generate_series(1, {few}) n"
    " on conflict do nothing"),
    "update t set a = 100 - a where id between {key} and {key} + {few}",
    "update t set id = id + {number} where id = {key}",
    "delete from t where id between {key} and {key} + {few}",
    "insert into k values ({key}, 1, repeat('{number}', 1000)) on conflict (id) do update set n = k.n + 1",
    "update k set n = n + 1 where id between {key} and {key} + {few}",
    "update k set body = repeat('{number} ', 900) where id = {key}",
    "update k set id = id + {number} where id = {key}",
    "delete from k where id between {key} and {key} + {few}",
    "insert into notes select {number} % 5, 'same' from generate_series(1, {few})",
    "update notes set note = 'changed' where ctid in (select ctid from notes where n = {number} % 5 limit 2)",
    "delete from notes where ctid in (select ctid from notes limit {few})",
    ("insert into parts select {key} + n, '{region}', {number} from generate_series(1, {few}) n"
    " on conflict do nothing"),
    "update parts set region = '{region}' where id = {key}",
    "update parts set a = a + 1 where id between {key} and {key} + {few}",
    "delete from parts where id = {key}",
)  # fmt: skip
_RARE: Final = (
    "truncate notes",
    "truncate t, k",
    "update t set a = a + 1",
    "insert into k select n, 0, repeat(n::text, 600) from generate_series(1, 1000) n on conflict do nothing",
    "delete from notes",
)


@dataclass
class Traffic:
    """Statements of one seed; `flowing` lets a thread execute them."""

    database: Database
    choose: random.Random
    transactions: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def flowing(self) -> Iterator[None]:
        """Transactions one after the other, until the end of the context; at least one."""
        failures: list[BaseException] = []

        def flow() -> None:
            try:
                with self.database.connect() as connection:
                    self._transaction(connection)
                    while not self._stop.wait(self.choose.random() / 10):
                        self._transaction(connection)
            except BaseException as error:  # noqa: BLE001 - handed to the test's thread
                failures.append(error)

        self._stop.clear()
        thread = threading.Thread(target=flow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        if failures:
            raise failures[0]

    def _transaction(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        with connection.transaction():
            for _ in range(self.choose.choice((1, 1, 3, 10, 60))):
                is_kept = self.choose.random() < 0.9
                # A key that is taken is the statement's failure, not the transaction's.
                with (
                    contextlib.suppress(psycopg.errors.UniqueViolation),
                    connection.transaction(force_rollback=not is_kept),
                ):
                    connection.execute(self._statement().encode())
        self.transactions += 1

    def _statement(self) -> str:
        if self.choose.random() < 0.005:
            return self.choose.choice(_RARE)
        return self.choose.choice(_STATEMENTS).format(
            key=self.choose.randrange(KEYS),
            number=self.choose.randrange(1, 1000),
            few=self.choose.randrange(1, 20),
            region=self.choose.choice(("north", "south", "southwest", "west", "east")),
        )
