"""Progress of a running copy, as the subscriber's server reports it (`pg_stat_progress_copy`).

Executors do not talk to the driver while they copy, and need not: the server knows how far every COPY is.
The numbers are for people. They end at a little less than the truth, because the last look comes before the
end.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import psycopg

from cdc_replay.errors import CdcReplayError
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.snapshot.chunk import ChunkCopy, CopySetting
from cdc_replay.subscriber.state import SCHEMA

logger = logging.getLogger(__name__)

WATCH_SECONDS: Final = 1.0
"""How often the server is asked."""

Progress: TypeAlias = Callable[[QualifiedName, int, int], None]
"""Called with a table, and its rows and bytes so far; from another thread than the copy's."""

RUNNING: Final = """
    select namespace.nspname, class.relname, copy.tuples_processed, copy.bytes_processed
      from pg_catalog.pg_stat_progress_copy as copy
      join pg_catalog.pg_class as class on class.oid = copy.relid
      join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
     where copy.datname = pg_catalog.current_database() and copy.command = 'COPY FROM'
"""


@contextlib.contextmanager
def watched(setting: CopySetting, chunks: Sequence[ChunkCopy], progress: Progress | None) -> Iterator[None]:
    """Report progress of the chunks until the context ends."""
    if progress is None:
        yield
        return
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(setting, chunks, progress, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch(
    setting: CopySetting, chunks: Sequence[ChunkCopy], progress: Progress, ended: threading.Event
) -> None:
    tables = {_receiver(chunk): chunk.table.name for chunk in chunks}
    seen: dict[QualifiedName, tuple[int, int]] = {}
    try:
        with connect(setting.subscriber_dsn, purpose=f"{setting.purpose} progress") as connection:
            while not ended.wait(WATCH_SECONDS):
                _look(connection, tables, seen, progress)
    except (CdcReplayError, psycopg.Error) as error:
        # The copy does not depend on it, and has its own words for a server that is gone.
        logger.warning("progress of the snapshot cannot be shown: %s", error)


def _receiver(chunk: ChunkCopy) -> QualifiedName:
    return chunk.table.name if chunk.staging is None else QualifiedName(SCHEMA, chunk.staging)


def _look(
    connection: Connection,
    tables: Mapping[QualifiedName, QualifiedName],
    seen: dict[QualifiedName, tuple[int, int]],
    progress: Progress,
) -> None:
    """Note where every copy is, and report the tables that have moved."""
    moved = set()
    for schema, relation, rows, size in connection.execute(RUNNING):
        receiver = QualifiedName(schema, relation)
        if receiver in tables and seen.get(receiver) != (rows, size):
            seen[receiver] = (rows, size)
            moved.add(tables[receiver])
    for table in sorted(moved):
        parts = [counts for receiver, counts in seen.items() if tables[receiver] == table]
        progress(table, sum(rows for rows, _ in parts), sum(size for _, size in parts))
