"""The subscriptions of a publisher for which a replay should start now; the watch DAG calls this."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping

import psycopg

from cdc_replay.config import Config, SubscriptionConfig
from cdc_replay.errors import CdcReplayError
from cdc_replay.postgres.answers import Answers
from cdc_replay.postgres.connection import connect_with_deadline
from cdc_replay.replay.lag import Lag, lag_of, unanswered, utc_text
from cdc_replay.replay.log_view import LogView

logger = logging.getLogger(__name__)


def due_replays(config: Config, publisher: str, subscriptions: Iterable[str]) -> Mapping[str, Lag]:
    """The subscriptions of these, all of one publisher, for which a replay is due.

    Raises:
        CdcReplayError: if there is no change log, or it cannot be read.
    """
    change_log = LogView(config.publisher(publisher).change_log)
    change_log.log()
    questions = {
        name: functools.partial(_read_lag, config, config.subscription(name), change_log)
        for name in subscriptions
    }
    with Answers[Lag | None](config.timeouts.answer.total_seconds()) as answers:
        answers_by_name = answers.ask(questions)
    due = {}
    for name, answer in answers_by_name.items():
        lag = answer.value if answer.error is None else unanswered(answer.error)
        if lag is not None:
            since = "" if lag.since is None else f" since {utc_text(lag.since)}"
            logger.info("subscription %s is behind%s: %s", name, since, lag.reason)
            if lag.is_replay_due:
                due[name] = lag
    return due


def _read_lag(config: Config, subscription: SubscriptionConfig, change_log: LogView) -> Lag | None:
    dsn, seconds = config.dsn_of(subscription), config.timeouts.answer.total_seconds()
    with connect_with_deadline(dsn, purpose=f"lag {subscription.name}", seconds=seconds) as connection:
        try:
            return lag_of(connection, subscription.name, change_log)
        except (CdcReplayError, psycopg.Error) as error:
            return Lag(str(error).strip())
