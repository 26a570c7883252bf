"""The alarms of a status.

What a look cannot say is unknown, so that an alarm is neither raised nor resolved by silence:

| state                        | unknown                                                          |
|------------------------------|------------------------------------------------------------------|
| publisher does not answer    | its slot, retained WAL, whether its log is readable              |
| change log not readable      | the lag in time of its subscriptions                             |
| subscriber does not answer   | everything else of the subscription                              |
| subscription is parked       | its lag and last replay: the parking is why                      |
| slot is missing or lost      | retained WAL, whether captures run                               |

A lag in time is the age of a captured transaction: without captures there is none. Nobody knows whether WAL
beyond the log's end has changes, and a publisher writes some without any. But each capture moves the end of
the log. So if a look has seen WAL beyond an end, and that is still the end when a lag would exceed its bound,
nothing is captured.
"""

from __future__ import annotations

import datetime as dt
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.model.alarm import WORSE, Alarm, AlarmKey, AlarmKind, Observed, Severity
from cdc_replay.model.check import Check, Verdict
from cdc_replay.model.problems import (
    Bounds,
    capture_hint,
    lag_beyond,
    log_missing_hint,
    proof_beyond,
    split_hint,
    uncaptured_bound,
    way_out,
)
from cdc_replay.model.results import ValidationOutcome
from cdc_replay.model.size import size_in_words
from cdc_replay.model.status import (
    PublisherState,
    PublisherStatus,
    StatusResult,
    SubscriptionState,
    SubscriptionStatus,
    TableStatus,
    TableSync,
)

_OF_SLOT: Final = (AlarmKind.RETAINED_WAL, AlarmKind.NO_CAPTURE)
_OF_SUBSCRIBER: Final = (
    AlarmKind.PARKED,
    AlarmKind.REPLAY_FAILED,
    AlarmKind.NOT_CONSISTENT,
    AlarmKind.TABLE_DROPPED,
    AlarmKind.NOT_CAPTURED,
    AlarmKind.LAG,
    AlarmKind.PROOF_AGE,
)


@dataclass(frozen=True, slots=True)
class AlarmBounds:
    """The bounds of each publisher, in bytes of retained WAL, and of each subscription."""

    subscriptions: Mapping[str, Bounds] = field(default_factory=dict)
    retained_wal: Mapping[str, int | None] = field(default_factory=dict)

    def least_lag(self, subscriptions: Iterable[str]) -> dt.timedelta | None:
        """The least bound of a lag in time that one of these subscriptions has."""
        lags = (self.subscriptions.get(name, Bounds()).lag for name in subscriptions)
        return min((lag for lag in lags if lag is not None), default=None)


def observe(
    status: StatusResult, bounds: AlarmBounds, now: dt.datetime, log_checks: Mapping[str, Check] | None = None
) -> Observed:
    """The alarms of a status; `log_checks` say, by publisher, whether its change log can be written."""
    alarms: list[Alarm] = []
    unknown: set[tuple[str, AlarmKind]] = set()
    for publisher in status.publishers:
        name = publisher.publisher
        least_lag = bounds.least_lag(
            subscription.subscription
            for subscription in status.subscriptions
            if subscription.publisher == name
        )
        seen = _of_publisher(publisher, bounds.retained_wal.get(name), least_lag)
        alarms += seen.alarms
        unknown |= seen.unknown
    for name, check in (log_checks or {}).items():
        alarms += _log_not_writable(name, check)
    unreadable = {
        publisher.publisher
        for publisher in status.publishers
        if publisher.state in {PublisherState.DOWN, PublisherState.LOG_UNREADABLE}
    }
    for subscription in status.subscriptions:
        name = subscription.subscription
        tables = [table for table in status.tables if table.subscription == name]
        limits = bounds.subscriptions.get(name, Bounds())
        seen = _of_subscription(subscription, tables, limits, now)
        alarms += seen.alarms
        unknown |= seen.unknown
        if subscription.publisher in unreadable:
            unknown.add((_subscription(name), AlarmKind.LAG))
    return Observed(tuple(alarms), frozenset(unknown))


def _subscription(name: str) -> str:
    return f"subscription {name}"


def _of_publisher(
    publisher: PublisherStatus, most_retained: int | None, least_lag: dt.timedelta | None
) -> Observed:
    subject = f"publisher {publisher.publisher}"
    if publisher.state is PublisherState.NO_SLOT and publisher.log_end is None:
        return Observed(())  # not set up yet
    if publisher.state in {PublisherState.DOWN, PublisherState.LOG_UNREADABLE}:
        return _unreachable(publisher, subject)
    if publisher.state in {PublisherState.NO_SLOT, PublisherState.LOST}:
        return _without_slot(publisher, subject)
    alarms = [
        *_retained_wal(publisher, subject, most_retained),
        *_log_missing(publisher, subject),
        *_no_capture(publisher, subject, least_lag),
    ]
    return Observed(tuple(alarms))


def _unreachable(publisher: PublisherStatus, subject: str) -> Observed:
    message, hint = split_hint(publisher.error or "")
    hidden: tuple[AlarmKind, ...]
    if publisher.state is PublisherState.DOWN:
        kind, text = AlarmKind.NO_ANSWER, f"does not answer: {message}"
        hidden = (AlarmKind.SLOT, *_OF_SLOT, AlarmKind.LOG_NOT_READABLE)
    else:
        kind, text = AlarmKind.LOG_NOT_READABLE, f"the change log cannot be read: {message}"
        hidden = (AlarmKind.SLOT, *_OF_SLOT)
    alarm = Alarm(AlarmKey(subject, kind.value), Severity.CRITICAL, text, hint, lsn=publisher.log_end)
    return Observed((alarm,), frozenset((subject, other) for other in hidden))


def _without_slot(publisher: PublisherStatus, subject: str) -> Observed:
    is_lost = publisher.state is PublisherState.LOST
    text = f"replication slot {publisher.slot} is {'lost' if is_lost else 'missing'}"
    hint = f"Run `cdc-replay capture {publisher.publisher}`: it says what the server reports, and what to do."
    key = AlarmKey(subject, AlarmKind.SLOT.value)
    alarm = Alarm(key, Severity.CRITICAL, text, hint, lsn=publisher.log_end)
    return Observed((alarm,), frozenset((subject, kind) for kind in _OF_SLOT))


def _log_missing(publisher: PublisherStatus, subject: str) -> Iterator[Alarm]:
    if publisher.log_end is None:
        text = f"replication slot {publisher.slot} exists, but its change log is missing"
        key, hint = AlarmKey(subject, AlarmKind.LOG_NOT_READABLE.value), log_missing_hint(publisher.publisher)
        yield Alarm(key, Severity.CRITICAL, text, hint)


def _retained_wal(publisher: PublisherStatus, subject: str, most: int | None) -> Iterator[Alarm]:
    retained = publisher.retained_wal_bytes or 0
    is_near_lost = publisher.state is PublisherState.NEAR_LOST
    if not is_near_lost and (most is None or retained <= most):
        return
    text = f"replication slot {publisher.slot} retains {size_in_words(retained)} of WAL"
    if most is not None and retained > most:
        text += f", at most {size_in_words(most)} are allowed"
    if is_near_lost:
        text += "; it is near lost"
    yield Alarm(
        AlarmKey(subject, AlarmKind.RETAINED_WAL.value),
        Severity.CRITICAL if is_near_lost else Severity.WARNING,
        text,
        f"Run `cdc-replay capture {publisher.publisher}` now.",
        lsn=publisher.log_end,
    )


def _no_capture(publisher: PublisherStatus, subject: str, least_lag: dt.timedelta | None) -> Iterator[Alarm]:
    end, position = publisher.log_end, publisher.position
    if least_lag is not None and end is not None and position is not None and position > end:
        yield Alarm(
            AlarmKey(subject, AlarmKind.NO_CAPTURE.value, str(end)),
            Severity.CRITICAL,
            f"nothing is captured: the publisher has written WAL beyond {end}, where the change log ends",
            capture_hint(publisher.publisher),
            lsn=end,
            told_after_seconds=uncaptured_bound(least_lag),
        )


def _log_not_writable(publisher: str, check: Check) -> Iterator[Alarm]:
    if check.verdict is Verdict.FAILED:
        key = AlarmKey(f"publisher {publisher}", AlarmKind.LOG_NOT_WRITABLE.value)
        # A folder without room is writable, as `doctor` says it.
        text = check.message.replace(" is writable, ", " has no room left: ")
        yield Alarm(key, Severity.CRITICAL, text, check.remedy)


def _of_subscription(
    subscription: SubscriptionStatus, tables: Sequence[TableStatus], bounds: Bounds, now: dt.datetime
) -> Observed:
    subject = _subscription(subscription.subscription)
    if subscription.state is SubscriptionState.DOWN:
        message, hint = split_hint(subscription.error or "")
        key = AlarmKey(subject, AlarmKind.NO_ANSWER.value)
        text = f"its subscriber does not answer: {message}"
        alarm = Alarm(key, Severity.CRITICAL, text, hint, lsn=subscription.applied_lsn)
        return Observed((alarm,), frozenset((subject, kind) for kind in _OF_SUBSCRIBER))
    alarms = [*_parked(subscription, subject), *_of_tables(subscription, subject, tables)]
    hidden: frozenset[AlarmKind] = frozenset()
    if subscription.parked is not None:
        hidden = frozenset({AlarmKind.LAG, AlarmKind.REPLAY_FAILED, AlarmKind.NOT_CAPTURED})
    else:
        alarms += _not_captured(subscription, subject)
        alarms += _replay_failed(subscription, subject)
        alarms += _lag(subscription, subject, bounds)
        if subscription.lag_seconds is None or subscription.lag_bytes is None:
            hidden = frozenset({AlarmKind.LAG})
    if subscription.state is not SubscriptionState.NEW:
        if differences := tuple(_differences(subscription, subject, tables)):
            # Rows that differ are not proven: that is one alarm, not two.
            alarms += differences
            hidden |= {AlarmKind.PROOF_AGE}
        else:
            alarms += _of_proof(subscription, subject, bounds, now)
    return Observed(tuple(alarms), frozenset((subject, kind) for kind in hidden))


def _parked(subscription: SubscriptionStatus, subject: str) -> Iterator[Alarm]:
    transaction = subscription.parked_transaction
    if transaction is None:
        return
    hint = way_out(subscription.subscription, "", transaction, split_hint(subscription.error or "")[1])
    text = f"is parked, before transaction {transaction}: nothing is applied"
    yield Alarm(AlarmKey(subject, AlarmKind.PARKED.value), Severity.CRITICAL, text, hint, lsn=transaction)


def _of_tables(
    subscription: SubscriptionStatus, subject: str, tables: Iterable[TableStatus]
) -> Iterator[Alarm]:
    name = subscription.subscription
    for table in tables:
        transaction = table.parked_transaction
        if transaction is not None:
            key = AlarmKey(subject, AlarmKind.PARKED.value, table.table)
            hint = way_out(
                name, f" --table {shlex.quote(table.table)}", transaction, split_hint(table.state)[1]
            )
            text = f"table {table.table} is parked, before transaction {transaction}"
            yield Alarm(key, Severity.WARNING, text, hint, lsn=transaction)
        elif table.sync is TableSync.DROPPED:
            key = AlarmKey(subject, AlarmKind.TABLE_DROPPED.value, table.table)
            hint = f"Create it again, or run `cdc-replay refresh {name}`."
            yield Alarm(key, Severity.WARNING, f"table {table.table} was dropped on the subscriber", hint)


def _replay_failed(subscription: SubscriptionStatus, subject: str) -> Iterator[Alarm]:
    if not subscription.last_replay_failed:
        return
    _, hint = split_hint(subscription.last_replay or "")
    key = AlarmKey(subject, AlarmKind.REPLAY_FAILED.value)
    yield Alarm(
        key,
        Severity.WARNING,
        "the last replay failed",
        hint or f"Run `cdc-replay replay {subscription.subscription}`.",
        subscription.last_replay_at,
        subscription.applied_lsn,
    )


def _not_captured(subscription: SubscriptionStatus, subject: str) -> Iterator[Alarm]:
    # Not the words of the log's error: the alarm of its publisher has them.
    if not subscription.error or subscription.lag_seconds is None:
        return
    hint = f"`cdc-replay status {subscription.subscription}` names them, and what to do."
    key = AlarmKey(subject, AlarmKind.NOT_CAPTURED.value)
    text = "published changes do not reach the subscription"
    yield Alarm(key, Severity.WARNING, text, hint, lsn=subscription.applied_lsn)


def _lag(subscription: SubscriptionStatus, subject: str, bounds: Bounds) -> Iterator[Alarm]:
    # A lag that nobody knows is no lag: the caller tells it as unknown.
    known = Bounds(
        bounds.lag if subscription.lag_seconds is not None else None,
        bounds.lag_bytes if subscription.lag_bytes is not None else None,
    )
    # One alarm, also if both bounds are exceeded: its key is the same.
    for problem in itertools.islice(lag_beyond(subscription, known), 1):
        is_worse = any(True for _ in lag_beyond(subscription, known.times(WORSE)))
        yield Alarm(
            AlarmKey(subject, AlarmKind.LAG.value),
            Severity.CRITICAL if is_worse else Severity.WARNING,
            problem.message,
            problem.remedy,
            subscription.behind_since,
            subscription.applied_lsn,
        )


def _differences(
    subscription: SubscriptionStatus, subject: str, tables: Iterable[TableStatus]
) -> Iterator[Alarm]:
    """Of the last validation, or of an earlier one in rows that the last did not look at."""
    name = subscription.subscription
    is_of_last = subscription.last_validation_outcome is ValidationOutcome.NOT_CONSISTENT
    if is_of_last or any(table.differing_buckets for table in tables):
        yield Alarm(
            AlarmKey(subject, AlarmKind.NOT_CONSISTENT.value),
            Severity.CRITICAL,
            f"{'the last' if is_of_last else 'an earlier'} validation found a difference",
            f"`cdc-replay validate {name}` names the rows; `cdc-replay refresh {name} --reconcile` repairs"
            " them.",
            subscription.last_validation_at,
            subscription.last_validation_lsn if is_of_last else None,
        )


def _of_proof(
    subscription: SubscriptionStatus, subject: str, bounds: Bounds, now: dt.datetime
) -> Iterator[Alarm]:
    for problem in proof_beyond(subscription, bounds, now):
        # One that was never proven cannot become worse.
        wider = bounds.times(WORSE)
        is_worse = subscription.proven_at is not None and any(
            True for _ in proof_beyond(subscription, wider, now)
        )
        yield Alarm(
            AlarmKey(subject, AlarmKind.PROOF_AGE.value),
            Severity.CRITICAL if is_worse else Severity.WARNING,
            problem.message,
            problem.remedy,
            subscription.proven_at,
            subscription.applied_lsn,
        )
