"""What the DAGs of the pipeline have in common.

Display names sort the DAGs of a publisher: those that run every day come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from airflow.sdk import DAG

from cdc_replay.airflow.alarm_notifiers import alarm_callbacks
from cdc_replay.airflow.dag_docs import subscription_doc
from cdc_replay.airflow.schedules import START
from cdc_replay.airflow.task_arguments import DEFAULT_ARGS, in_pool, with_timeout
from cdc_replay.config import Config

ORDER: Final = ("capture", "replay", "validate", "snapshot", "refresh", "backfill", "resume", "watch")
"""The verbs in the order of the display names."""


class PipelineDag(DAG):
    """A DAG of one publisher: one run at a time, no catch-up, the configured timeouts, and tags."""

    def __init__(
        self,
        config: Config,
        publisher: str,
        title: tuple[str, str],
        task_arguments: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> None:
        """`title` is verb and object; `arguments` are the DAG's, with those of the caller."""
        given = dict(arguments)
        verb, name = title
        defaults: dict[str, Any] = {
            "dag_display_name": f"{publisher} · {ORDER.index(verb) + 1} {verb} {name}".rstrip(),
            "start_date": START,
            "catchup": False,
            "dagrun_timeout": config.timeouts.run or None,
            "max_active_runs": 1,
        }
        super().__init__(
            given.pop("dag_id"),
            default_args=with_timeout(config, task_arguments)
            | alarm_callbacks(config)
            | given.pop("default_args", {}),
            tags=["cdc-replay", publisher, verb, *given.pop("tags", ())],
            **defaults | given,
        )


class SubscriptionDag(PipelineDag):
    """A DAG of one subscription, which a person starts or a write to the subscriber."""

    def __init__(
        self, config: Config, verb: str, subscription: str, text: str, arguments: Mapping[str, Any]
    ) -> None:
        """`text` says what the DAG does."""
        configured = config.subscription(subscription)
        super().__init__(
            config,
            configured.subscription.publisher,
            (verb, subscription),
            DEFAULT_ARGS | in_pool(config.groups[configured.group].pool),
            {
                "doc_md": subscription_doc(text, config, configured),
                "schedule": None,
                **arguments,
            },
        )
