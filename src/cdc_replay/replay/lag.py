"""Lag of a subscription: since when it lags the change log, why, and whether a replay can end that.

| the subscription                           | reason                              | a replay is due    |
|--------------------------------------------|-------------------------------------|--------------------|
| its subscriber does not answer             | the error of the connection         | no                 |
| has no copied table                        | the tables that wait for a snapshot | no                 |
| is parked before a transaction             | why it is parked                    | after `PATIENCE`   |
| its subscriber is read-only                | that                                | no                 |
| another process holds its lock             | which process                       | no                 |
| its last replay failed permanently         | the error                           | after `PATIENCE`   |
| its last replay failed temporarily         | the error                           | yes                |
| none of these: no replay has run since     | when the last one ended             | yes                |
| only tables that replay leaves out lag     | these tables                        | no                 |

A permanent failure ends when somebody changes a row or a privilege, for instance. No event reports that, so
such a replay is retried as well, after a while.

Lag is computed from the log and the subscriber, not from a record of attempts: a replay that was never
started, was killed, or did not reach its subscriber leaves no record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cdc_replay.errors import Retry
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Parked, Ready, TableState, describe
from cdc_replay.postgres.connection import Connection, is_read_only
from cdc_replay.replay.log_view import LogView
from cdc_replay.subscriber import (
    recorded_results,
    subscription_lock,
    subscription_records,
    subscription_tables,
)

PATIENCE: Final = timedelta(hours=1)
"""How long a permanent failure is left alone before it is retried."""


@dataclass(frozen=True, slots=True)
class Lag:
    """Why a subscription does not have all that the log has.

    `since` is the commit time of the oldest transaction of the log that a copied table lacks; None if it is
    unknown, or there is none. `is_replay_due`: a replay that starts now may help.
    """

    reason: str
    since: datetime | None = None
    is_replay_due: bool = False


def unanswered(error: Exception) -> Lag:
    """The lag of a subscription whose subscriber does not answer."""
    return Lag(f"the subscriber does not answer: {str(error).strip()}")


def lag_of(connection: Connection, subscription: str, change_log: LogView) -> Lag | None:
    """The present lag of a subscription; None if there is none.

    Raises:
        CdcReplayError: if the log is missing, pruned or damaged.
    """
    tables = subscription_tables.table_states(connection, subscription)
    if not tables and not subscription_tables.tables_are_listed(connection, subscription):
        return Lag("waits for its first snapshot")
    since = oldest_missing(change_log, [table for table in tables.values() if isinstance(table, Ready)])
    if since is not None:
        return _standstill(connection, subscription, since)
    if excluded := _excluded_tables(tables):
        parked = [table for table in tables.values() if isinstance(table, Parked)]
        return Lag(excluded, oldest_missing(change_log, parked))
    return None


def oldest_missing(change_log: LogView, tables: Sequence[Ready | Parked]) -> datetime | None:
    """The commit time of the oldest transaction of the log that one of the tables lacks (R9.14)."""
    after = min((table.applied_lsn for table in tables), default=None)
    commit = None if after is None else change_log.first_commit_after(after)
    return None if commit is None else datetime.fromtimestamp(commit.commit_time / 1e6, UTC)


def _standstill(connection: Connection, subscription: str, since: datetime) -> Lag:
    record = subscription_records.subscription_record(connection, subscription)
    last = recorded_results.last_result(connection, subscription, "replay")
    # Also if it ended in the future: the clock was set back since.
    is_patience_over = last is None or abs(datetime.now(UTC) - last.finished) > PATIENCE
    if record is not None and record.parked_at is not None:
        return Lag(f"parked at {record.parked_at}: {record.parked_reason}", since, is_patience_over)
    if is_read_only(connection):
        return Lag("the subscriber is read-only", since)
    if (holder := subscription_lock.lock_holder(connection, subscription)) is not None:
        return Lag(f"a process is at work: {holder}", since)
    if last is None:
        return Lag("no replay has run yet", since, is_replay_due=True)
    if error := last.result.get("error"):
        is_due = is_patience_over or last.result.get("retry") != Retry.NEVER.value
        return Lag(f"the last replay failed at {utc_text(last.finished)}: {error}", since, is_due)
    return Lag(f"no replay since {utc_text(last.finished)}", since, is_replay_due=True)


def utc_text(time: datetime) -> str:
    """The time in ISO 8601, in whole seconds of UTC."""
    return time.astimezone(UTC).isoformat(timespec="seconds")


def _excluded_tables(tables: Mapping[QualifiedName, TableState]) -> str:
    """The tables that replay leaves out, each with its state; empty if there are none."""
    states = {name: describe(table) for name, table in tables.items() if not isinstance(table, Ready)}
    return "; ".join(f"{name}: {description}" for name, description in states.items())
