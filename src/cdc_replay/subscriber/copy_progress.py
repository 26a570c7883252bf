"""How far a running copy is, where everybody can see it: `cdc_replay.copy_progress` of the subscriber.

The rows are for people. The process that copies writes them every second on a connection of its own, so that
they are visible while the copy's transactions are open, and removes them at its end. A process that was
killed leaves them, with the time at which it last wrote; the next copy of the subscription removes them.
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
    """How far the copy of one table is.

    `bytes` are COPY text; `expected_bytes` is what the table takes on the publisher's disk, a guess of what
    `bytes` will be in the end.
    """

    table: QualifiedName
    rows: int
    bytes: int
    expected_bytes: int
    bytes_per_second: float

    @property
    def seconds_left(self) -> float | None:
        """A guess; None while nothing moves."""
        if self.bytes_per_second <= 0:
            return None
        return max(0.0, (self.expected_bytes - self.bytes) / self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class ReportedProgress:
    """What a copy has reported, when it began, and how many seconds ago that was reported."""

    progress: CopyProgress
    started: datetime
    seconds_ago: float


def report_progress(connection: Connection, subscription: str, progress: Iterable[CopyProgress]) -> None:
    """Let others see how far these tables are."""
    for each in progress:
        connection.execute(
            _REPORT,
            (
                subscription,
                each.table.schema,
                each.table.name,
                each.rows,
                each.bytes,
                each.expected_bytes,
                each.bytes_per_second,
            ),
        )


def clear_progress(connection: Connection, subscription: str) -> None:
    """No copy of the subscription runs any more."""
    connection.execute("delete from cdc_replay.copy_progress where subscription = %s", (subscription,))


def read_progress(connection: Connection, subscription: str) -> tuple[ReportedProgress, ...]:
    """What the copies that run now, or were killed, have reported of their tables."""
    if not is_installed(connection):
        return ()
    return tuple(
        ReportedProgress(CopyProgress(QualifiedName(*row[:2]), *row[2:6]), *row[6:])
        for row in connection.execute(_READ, (subscription,))
    )
