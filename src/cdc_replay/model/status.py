"""The state of publishers, change logs and subscriptions, as `status` reports it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import Result, ValidationOutcome


class PublisherState(enum.Enum):
    """What a publisher's slot can do now."""

    READY = "ready"
    NO_SLOT = "no slot"
    NEAR_LOST = "slot near lost"
    """It will soon be lost, or dropped over `max_retained_wal`, unless a capture advances it."""
    LOST = "slot lost"
    LOG_UNREADABLE = "log unreadable"
    DOWN = "down"


class SubscriptionState(enum.Enum):
    """What a subscription waits for."""

    READY = "ready"
    NEW = "new"
    """It has no tables yet."""
    COPYING = "copying"
    """A table is being copied, or waits for that."""
    FAILED = "failed"
    """Its last replay failed, and it is not parked."""
    PARKED = "parked"
    """The subscription, or a table of it."""
    DOWN = "down"


class TableSync(enum.Enum):
    """The state of a table in one word."""

    READY = "ready"
    WAITING = "waiting"
    COPYING = "copying"
    PARKED = "parked"
    DROPPED = "dropped"


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
    state: PublisherState = PublisherState.DOWN
    max_retained_wal_bytes: int | None = None
    uncaptured_seconds: float | None = None
    """Since WAL was first seen beyond the present end of the log; None if that is not known."""


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
    sync: TableSync = TableSync.READY
    applied_lsn: Lsn | None = None
    parked_transaction: Lsn | None = None
    proof: str | None = None
    """What validations have proven of it (`model.proof`), in words; None if nothing is recorded."""
    proven_through: Lsn | None = None
    proven_at: str | None = None
    differing_buckets: int = 0
    """Buckets that differed when they were last compared."""
    max_proof_age_seconds: float | None = None
    """How old its proof may be, by the configuration."""


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
    state: SubscriptionState = SubscriptionState.DOWN
    parked: str | None = None
    """Why the subscription is parked; None if it is not, although a table may be."""
    parked_transaction: Lsn | None = None
    last_replay_at: str | None = None
    last_replay_failed: bool = False
    last_validation_at: str | None = None
    last_validation_lsn: Lsn | None = None
    last_validation_outcome: ValidationOutcome | None = None
    proven_through: Lsn | None = None
    """The proof of the subscription: the oldest of its tables' (`model.proof`)."""
    proven_at: str | None = None


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
class Problem:
    """Something that is wrong with a publisher or subscription (`subject`), and what to do about it."""

    subject: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class StatusResult(Result):
    """Everything that the configuration names; `copies` are the running ones."""

    publishers: tuple[PublisherStatus, ...]
    subscriptions: tuple[SubscriptionStatus, ...]
    tables: tuple[TableStatus, ...]
    copies: tuple[CopyStatus, ...] = ()
    problems: tuple[Problem, ...] = ()


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
