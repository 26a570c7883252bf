"""Progress of a copy is shown while it runs, also before a chunk is complete."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from psycopg import sql

from cdc_replay.commands.status import status
from cdc_replay.config import Config, load_config
from cdc_replay.model.progress import Progress, unreported
from cdc_replay.model.table_state import Pending
from cdc_replay.snapshot.copy_chunk import ChunkCopy, CopySettings, TableCopy
from cdc_replay.snapshot.planning import TablePlan
from cdc_replay.snapshot.progress import report_progress_while
from cdc_replay.snapshot.staging import create_staging, staging_name, staging_table
from fixtures.postgres import Database
from integration.snapshot.copying import snapshot_request, target_table


@dataclass(frozen=True)
class Reports:
    """What a copy has reported."""

    received: list[Progress] = field(default_factory=list)
    _seen: threading.Event = field(default_factory=threading.Event)

    def __call__(self, progress: Progress, /) -> None:
        self.received.append(progress)
        self._seen.set()

    def await_first(self) -> None:
        assert self._seen.wait(timeout=300), "no progress is reported"


def test_rows_of_a_running_copy_are_reported(
    publisher: Database, subscriber: Database, tmp_path: Path
) -> None:
    publisher.run("create table t (id int); create publication p for all tables")
    subscriber.run("create table t (id int)")
    reports = Reports()
    with snapshot_request(publisher.dsn, subscriber.dsn, "p") as request, subscriber.connect() as writer:
        (synced,) = request.tables
        table = TableCopy(("id",), Pending(), target_table(subscriber, "t"))
        chunk = ChunkCopy(table, 0, (), (), 2_000_000, staging=None)
        planned = TablePlan(table, synced, None, None, {}, None, (chunk,))
        with (
            report_progress_while(request.settings(1), [planned], reports),
            writer.cursor() as cursor,
            cursor.copy("copy t from stdin") as into,
        ):
            into.write(b"1234567\n" * 100_000)
            reports.await_first()
            (shown,) = status(configuration(publisher, subscriber, tmp_path)).copies
        assert status(configuration(publisher, subscriber, tmp_path)).copies == ()
    first = reports.received[0]
    assert (first.action, first.of, first.total) == ("copy", "public.t", 2_000_000)
    assert first.rows is not None
    assert 0 < first.rows <= 100_000
    assert 0 < first.done <= 800_000
    assert (shown.table, shown.expected_bytes) == ("public.t", 2_000_000)
    assert 0 < shown.rows <= 100_000
    assert shown.bytes_per_second > 0
    assert shown.seconds_left is not None


def test_rows_of_a_chunk_are_reported_before_its_staging_table_is_committed(
    publisher: Database, subscriber: Database
) -> None:
    publisher.run("create table t (id int); create publication p for all tables")
    subscriber.run("create table t (id int)")
    reports = Reports()
    with snapshot_request(publisher.dsn, subscriber.dsn, "p") as request, subscriber.connect() as writer:
        (synced,) = request.tables
        table = TableCopy(("id",), Pending(), target_table(subscriber, "t"))
        staging = staging_name("s", synced.table.name, request.snapshot.consistent_point, 0)
        chunk = ChunkCopy(table, 0, (), (), 2_000_000, staging)
        planned = TablePlan(table, synced, None, None, {}, None, (chunk,))
        with (
            report_progress_while(request.settings(1), [planned], reports),
            writer.transaction(),
            writer.cursor() as cursor,
        ):
            create_staging(writer, staging, table.target, table.columns)
            with cursor.copy(sql.SQL("copy {} from stdin").format(staging_table(staging))) as into:
                into.write(b"1234567\n" * 100_000)
                reports.await_first()
    first = reports.received[0]
    assert (first.action, first.of) == ("copy", "public.t")


def configuration(publisher: Database, subscriber: Database, folder: Path) -> Config:
    file = folder / "cdc_replay.yaml"
    file.write_text(
        f"publishers: {{pub: {{dsn: '{publisher.dsn}', change_log: log}}}}\n"
        f"subscriptions: {{s: {{publisher: pub, publications: [p], dsn: '{subscriber.dsn}'}}}}\n",
        encoding="utf-8",
    )
    return load_config(file)


def test_lost_server_of_the_progress_thread_does_not_disturb_the_copy(
    publisher: Database, subscriber: Database
) -> None:
    publisher.run("create publication p for all tables")
    with snapshot_request(publisher.dsn, subscriber.dsn, "p") as request:
        settings = CopySettings("s", request.snapshot, "postgresql://nobody@127.0.0.1:1/none", replace=False)
        with report_progress_while(settings, [], unreported):
            pass
