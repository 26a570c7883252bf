"""Progress of a running copy, from the subscriber's `pg_stat_progress_copy`.

Executors do not report to the driver while they copy. A thread of the driver polls the server every second,
and reports to

    the caller's `Report`        a display at the command line, lines in a log
    the subscriber's state       a row per table, which `status` shows (`subscriber.progress`)

The final numbers are slightly low, because the last poll precedes the end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

import psycopg

from cdc_replay.beside import beside
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.progress import Progress, Report
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.snapshot.copy_chunk import CopySettings
from cdc_replay.snapshot.planning import TablePlan
from cdc_replay.subscriber.copy_progress import CopyProgress, clear_progress, report_progress
from cdc_replay.subscriber.state_schema import SCHEMA

logger = logging.getLogger(__name__)

WATCH_SECONDS: Final = 1.0
"""Interval of polling."""

# A chunk's staging table is created in the transaction that fills it: nobody else finds it in the catalog, so
# its name is that in the statement.
RUNNING: Final = """
    select coalesce(namespace.nspname, 'cdc_replay'),
           coalesce(class.relname, substring(activity.query from '^copy "cdc_replay"[.]"([^"]+)"'), ''),
           copy.tuples_processed, copy.bytes_processed
      from pg_catalog.pg_stat_progress_copy as copy
      join pg_catalog.pg_stat_activity as activity using (pid)
      left join pg_catalog.pg_class as class on class.oid = copy.relid
      left join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
     where copy.datname = pg_catalog.current_database() and copy.command = 'COPY FROM'
"""


def report_progress_while(
    settings: CopySettings, plans: Sequence[TablePlan], report: Report
) -> AbstractContextManager[None]:
    """Report progress of the tables' chunks until the context ends."""
    tables = [_TableProgress.from_plan(planned) for planned in plans]
    return beside(lambda ended: _watch(settings, tables, report, ended))


@dataclass(slots=True)
class _TableProgress:
    """A table: rows and bytes staged by earlier runs, and the last counts of each running COPY."""

    table: QualifiedName
    rows_before: int
    bytes_before: int
    expected_bytes: int
    receivers: frozenset[QualifiedName]
    counts: dict[QualifiedName, tuple[int, int]] = field(default_factory=dict)
    started: float = 0.0

    @classmethod
    def from_plan(cls, planned: TablePlan) -> _TableProgress:
        """The table at the start of the copy."""
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

    def update(self, receiver: QualifiedName, counts: tuple[int, int], now: float) -> bool:
        """Record the counts of a COPY; whether they changed."""
        if self.counts.get(receiver) == counts:
            return False
        if not self.counts:
            self.started = now - WATCH_SECONDS
        self.counts[receiver] = counts
        return True

    def progress(self, now: float) -> CopyProgress:
        """The current progress of the table."""
        size = sum(size for _, size in self.counts.values())
        return CopyProgress(
            self.table,
            rows=self.rows_before + sum(rows for rows, _ in self.counts.values()),
            bytes=self.bytes_before + size,
            expected_bytes=self.expected_bytes,
            bytes_per_second=size / max(now - self.started, WATCH_SECONDS),
        )

    def end(self) -> Progress:
        """The progress after the last COPY: nothing is left, whatever the estimate was."""
        copy = self.progress(time.monotonic())
        return Progress("copy", str(copy.table), copy.bytes, copy.bytes, rows=copy.rows)


def _watch(
    settings: CopySettings,
    tables: Sequence[_TableProgress],
    report: Report,
    ended: threading.Event,
) -> None:
    try:
        with connect(settings.subscriber_dsn, purpose=f"{settings.purpose} progress") as connection:
            clear_progress(connection, settings.subscription)
            while not ended.wait(WATCH_SECONDS):
                moved = _poll(connection, tables)
                report_progress(connection, settings.subscription, moved)
                for copy in moved:
                    report(_to_report(copy))
            clear_progress(connection, settings.subscription)
            for table in tables:
                if table.counts:
                    report(table.end())
    except (CdcReplayError, psycopg.Error) as error:
        # The copy does not depend on it, and reports a lost server itself.
        logger.warning("cannot report progress of the snapshot: %s", error)


def _poll(connection: Connection, tables: Sequence[_TableProgress]) -> list[CopyProgress]:
    """Record the counts of every COPY; the tables that progressed."""
    now = time.monotonic()
    moved: dict[QualifiedName, _TableProgress] = {}
    for schema, relation, rows, size in connection.execute(RUNNING):
        receiver = QualifiedName(schema, relation)
        for table in tables:
            if receiver in table.receivers and table.update(receiver, (rows, size), now):
                moved[table.table] = table
    return [moved[name].progress(now) for name in sorted(moved)]


def _to_report(copy: CopyProgress) -> Progress:
    # COPY text may be longer than the table on disk, which the total is estimated from.
    total = max(copy.expected_bytes, copy.bytes + 1)
    return Progress("copy", str(copy.table), copy.bytes, total, rows=copy.rows)
