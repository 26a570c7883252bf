"""What the page shows, as JSON values, cut to what the user may read.

The servers are asked at most once every few seconds for all users together. A server that does not answer
within `timeouts.page` is shown with its last answer and its age.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from cdc_replay.airflow.connections import airflow_config
from cdc_replay.airflow.dag_ids import capture_dag, replay_dag, validate_dag
from cdc_replay.airflow.page.access import readable_dags
from cdc_replay.airflow.page.dag_runs import known_dags, last_runs

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser

    from cdc_replay.commands.status import ServerAnswers
    from cdc_replay.config import Config
    from cdc_replay.monitoring.subscription_details import SubscriptionDetails
    from cdc_replay.postgres.answers import Answers
    from cdc_replay.subscriber.history import TimeRange

FRESH_SECONDS: Final = 5.0

OF_SUBSCRIPTION: Final = ("validate", "snapshot", "refresh", "backfill", "resume")
"""DAGs `<kind>__<subscription>`, beside `replay__<group>`."""


def status_for(user: BaseUser, answers: ServerAnswers) -> dict[str, Any]:
    """The parts of `StatusResult` that the user may read, `replay_runs`, and the DAGs of publishers."""
    from cdc_replay.commands.status import status_of

    config = airflow_config()
    of_publishers = {name: capture_dag(name) for name in config.publishers}
    of_subscriptions = {name: validate_dag(name) for name in config.subscriptions}
    of_groups = {name: replay_dag(name) for name in config.groups}
    readable = readable_dags(user, [*of_publishers.values(), *of_subscriptions.values(), *of_groups.values()])

    def readable_names(dags: Mapping[str, str]) -> list[str]:
        return [name for name, dag_id in dags.items() if dag_id in readable]

    status = status_of(config, answers, readable_names(of_publishers), readable_names(of_subscriptions))
    groups = readable_names(of_groups)
    runs = {group: last_runs([of_groups[group]], 1) for group in groups}
    return status.to_dict() | {
        "replay_runs": [{"group": group, **run} for group in groups for run in runs[group]],
        "dags": known_dags(user, [of_publishers[name] for name in readable_names(of_publishers)]),
        "max_retained_wal": {
            name: config.publishers[name].max_retained_wal for name in readable_names(of_publishers)
        },
    }


def details_for(
    user: BaseUser, answers: Answers[SubscriptionDetails], subscription: str, time_range: TimeRange
) -> dict[str, Any]:
    """`SubscriptionDetails` with its DAGs, by kind, and their last runs; the caller has checked the right."""
    from cdc_replay.monitoring.subscription_details import subscription_details

    config = airflow_config()
    question = partial(subscription_details, config, subscription, time_range, answers.seconds)
    key = f"{subscription} {time_range.value}"
    answer = answers.ask({key: question})[key]
    dags = _dags_of(config, subscription)
    known = known_dags(user, list(dags.values()))
    details = {} if answer.value is None else answer.value.to_dict()
    return details | {
        "seconds_old": None if answer.error is None else answer.seconds_old,
        "error": None if answer.error is None else str(answer.error),
        "dags": {kind: {"dag_id": dag, **known[dag]} for kind, dag in dags.items() if dag in known},
        "runs": last_runs(list(known)),
    }


def _dags_of(config: Config, subscription: str) -> dict[str, str]:
    replay = {"replay": replay_dag(config.subscription(subscription).group)}
    return replay | {kind: f"{kind}__{subscription}" for kind in OF_SUBSCRIPTION}
