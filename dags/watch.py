"""`watch__<publisher>`: trigger the replay of subscriptions that lag behind the change log.

Replay runs when the log has grown. Changes that a run could not apply, because its subscriber was unavailable
until the last retry, would wait for the publisher's next change. So this DAG reads the lag of every
subscription. If a replay can end it, and none is running or queued, the replay DAG of its group runs. A
subscriber that does not answer costs one attempt to connect. Groups with their own schedule are skipped.

New DAGs of this kind are not paused: they trigger nothing while the replay DAG is paused.
"""

from __future__ import annotations

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import DAG

from cdc_replay.airflow.dag_ids import replay_dag
from cdc_replay.airflow.operators import WATCH_ARGS, WatchOperator, dag_arguments
from cdc_replay.airflow.schedules import START, watch_schedule
from cdc_replay.config import load_config

config = load_config()
for publisher in config.publishers:
    groups = [
        group for group in config.groups.values() if group.publisher == publisher and not group.schedule
    ]
    if not groups:
        continue
    with DAG(
        f"watch__{publisher}",
        description=f"Lagging subscriptions of {publisher} → replay",
        doc_md=__doc__,
        schedule=watch_schedule(),
        start_date=START,
        is_paused_upon_creation=False,
        **dag_arguments(config, publisher, WATCH_ARGS),
    ):
        watch = WatchOperator(task_id="watch", publisher=publisher, groups=groups)
        for group in groups:
            watch >> TriggerDagRunOperator(
                task_id=f"replay.{group.name}",
                trigger_dag_id=replay_dag(group.name),
                logical_date=None,
                openlineage_inject_parent_info=False,  # the replay DAG rejects unknown Params
            )
