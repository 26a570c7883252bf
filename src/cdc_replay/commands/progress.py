"""How far subscriptions are: what sensors wait for, and what metrics show.

A transaction counts as missing only if it is in the change log: a publisher's WAL position moves without
published changes too, and no replay runs for these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime

from cdc_replay.capture.publisher_status import read_publisher_status
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.config import Config, SubscriptionConfig
from cdc_replay.errors import ServerUnavailable
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.status import PublisherStatus
from cdc_replay.model.table_state import Parked, Ready
from cdc_replay.postgres.answers import Answers
from cdc_replay.postgres.connection import Connection, connect_with_deadline
from cdc_replay.replay.lag import oldest_missing
from cdc_replay.subscriber.recorded_results import last_result
from cdc_replay.subscriber.subscription_tables import table_states


@dataclass(frozen=True, slots=True)
class SubscriptionProgress:
    """The state of one subscription.

    `applied_lsn` is the position of its last table; None while a table has no copy. `proved_at` is when the
    last validation ended, None if it found the subscriber inconsistent, or if there was none.
    """

    applied_lsn: Lsn | None
    missing_since: datetime | None
    proved_at: datetime | None

    @property
    def lag_seconds(self) -> float | None:
        """Age of the oldest captured transaction that is not applied; None while a table has no copy."""
        return None if self.applied_lsn is None else _age(self.missing_since) or 0.0

    @property
    def proof_age_seconds(self) -> float | None:
        """Age of the proof that the subscriber is consistent."""
        return _age(self.proved_at)


@dataclass(frozen=True, slots=True)
class PublisherProgress:
    """The state of a publisher and of its subscriptions; those whose server does not answer are left out."""

    retained_wal_bytes: int | None
    subscriptions: Mapping[str, SubscriptionProgress]


def read_progress(config: Config, subscription: str) -> SubscriptionProgress:
    """How far a subscription is.

    Raises:
        CdcReplayError: if its subscriber or the change log cannot be read.
    """
    target = config.subscription(subscription)
    change_log = ChangeLog.open(config.publisher(target.subscription.publisher).change_log)
    with _connect(config, target) as connection:
        states = table_states(connection, subscription).values()
        validated = last_result(connection, subscription, "validate")
    copied = [state for state in states if isinstance(state, Ready | Parked)]
    is_complete = bool(copied) and len(copied) == len(states)
    proved_at = validated.finished if validated is not None and validated.result.get("success") else None
    return SubscriptionProgress(
        applied_lsn=min(state.applied_lsn for state in copied) if is_complete else None,
        missing_since=oldest_missing(change_log, copied),
        proved_at=proved_at,
    )


def has_applied(config: Config, subscription: str, lsn: Lsn) -> bool:
    """Whether the subscription has every transaction that the publisher committed up to `lsn`.

    Raises:
        CdcReplayError: if its subscriber or the change log cannot be read.
    """
    applied = read_progress(config, subscription).applied_lsn
    if applied is None or applied >= lsn:
        return applied is not None
    publisher = config.subscription(subscription).subscription.publisher
    change_log = ChangeLog.open(config.publisher(publisher).change_log)
    return change_log.end_lsn >= lsn and change_log.first_commit(Window(applied, lsn)) is None


def publisher_position(config: Config, publisher: str) -> Lsn:
    """The publisher's WAL position: after every commit so far.

    Raises:
        CdcReplayError: if it does not answer.
    """
    position = _ask_publisher(config, publisher).position
    if position is None:
        raise ServerUnavailable(f'publisher "{publisher}" has no WAL position')
    return position


def publisher_and_subscriptions(
    config: Config, publisher: str, subscriptions: Iterable[str]
) -> PublisherProgress:
    """The state of a publisher and of these of its subscriptions, which are asked side by side."""
    names = tuple(subscriptions)
    questions = {f"subscription {name}": functools.partial(read_progress, config, name) for name in names}
    seconds = config.timeouts.answer.total_seconds()
    with Answers[SubscriptionProgress | PublisherStatus](seconds) as answers:
        answered = answers.ask(
            {**questions, "publisher": functools.partial(_ask_publisher, config, publisher)}
        )
    status = answered["publisher"].value
    progress = {name: answered[f"subscription {name}"].value for name in names}
    return PublisherProgress(
        status.retained_wal_bytes if isinstance(status, PublisherStatus) else None,
        {name: value for name, value in progress.items() if isinstance(value, SubscriptionProgress)},
    )


def _ask_publisher(config: Config, publisher: str) -> PublisherStatus:
    configured = config.publisher(publisher)
    seconds = config.timeouts.answer.total_seconds()
    return read_publisher_status(config.dsn_of(configured), publisher, configured.slot, seconds)


def _connect(config: Config, target: SubscriptionConfig) -> AbstractContextManager[Connection]:
    seconds = config.timeouts.answer.total_seconds()
    return connect_with_deadline(config.dsn_of(target), purpose=f"progress {target.name}", seconds=seconds)


def _age(time: datetime | None) -> float | None:
    return None if time is None else max(0.0, (datetime.now(UTC) - time).total_seconds())
