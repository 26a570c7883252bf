"""A table whose copy is killed repeatedly, each time after some of its chunks, and then completed.

copy = ResumedCopy(publisher, subscriber, folder)
copy.begin("p")
copy.killed_after(3)          # stages three of the missing chunks under a separate snapshot
copy.completed(spark, rows)   # after a check that the table equals the result of `rows` on the publisher
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.setup import setup
from cdc_replay.config import Config, load_config
from cdc_replay.opening import capture_source
from cdc_replay.postgres.exported_snapshot import import_snapshot
from cdc_replay.snapshot.copy_chunk import CopiedChunk, copy_chunks, subscriber_connection
from cdc_replay.snapshot.copy_tables import CopiedTable, load_tables
from cdc_replay.snapshot.log_reader import log_identity, log_reader
from cdc_replay.snapshot.planning import SnapshotRequest, plan_tables
from fixtures.postgres import Database
from integration.snapshot.copying import snapshot_request

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CHUNK_BYTES = 32 * 1024


@dataclass
class ResumedCopy:
    """Publisher `pub`, its slot and change log, and subscription `s` to one publication with one table."""

    publisher: Database
    subscriber: Database
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    publication: str = ""
    replace: bool = False

    def begin(self, publication: str) -> None:
        """From now on the log has the changes of the publication's tables."""
        self.publication = publication
        setup(self.config, "pub")

    @property
    def file(self) -> Path:
        publisher = {
            "dsn": self.publisher.dsn,
            "slot": f"resumed_{self.publisher.name}",
            "change_log": "./change_log",
        }
        subscription = {"publisher": "pub", "publications": [self.publication], "dsn": self.subscriber.dsn}
        content = {"publishers": {"pub": publisher}, "subscriptions": {"s": subscription | self.options}}
        file = self.folder / "cdc_replay.yaml"
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return file

    @property
    def config(self) -> Config:
        return load_config(self.file)

    @contextmanager
    def request(self) -> Iterator[SnapshotRequest]:
        """A request for the table as of now, with the log."""
        header = ChangeLog.open(self.config.publisher("pub").change_log).header
        with snapshot_request(
            self.publisher.dsn,
            self.subscriber.dsn,
            self.publication,
            chunk_bytes=CHUNK_BYTES,
            replace=self.replace,
            log_identity=log_identity(header),
            read_log=log_reader(capture_source(self.config, "pub")),
        ) as request:
            yield request

    def killed_after(self, count: int, chance: random.Random | None = None) -> int:
        """Stage `count` missing chunks, the first or random ones; returns the number of missing chunks."""
        with self.request() as request, closing(subscriber_connection(request.settings(1))) as connection:
            (planned,) = plan_tables(connection, request)
            chunks = list(planned.chunks)
            some = chunks[:count] if chance is None else chance.sample(chunks, min(count, len(chunks)))
            for result in copy_chunks(request.settings(1), some):
                assert isinstance(result, CopiedChunk), result
        return len(chunks)

    def completed(
        self,
        spark: SparkSession,
        rows: str,
        *,
        received: str | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> CopiedTable:
        """Copy the missing chunks, and check that the target has the rows of query `rows` at the snapshot.

        `received` is the query on the subscriber, `meanwhile` happens after the snapshot was taken.
        """
        with self.request() as request:
            with import_snapshot(request.snapshot, purpose="test") as reader:
                reader.execute("set local search_path = public")
                expected = sorted(reader.execute(rows.encode()).fetchall())
            meanwhile()
            (copied,) = load_tables(spark, request)
        rows_copied = sorted(self.subscriber.rows(received or rows))
        assert rows_copied == expected
        assert self.subscriber.rows("select relname from pg_class where relname like 'snapshot%'") == []
        return copied
