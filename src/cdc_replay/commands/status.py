"""`status`: slots, change logs and subscriptions, each according to its own server.

All servers are asked side by side, with one timeout of a few seconds. A server that does not answer is an
error of its own line, with its last answer if the caller keeps `Answers`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from cdc_replay.capture.publisher_status import publisher_status, read_log_range, read_publisher_status
from cdc_replay.capture.uncaptured_wal import UncapturedWal
from cdc_replay.config import Config, PublisherConfig, SubscriptionConfig
from cdc_replay.last_answers import read_answers, state_file, write_answers
from cdc_replay.model.problems import Bounds, find_problems
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import Json
from cdc_replay.model.status import (
    LogRange,
    PublisherStatus,
    StatusResult,
    SubscriberStatus,
    TableStatus,
)
from cdc_replay.postgres.answers import Answers
from cdc_replay.postgres.connection import connect, connect_with_deadline
from cdc_replay.replay.log_view import LogView
from cdc_replay.replay.subscription_status import (
    last_replay_result,
    read_subscriber_status,
    subscriber_status,
)

ServerAnswers: TypeAlias = Answers[PublisherStatus | LogRange | SubscriberStatus]


def status(config: Config, subscription: str | None = None) -> StatusResult:
    """The state of every publisher and subscription of the configuration, or of one subscription."""
    with ServerAnswers(config.timeouts.answer.total_seconds()) as answers:
        return status_of(config, answers, *_names(config, subscription))


@contextlib.contextmanager
def repeated_status(
    config: Config, subscription: str | None = None, bounds: Bounds | None = None
) -> Iterator[Callable[[], StatusResult]]:
    """A function that reads the status; what servers answer is kept, also for later commands.

    Raises:
        InvalidConfiguration: if there is no such subscription.
    """
    publishers, subscriptions = _names(config, subscription)
    file = state_file(config.path)
    with ServerAnswers(config.timeouts.answer.total_seconds()) as answers:
        kept = read_answers(file)
        uncaptured = UncapturedWal.take_from(kept)
        answers.restore(kept)

        def read() -> StatusResult:
            result = status_of(config, answers, publishers, subscriptions, bounds, uncaptured)
            write_answers(file, answers.last() | uncaptured.answers())
            return result

        yield read


def status_of(
    config: Config,
    answers: ServerAnswers,
    publishers: Collection[str],
    subscriptions: Collection[str],
    bounds: Bounds | None = None,
    uncaptured: UncapturedWal | None = None,
) -> StatusResult:
    """The state of these publishers and subscriptions, by the present or last answers of their servers."""
    targets = {name: config.subscription(name) for name in subscriptions}
    names = dict.fromkeys([*publishers, *(target.subscription.publisher for target in targets.values())])
    sources = {name: config.publisher(name) for name in names}
    # Subscriptions of a publisher share what is read of its log.
    logs = {name: LogView(source.change_log) for name, source in sources.items()}
    seconds = answers.seconds
    answered = answers.ask(
        {f"publisher {name}": partial(_ask_publisher, config, sources[name], seconds) for name in sources}
        | {f"log {name}": partial(read_log_range, source.change_log) for name, source in sources.items()}
        | {
            f"subscription {name}": partial(
                _ask_subscriber, config, target, logs[target.subscription.publisher], seconds
            )
            for name, target in targets.items()
        }
    )
    source_states = {
        name: publisher_status(name, source.slot, answered[f"publisher {name}"], answered[f"log {name}"])
        for name, source in sources.items()
    }
    if uncaptured is not None:
        source_states = {name: uncaptured.see(state) for name, state in source_states.items()}
    target_states = [
        subscriber_status(
            name, answered[f"subscription {name}"], source_states[target.subscription.publisher]
        )
        for name, target in targets.items()
    ]
    result = StatusResult(
        tuple(source_states[name] for name in publishers),
        tuple(target.subscription for target in target_states),
        tuple(_with_bound(config, table) for target in target_states for table in target.tables),
        tuple(copy for target in target_states for copy in target.copies),
    )
    return replace(result, problems=find_problems(result, bounds or Bounds(), dt.datetime.now(dt.UTC)))


def _with_bound(config: Config, table: TableStatus) -> TableStatus:
    """The table with the age that its proof may have."""
    name = QualifiedName.parse(table.table)
    age = config.subscription(table.subscription).validation.of_table(name).max_proof_age
    return replace(table, max_proof_age_seconds=None if age is None else age.total_seconds())


def subscription_result(config: Config, subscription: str) -> dict[str, Json]:
    """The subscription's last replay, as its subscriber recorded it.

    Raises:
        CdcReplayError: as `last_replay_result`.
    """
    dsn = config.dsn_of(config.subscription(subscription))
    with connect(dsn, purpose=f"status {subscription}") as connection:
        return last_replay_result(connection, subscription)


def _names(config: Config, subscription: str | None) -> tuple[Collection[str], Collection[str]]:
    if subscription is None:
        return config.publishers, config.subscriptions
    return [config.subscription(subscription).subscription.publisher], [subscription]


def _ask_publisher(config: Config, publisher: PublisherConfig, seconds: float) -> PublisherStatus:
    limit = publisher.max_retained_wal
    return read_publisher_status(config.dsn_of(publisher), publisher.name, publisher.slot, seconds, limit)


def _ask_subscriber(
    config: Config, target: SubscriptionConfig, change_log: LogView, seconds: float
) -> SubscriberStatus:
    purpose = f"status {target.name}"
    with connect_with_deadline(config.dsn_of(target), purpose=purpose, seconds=seconds) as connection:
        return read_subscriber_status(connection, target.subscription, change_log)
