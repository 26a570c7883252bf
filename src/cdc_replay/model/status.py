"""The state of publishers, change logs and subscriptions, as `status` reports it."""

from __future__ import annotations

from dataclasses import dataclass

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import Result


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """A publisher's slot and log, which goes from `log_start` to `log_end`.

    `behind_bytes` is WAL that the log does not hold yet.
    """

    publisher: str
    slot: str
    slot_state: str
    position: Lsn | None = None
    log_start: Lsn | None = None
    log_end: Lsn | None = None
    log_bytes: int | None = None
    behind_bytes: int | None = None
    retained_wal_bytes: int | None = None
    safe_wal_size_bytes: int | None = None
    error: str | None = None
    seconds_old: float | None = None
    """Age of an earlier answer; None if the publisher has answered now."""


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A subscribed table and its state.

    `notice` is set if a changed filter may have left rows (R9.12), or a rewrite values (R11.9).
    """

    subscription: str
    table: str
    state: str
    notice: str | None = None
    seconds_old: float | None = None


@dataclass(frozen=True, slots=True)
class SubscriptionStatus:
    """A subscription's position; `lag_bytes` is the distance from it to the publisher's position.

    `lag_seconds` is the age of the oldest captured transaction that is not applied, 0 if there is none;
    `behind_since` is its commit time, `behind_reason` why it is not applied (`replay.lag`). `error` says why
    the subscription is parked, or which changes do not reach it.
    """

    subscription: str
    publisher: str
    applied_lsn: Lsn | None = None
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    last_replay: str | None = None
    last_validation: str | None = None
    error: str | None = None
    behind_since: str | None = None
    behind_reason: str | None = None
    seconds_old: float | None = None
    """Age of an earlier answer; None if the subscriber has answered now."""


@dataclass(frozen=True, slots=True)
class CopyStatus:
    """Progress of the copy of a table.

    `bytes` are COPY text; `expected_bytes`, the table's size on the publisher's disk, estimates their total,
    and `seconds_left` the remaining time. For a copy whose process was killed, `reported_seconds_ago` grows.
    """

    subscription: str
    table: str
    rows: int
    bytes: int
    expected_bytes: int
    bytes_per_second: float
    seconds_left: float | None
    reported_seconds_ago: float


@dataclass(frozen=True, slots=True)
class StatusResult(Result):
    """Everything that the configuration names; `copies` are the running ones."""

    publishers: tuple[PublisherStatus, ...]
    subscriptions: tuple[SubscriptionStatus, ...]
    tables: tuple[TableStatus, ...]
    copies: tuple[CopyStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class SubscriberStatus:
    """What one subscriber reports of one subscription."""

    subscription: SubscriptionStatus
    tables: tuple[TableStatus, ...] = ()
    copies: tuple[CopyStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class LogRange:
    """What a change log holds; None if there is none."""

    start: Lsn | None = None
    end: Lsn | None = None
    bytes: int | None = None
