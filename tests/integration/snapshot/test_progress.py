"""Progress of a copy is shown while it runs, also before a chunk of it is done."""

from __future__ import annotations

import threading

from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Pending
from cdc_replay.snapshot.chunk import ChunkCopy, CopySetting, TableCopy
from cdc_replay.snapshot.watch import watched
from fixtures.postgres import Database
from integration.snapshot.copying import public, snapshot_request


def test_rows_of_a_running_copy_are_reported(publisher: Database, subscriber: Database) -> None:
    publisher.run("create publication p for all tables")
    subscriber.run("create table t (id int)")
    table = TableCopy(public("t"), ("id",), is_partitioned=False, begun=Pending())
    chunk = ChunkCopy(table, 0, (), 0, staging=None)
    reported: list[tuple[QualifiedName, int, int]] = []
    seen = threading.Event()

    def progress(name: QualifiedName, rows: int, size: int) -> None:
        reported.append((name, rows, size))
        seen.set()

    with snapshot_request(publisher.dsn, subscriber.dsn, "p") as request, subscriber.connect() as writer:
        setting = CopySetting("s", request.snapshot, subscriber.dsn, replace=False)
        with (
            watched(setting, [chunk], progress),
            writer.cursor() as cursor,
            cursor.copy("copy t from stdin") as into,
        ):
            into.write(b"1234567\n" * 100_000)
            assert seen.wait(timeout=30), "no progress is reported within 30 s"
    name, rows, size = reported[0]
    assert name == public("t")
    assert 0 < rows <= 100_000
    assert 0 < size <= 800_000


def test_server_that_is_gone_does_not_disturb_the_copy(publisher: Database, subscriber: Database) -> None:
    publisher.run("create publication p for all tables")
    with snapshot_request(publisher.dsn, subscriber.dsn, "p") as request:
        setting = CopySetting("s", request.snapshot, "postgresql://nobody@127.0.0.1:1/none", replace=False)
        with watched(setting, [], lambda *_: None):
            pass
