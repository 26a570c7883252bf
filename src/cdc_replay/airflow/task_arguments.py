"""Arguments that the pipeline's DAGs and tasks have in common: retries, timeouts, owner, pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from cdc_replay.config import Config
from cdc_replay.errors import InvalidConfiguration

DEFAULT_POOL: Final = "default_pool"
"""The pool that Airflow has."""

DEFAULT_ARGS: Final[dict[str, Any]] = {
    "owner": "cdc-replay",
    "retries": 3,
    "retry_delay": timedelta(seconds=10),
    "retry_exponential_backoff": 3,
    "max_retry_delay": timedelta(minutes=10),
}
"""For the DAGs that a person starts: tries after 10, 30 and 90 seconds, or up to twice that."""

FOLLOWING_ARGS: Final[dict[str, Any]] = DEFAULT_ARGS | {"max_retry_delay": timedelta(seconds=30)}
"""For the DAGs that follow the publisher: retries follow soon after a server is back."""

WATCH_ARGS: Final[dict[str, Any]] = {
    "owner": DEFAULT_ARGS["owner"],
    "retries": 0,
    "execution_timeout": timedelta(minutes=10),
}
"""For the DAG that runs again soon in any case."""


def in_pool(pool: str | None) -> dict[str, Any]:
    """The argument for a configured pool."""
    return {"pool": pool or DEFAULT_POOL}


def with_timeout(config: Config, task_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the configured timeout.

    A try that exceeds its timeout is like one that is killed: the next continues from what is durable.
    """
    timeouts = {"execution_timeout": config.timeouts.task} if config.timeouts.task else {}
    return timeouts | dict(task_arguments)


def check_one_publisher(config: Config, subscriptions: Sequence[str]) -> str:
    """The publisher of all these subscriptions.

    Raises:
        InvalidConfiguration: if there is none, or more than one.
    """
    publishers = {config.subscription(name).subscription.publisher for name in subscriptions}
    if len(publishers) != 1:
        raise InvalidConfiguration(
            "one replay needs subscriptions of one publisher",
            detail=f"These have: {', '.join(sorted(publishers)) or 'none'}.",
            hint="Use one task group for each publisher.",
        )
    return publishers.pop()
