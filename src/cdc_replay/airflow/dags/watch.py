"""The DAG that triggers other DAGs."""

from __future__ import annotations

from typing import Any

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator

from cdc_replay.airflow.dag_docs import publisher_doc
from cdc_replay.airflow.dag_ids import replay_dag
from cdc_replay.airflow.dags.pipeline import PipelineDag
from cdc_replay.airflow.operators.in_process import WatchOperator
from cdc_replay.airflow.schedules import watch_schedule
from cdc_replay.airflow.task_arguments import WATCH_ARGS
from cdc_replay.config import Config, GroupConfig, load_config


class WatchDag(PipelineDag):
    """Trigger the replay of subscriptions that lag behind the change log, and tell alarms."""

    def __init__(self, publisher: str, *, config: Config | None = None, **kwargs: Any) -> None:
        config = config or load_config()
        groups = followed_groups(config, publisher)
        text = (
            "Replay runs when the log has grown. Changes that a run could not apply, because its subscriber"
            " was unavailable until the last retry, would wait for the publisher's next change. So this DAG"
            " reads the lag of every subscription. If a replay can end it, and none is running or queued,"
            f" it triggers {', '.join(f'`{replay_dag(group.name)}`' for group in groups)}. A subscriber that"
            " does not answer costs one attempt to connect. It triggers nothing that is paused."
            if groups
            else "Every group of this publisher is replayed by its own schedule: nothing is triggered."
        )
        if config.alarms.notify:
            text += " It also tells the channels of `alarms.notify` what is new, worse or over."
        arguments = {
            "dag_id": f"watch__{publisher}",
            "description": f"Lagging subscriptions of {publisher} → replay",
            "doc_md": publisher_doc(text, config.publisher(publisher)),
            "schedule": watch_schedule(
                publisher,
                [name for group in groups for name in group.subscriptions],
                tells_alarms=bool(config.alarms.notify),
            ),
            "is_paused_upon_creation": False,
        }
        super().__init__(config, publisher, ("watch", ""), WATCH_ARGS, arguments | kwargs)
        with self:
            watch = WatchOperator(task_id="watch", publisher=publisher, groups=groups)
            for group in groups:
                watch >> TriggerDagRunOperator(
                    task_id=f"replay.{group.name}",
                    trigger_dag_id=replay_dag(group.name),
                    logical_date=None,
                    openlineage_inject_parent_info=False,  # the replay DAG rejects unknown Params
                )


def followed_groups(config: Config, publisher: str) -> tuple[GroupConfig, ...]:
    """The groups of a publisher whose replay follows the change log; the others have a schedule."""
    return tuple(
        group for group in config.groups.values() if group.publisher == publisher and not group.schedule
    )
