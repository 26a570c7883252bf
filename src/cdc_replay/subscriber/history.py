"""What windows and validations did, over time: `cdc_replay.window_history` and `validation_history`.

`recorded_results` keeps the last results in full; a history keeps numbers of many. A window is appended in
its own transaction, so the history has exactly the windows that were applied, and those that failed. While
nothing changes, there is one window a minute at most.

Each append deletes a few of the subscription's oldest rows: those of windows older than `DAYS_KEPT`, of
validations older than `PROOF_DAYS_KEPT`, or beyond the newest `ROWS_KEPT`. So no append takes long, and no
history grows without bounds. `proofs` has what a validation has seen of each table.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, LiteralString, TypeAlias

from psycopg import sql
from psycopg.rows import class_row

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import ReplayResult
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.state_schema import is_complete

DAYS_KEPT: Final = 30
PROOF_DAYS_KEPT: Final = 90
ROWS_KEPT: Final = 50_000
POINTS: Final = 240
"""A chart has about this many points at most."""

Query: TypeAlias = LiteralString | sql.Composed

_APPEND: Final = """
    with
    oldest as (
        select subscription, finished, number from cdc_replay.{table}
        where subscription = %(subscription)s order by finished, number limit 10
    ),
    newest as (
        select finished, number from cdc_replay.{table}
        where subscription = %(subscription)s order by finished desc, number desc limit 1
    ),
    expired as (
        delete from cdc_replay.{table} as history using oldest
        where (history.subscription, history.finished, history.number)
                = (oldest.subscription, oldest.finished, oldest.number)
            and (history.finished < pg_catalog.clock_timestamp() - %(kept)s
                or history.number <= (select number from newest) - %(rows_kept)s)
    )
    insert into cdc_replay.{table} (subscription, {columns})
    select %(subscription)s, {values}
    where not %(is_empty)s or not exists (
        select from newest where finished > pg_catalog.clock_timestamp() - interval '1 minute'
    )
"""

_WINDOWS: Final = """
    select finished, from_lsn::text, end_lsn::text, changes_read, filtered_out, updates_to_insert,
        updates_to_delete, applied, conflicts, seconds, lag_seconds, lag_bytes, error
    from cdc_replay.window_history where subscription = %s
    order by finished desc, number desc limit %s
"""

_WINDOWS_OF_COMMITS: Final = """
    select distinct on (wanted.commit_lsn) wanted.commit_lsn::text, finished, from_lsn::text, end_lsn::text,
        changes_read, filtered_out, updates_to_insert, updates_to_delete, applied, conflicts, seconds,
        lag_seconds, lag_bytes, error
    from unnest(%s::pg_lsn[]) as wanted (commit_lsn)
    join cdc_replay.window_history
        on wanted.commit_lsn > from_lsn and wanted.commit_lsn <= end_lsn
    where subscription = %s and error is null and changes_read > 0
    order by wanted.commit_lsn, finished, number
"""

_VALIDATIONS: Final = """
    select finished, lsn::text, consistent, tables, differing_tables, differing_rows, seconds, report,
        is_partial
    from cdc_replay.validation_history where subscription = %s
    order by finished desc, number desc limit %s
"""

_POINTS: Final = """
    select pg_catalog.date_bin(%(width)s, finished, timestamptz '2000-01-01') as time,
        pg_catalog.max(lag_seconds) as lag_seconds, pg_catalog.max(lag_bytes)::bigint as lag_bytes,
        pg_catalog.sum(changes_read)::bigint as changes_read, pg_catalog.sum(applied)::bigint as applied,
        pg_catalog.sum(conflicts)::bigint as conflicts
    from cdc_replay.window_history
    where subscription = %(subscription)s and finished > pg_catalog.clock_timestamp() - %(duration)s
        and error is null
    group by 1 order by 1
"""


class TimeRange(enum.Enum):
    """The time that a chart shows, up to now."""

    HOUR = "1h"
    DAY = "24h"
    WEEK = "7d"

    @property
    def duration(self) -> dt.timedelta:
        """The length of the range."""
        return {"1h": dt.timedelta(hours=1), "24h": dt.timedelta(days=1), "7d": dt.timedelta(days=7)}[
            self.value
        ]


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """A window; `lag_seconds` and `lag_bytes` are those of the subscription just before it was applied.

    `applied` counts changed rows and TRUNCATEs. A window with an `error` was not applied.
    """

    finished: dt.datetime
    from_lsn: str
    end_lsn: str
    changes_read: int
    filtered_out: int
    updates_to_insert: int
    updates_to_delete: int
    applied: int
    conflicts: int
    seconds: float
    lag_seconds: float | None
    lag_bytes: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ValidationRecord:
    """A validation; `report` is the file name of its page.

    `consistent`: nothing that was compared differs. `is_partial`: not all rows of all tables were compared.
    """

    finished: dt.datetime
    lsn: str
    consistent: bool
    tables: int
    differing_tables: int
    differing_rows: int
    seconds: float
    report: str
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """The windows that ended within a short time from `time` on: the greatest lag, the sum of the rest."""

    time: dt.datetime
    lag_seconds: float | None
    lag_bytes: int | None
    changes_read: int
    applied: int
    conflicts: int


def append_window(
    connection: Connection,
    result: ReplayResult,
    *,
    lag_seconds: float | None = None,
    lag_bytes: int | None = None,
) -> None:
    """Append a window, in the transaction that applies it; an empty one only after a minute."""
    values = {
        "from_lsn": str(result.from_lsn),
        "end_lsn": str(result.to_lsn),
        "changes_read": result.changes_read,
        "filtered_out": result.filtered_out,
        "updates_to_insert": result.updates_to_insert,
        "updates_to_delete": result.updates_to_delete,
        "applied": sum(result.applied.values()),
        "conflicts": sum(result.conflicts.values()),
        "seconds": result.seconds,
        "lag_seconds": lag_seconds,
        "lag_bytes": lag_bytes,
        "error": result.error,
    }
    is_empty = not result.changes_read and result.error is None
    _append(connection, "window_history", result.subscription, values, days=DAYS_KEPT, is_empty=is_empty)


def append_validation(
    connection: Connection, subscription: str, lsn: Lsn, values: Mapping[str, int | float | str | bool]
) -> None:
    """Append a validation; `values` are the other columns of `ValidationRecord`."""
    _append(connection, "validation_history", subscription, {"lsn": str(lsn), **values}, days=PROOF_DAYS_KEPT)


def last_windows(connection: Connection, subscription: str, limit: int) -> tuple[WindowRecord, ...]:
    """The newest windows, the newest first."""
    return _read(connection, WindowRecord, _WINDOWS, (subscription, limit))


def windows_of_commits(
    connection: Connection, subscription: str, commit_lsns: Iterable[Lsn]
) -> dict[Lsn, WindowRecord]:
    """The window that applied each of these transactions, as far as the history has it."""
    if not is_complete(connection):
        return {}
    rows = connection.execute(_WINDOWS_OF_COMMITS, ([str(lsn) for lsn in commit_lsns], subscription))
    return {Lsn.parse(commit_lsn): WindowRecord(*window) for commit_lsn, *window in rows}


def last_validations(connection: Connection, subscription: str, limit: int) -> tuple[ValidationRecord, ...]:
    """The newest validations, the newest first."""
    return _read(connection, ValidationRecord, _VALIDATIONS, (subscription, limit))


def history_points(
    connection: Connection, subscription: str, time_range: TimeRange
) -> tuple[HistoryPoint, ...]:
    """The windows of the range, in `POINTS` steps at most."""
    duration = time_range.duration
    arguments = {"subscription": subscription, "duration": duration, "width": duration / POINTS}
    return _read(connection, HistoryPoint, _POINTS, arguments)


def _append(
    connection: Connection,
    table: str,
    subscription: str,
    values: Mapping[str, object],
    *,
    days: int,
    is_empty: bool = False,
) -> None:
    names = [name for name, value in values.items() if value is not None]
    statement = sql.SQL(_APPEND).format(
        table=sql.Identifier(table),
        columns=sql.SQL(", ").join(map(sql.Identifier, names)),
        values=sql.SQL(", ").join(map(sql.Placeholder, names)),
    )
    limits = {"kept": dt.timedelta(days=days), "rows_kept": ROWS_KEPT}
    connection.execute(statement, {**values, **limits, "subscription": subscription, "is_empty": is_empty})


def _read(connection: Connection, record: type[Any], query: Query, arguments: Any) -> tuple[Any, ...]:  # noqa: ANN401
    if not is_complete(connection):
        return ()
    with connection.cursor(row_factory=class_row(record)) as cursor:
        return tuple(cursor.execute(query, arguments))
