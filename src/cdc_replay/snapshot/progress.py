"""Progress of a running copy, as the subscriber's server reports it (`pg_stat_progress_copy`).

Executors do not talk to the driver while they copy, and need not: the server knows how far every COPY is. A
thread of the driver asks it every second, and tells

    the caller's `Progress`      a bar at the command line
    the log                      a line per table, every ten seconds: the Airflow task's log has it too
    the subscriber's state       a row per table, which `status` shows (`subscriber.copy_progress`)

The numbers are for people. They end at a little less than the truth, because the last look comes before the
end.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import psycopg

from cdc_replay.errors import CdcReplayError
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.snapshot.copy_chunk import CopySettings
from cdc_replay.snapshot.planning import TablePlan
from cdc_replay.subscriber.copy_progress import CopyProgress, clear_progress, report_progress
from cdc_replay.subscriber.state_schema import SCHEMA

logger = logging.getLogger(__name__)

WATCH_SECONDS: Final = 1.0
"""How often the server is asked."""

LOG_SECONDS: Final = 10.0
"""How often a table that is copied gets a line in the log."""

_MIB: Final = 1024 * 1024

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
def report_progress_while(
    setting: CopySettings, plans: Sequence[TablePlan], progress: Progress | None
) -> Iterator[None]:
    """Report progress of the tables' chunks until the context ends."""
    ended = threading.Event()
    watcher = threading.Thread(
        target=_watch,
        args=(setting, [_TableProgress.of(each) for each in plans], progress, ended),
        daemon=True,
    )
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


@dataclass(slots=True)
class _TableProgress:
    """A table: what earlier runs have staged of it, and the last that was seen of each running COPY."""

    table: QualifiedName
    rows_before: int
    bytes_before: int
    expected_bytes: int
    receivers: frozenset[QualifiedName]
    seen: dict[QualifiedName, tuple[int, int]] = field(default_factory=dict)
    began: float = 0.0
    logged: float = 0.0

    @classmethod
    def of(cls, planned: TablePlan) -> _TableProgress:
        """The table before anything of it is copied."""
        staged = planned.staged.values()
        receivers = (
            planned.table.name if chunk.staging is None else QualifiedName(SCHEMA, chunk.staging)
            for chunk in planned.chunks
        )
        return cls(
            planned.table.name,
            rows_before=sum(chunk.rows for chunk in staged),
            bytes_before=sum(chunk.bytes for chunk in staged),
            expected_bytes=sum(chunk.size for chunk in staged) + sum(chunk.bytes for chunk in planned.chunks),
            receivers=frozenset(receivers),
        )

    def see(self, receiver: QualifiedName, counts: tuple[int, int], now: float) -> bool:
        """Note where a COPY is; whether it has moved."""
        if self.seen.get(receiver) == counts:
            return False
        if not self.seen:
            self.began = self.logged = now - WATCH_SECONDS
        self.seen[receiver] = counts
        return True

    def progress(self, now: float) -> CopyProgress:
        """How far the table is."""
        size = sum(size for _, size in self.seen.values())
        return CopyProgress(
            self.table,
            rows=self.rows_before + sum(rows for rows, _ in self.seen.values()),
            bytes=self.bytes_before + size,
            expected_bytes=self.expected_bytes,
            bytes_per_second=size / max(now - self.began, WATCH_SECONDS),
        )


def _watch(
    setting: CopySettings, tables: Sequence[_TableProgress], progress: Progress | None, ended: threading.Event
) -> None:
    try:
        with connect(setting.subscriber_dsn, purpose=f"{setting.purpose} progress") as connection:
            clear_progress(connection, setting.subscription)
            while not ended.wait(WATCH_SECONDS):
                moved = _poll(connection, tables)
                report_progress(connection, setting.subscription, moved)
                if progress is not None:
                    for each in moved:
                        progress(each.table, each.rows, each.bytes)
            clear_progress(connection, setting.subscription)
    except (CdcReplayError, psycopg.Error) as error:
        # The copy does not depend on it, and has its own words for a server that is gone.
        logger.warning("progress of the snapshot cannot be shown: %s", error)


def _poll(connection: Connection, tables: Sequence[_TableProgress]) -> list[CopyProgress]:
    """Note where every copy is; the tables that have moved."""
    now = time.monotonic()
    moved: dict[QualifiedName, _TableProgress] = {}
    for schema, relation, rows, size in connection.execute(RUNNING):
        receiver = QualifiedName(schema, relation)
        for table in tables:
            if receiver in table.receivers and table.see(receiver, (rows, size), now):
                moved[table.table] = table
    for table in moved.values():
        if now - table.logged >= LOG_SECONDS:
            table.logged = now
            _log(table.progress(now))
    return [moved[name].progress(now) for name in sorted(moved)]


def _log(progress: CopyProgress) -> None:
    left = progress.seconds_left
    logger.info(
        "table %s: %d rows, %.0f MiB of about %.0f, %.1f MiB/s, %s",
        progress.table,
        progress.rows,
        progress.bytes / _MIB,
        progress.expected_bytes / _MIB,
        progress.bytes_per_second / _MIB,
        "no end in sight" if left is None else f"about {left:.0f} s left",
    )
