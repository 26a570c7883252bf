"""`status`: slots, change logs and subscriptions, each according to its own server.

All servers are asked side by side, with one timeout of a few seconds. A server that does not answer is an
error of its own line, with its last answer if the caller keeps `Answers`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from cdc_replay.capture.publisher_status import add_log_range, read_log_range, read_publisher_status
from cdc_replay.config import Config, PublisherConfig, SubscriptionConfig
from cdc_replay.model.results import Json
from cdc_replay.model.status import (
    LogRange,
    PublisherStatus,
    StatusResult,
    SubscriberStatus,
    SubscriptionStatus,
)
from cdc_replay.postgres.answers import Answer, Answers
from cdc_replay.postgres.connection import connect, connect_with_deadline
from cdc_replay.replay.subscription_status import (
    add_lag_bytes,
    as_unanswered,
    last_replay_result,
    read_subscriber_status,
)

ServerAnswers: TypeAlias = Answers[PublisherStatus | LogRange | SubscriberStatus]
ServerAnswer: TypeAlias = Answer[PublisherStatus | LogRange | SubscriberStatus]


def status(config: Config) -> StatusResult:
    """The state of every publisher and subscription of the configuration."""
    with ServerAnswers(config.timeouts.answer.total_seconds()) as answers:
        return status_of(config, answers, config.publishers, config.subscriptions)


def status_of(
    config: Config, answers: ServerAnswers, publishers: Collection[str], subscriptions: Collection[str]
) -> StatusResult:
    """The state of these publishers and subscriptions, by the present or last answers of their servers."""
    targets = {name: config.subscription(name) for name in subscriptions}
    names = dict.fromkeys([*publishers, *(target.subscription.publisher for target in targets.values())])
    sources = {name: config.publisher(name) for name in names}
    seconds = answers.seconds
    answered = answers.ask(
        {f"publisher {name}": partial(_ask_publisher, config, sources[name], seconds) for name in sources}
        | {f"log {name}": partial(read_log_range, source.change_log) for name, source in sources.items()}
        | {
            f"subscription {name}": partial(_ask_subscriber, config, targets[name], seconds)
            for name in targets
        }
    )
    source_states = {
        name: _publisher_status(source, answered[f"publisher {name}"], answered[f"log {name}"])
        for name, source in sources.items()
    }
    target_states = [
        _subscriber_status(
            target, answered[f"subscription {name}"], source_states[target.subscription.publisher]
        )
        for name, target in targets.items()
    ]
    return StatusResult(
        tuple(source_states[name] for name in publishers),
        tuple(target.subscription for target in target_states),
        tuple(table for target in target_states for table in target.tables),
        tuple(copy for target in target_states for copy in target.copies),
    )


def subscription_result(config: Config, subscription: str) -> dict[str, Json]:
    """The subscription's last replay, as its subscriber recorded it.

    Raises:
        CdcReplayError: as `last_replay_result`.
    """
    dsn = config.dsn_of(config.subscription(subscription))
    with connect(dsn, purpose=f"status {subscription}") as connection:
        return last_replay_result(connection, subscription)


def _ask_publisher(config: Config, publisher: PublisherConfig, seconds: float) -> PublisherStatus:
    return read_publisher_status(config.dsn_of(publisher), publisher.name, publisher.slot, seconds)


def _ask_subscriber(config: Config, target: SubscriptionConfig, seconds: float) -> SubscriberStatus:
    change_log = config.publisher(target.subscription.publisher).change_log
    purpose = f"status {target.name}"
    with connect_with_deadline(config.dsn_of(target), purpose=purpose, seconds=seconds) as connection:
        return read_subscriber_status(connection, target.subscription, change_log)


def _publisher_status(publisher: PublisherConfig, server: ServerAnswer, log: ServerAnswer) -> PublisherStatus:
    last = server.value
    if not isinstance(last, PublisherStatus):
        last = PublisherStatus(publisher.name, publisher.slot, "unknown")
    last = add_log_range(last, log.value if isinstance(log.value, LogRange) else LogRange())
    failed = server if server.error is not None else log
    return (
        last
        if failed.error is None
        else replace(last, error=str(failed.error), seconds_old=failed.seconds_old)
    )


def _subscriber_status(
    target: SubscriptionConfig, answer: ServerAnswer, publisher: PublisherStatus
) -> SubscriberStatus:
    last = answer.value
    if not isinstance(last, SubscriberStatus):
        last = SubscriberStatus(SubscriptionStatus(target.name, publisher.publisher))
    last = add_lag_bytes(last, publisher.position)
    return last if answer.error is None else as_unanswered(last, answer.error, answer.seconds_old)
