"""Progress of a running copy, visible to everybody in `cdc_replay.copy_progress` of the subscriber.

The copying process writes its rows every second on a separate connection, so that they are visible while the
copy's transactions are open, and deletes them at the end. A killed process leaves them, with the time of the
last update; the next copy of the subscription deletes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.state_schema import is_installed

_REPORT: Final = """
    insert into cdc_replay.copy_progress
        (subscription, schema_name, table_name, rows, bytes, expected_bytes, bytes_per_second)
    values (%s, %s, %s, %s, %s, %s, %s)
    on conflict (subscription, schema_name, table_name)
    do update set rows = excluded.rows, bytes = excluded.bytes, expected_bytes = excluded.expected_bytes,
        bytes_per_second = excluded.bytes_per_second, updated = pg_catalog.clock_timestamp()
"""

_READ: Final = """
    select schema_name, table_name, rows, bytes, expected_bytes, bytes_per_second, started,
        extract(epoch from pg_catalog.clock_timestamp() - updated)::float8
    from cdc_replay.copy_progress where subscription = %s order by schema_name, table_name
"""


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """Progress of the copy of one table.

    `bytes` are COPY text; `expected_bytes`, the table's size on the publisher's disk, is an estimate of the
    final `bytes`.
    """

    table: QualifiedName
    rows: int
    bytes: int
    expected_bytes: int
    bytes_per_second: float

    @property
    def seconds_left(self) -> float | None:
        """An estimate; None while nothing is copied."""
        if self.bytes_per_second <= 0:
            return None
        return max(0.0, (self.expected_bytes - self.bytes) / self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class ReportedProgress:
    """Reported progress, when the copy started, and the age of the report in seconds."""

    progress: CopyProgress
    started: datetime
    seconds_ago: float


def report_progress(connection: Connection, subscription: str, progress: Iterable[CopyProgress]) -> None:
    """Publish the progress of these tables."""
    for copy in progress:
        counts = (copy.rows, copy.bytes, copy.expected_bytes, copy.bytes_per_second)
        connection.execute(_REPORT, (subscription, copy.table.schema, copy.table.name, *counts))


def clear_progress(connection: Connection, subscription: str) -> None:
    """Delete the progress of the subscription."""
    connection.execute("delete from cdc_replay.copy_progress where subscription = %s", (subscription,))


def read_progress(connection: Connection, subscription: str) -> tuple[ReportedProgress, ...]:
    """The progress of copies that are running or were killed."""
    if not is_installed(connection):
        return ()
    return tuple(
        ReportedProgress(CopyProgress(QualifiedName(*row[:2]), *row[2:6]), *row[6:])
        for row in connection.execute(_READ, (subscription,))
    )
