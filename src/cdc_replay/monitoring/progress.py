"""How far publishers and subscriptions are, for sensors and metrics."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cdc_replay.capture.publisher_status import read_publisher_status
from cdc_replay.config import Config
from cdc_replay.errors import ServerUnavailable
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.status import PublisherStatus
from cdc_replay.model.table_state import TableState
from cdc_replay.postgres.answers import Answers
from cdc_replay.postgres.connection import connect_with_deadline
from cdc_replay.replay import progress
from cdc_replay.replay.log_view import LogView
from cdc_replay.replay.progress import SubscriptionProgress
from cdc_replay.subscriber.subscription_tables import known_tables


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
    return _read_progress(config, subscription, _change_log(config, subscription))


def _read_progress(config: Config, subscription: str, change_log: LogView) -> SubscriptionProgress:
    target = config.subscription(subscription)
    dsn, seconds = config.dsn_of(target), config.timeouts.answer.total_seconds()
    with connect_with_deadline(dsn, purpose=f"progress {subscription}", seconds=seconds) as connection:
        return progress.read_progress(connection, subscription, change_log)


def read_table_states(config: Config, subscription: str) -> dict[QualifiedName, TableState]:
    """The states of a subscription's tables that exist on its subscriber.

    Raises:
        CdcReplayError: if the subscriber cannot be read.
    """
    target = config.subscription(subscription)
    dsn, seconds = config.dsn_of(target), config.timeouts.answer.total_seconds()
    with connect_with_deadline(dsn, purpose=f"tables of {subscription}", seconds=seconds) as connection:
        known = known_tables(connection, subscription)
    return {table.name: table.state for table in known if table.name is not None}


def has_applied(config: Config, subscription: str, lsn: Lsn) -> bool:
    """Whether the subscription has every transaction that the publisher committed up to `lsn`.

    Raises:
        CdcReplayError: if its subscriber or the change log cannot be read.
    """
    change_log = _change_log(config, subscription)
    return progress.holds_all(_read_progress(config, subscription, change_log), change_log, lsn)


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
    change_log = LogView(config.publisher(publisher).change_log)
    with Answers[SubscriptionProgress | PublisherStatus](config.timeouts.answer.total_seconds()) as answers:
        answered = answers.ask(
            {
                "publisher": functools.partial(_ask_publisher, config, publisher),
                **{
                    f"subscription {name}": functools.partial(_read_progress, config, name, change_log)
                    for name in names
                },
            }
        )
    status = answered["publisher"].value
    values = {name: answered[f"subscription {name}"].value for name in names}
    return PublisherProgress(
        status.retained_wal_bytes if isinstance(status, PublisherStatus) else None,
        {name: value for name, value in values.items() if isinstance(value, SubscriptionProgress)},
    )


def _ask_publisher(config: Config, publisher: str) -> PublisherStatus:
    configured = config.publisher(publisher)
    seconds = config.timeouts.answer.total_seconds()
    return read_publisher_status(config.dsn_of(configured), publisher, configured.slot, seconds)


def _change_log(config: Config, subscription: str) -> LogView:
    publisher = config.subscription(subscription).subscription.publisher
    return LogView(config.publisher(publisher).change_log)
