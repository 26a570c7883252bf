"""`watch__<publisher>`: have subscriptions replayed that are behind the change log, whatever the reason was.

Replay runs when the log has grown. What a run could not apply, because its subscriber was gone until no
retry was left, would wait for the next change of the publisher. So every subscription is asked for its lag:
where a replay can end that, and none is running or queued, the replay DAG of its group runs. A subscriber
that does not answer costs one attempt to connect. Groups with a schedule of their own are left to that.

Not paused when it is new: it does nothing for a replay DAG that is paused.
"""

from __future__ import annotations

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import DAG

from cdc_replay.airflow.dag_ids import replay_dag
from cdc_replay.airflow.operators import WATCH_ARGS, WatchOperator, limited
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
        description=f"Subscriptions of {publisher} that are behind → replay",
        doc_md=__doc__,
        schedule=watch_schedule(),
        start_date=START,
        catchup=False,
        max_active_runs=1,
        is_paused_upon_creation=False,
        **limited(config, WATCH_ARGS),
        tags=["cdc-replay", publisher],
    ):
        watch = WatchOperator(task_id="watch", publisher=publisher, groups=groups)
        for group in groups:
            watch >> TriggerDagRunOperator(
                task_id=f"replay.{group.name}",
                trigger_dag_id=replay_dag(group.name),
                logical_date=None,
                openlineage_inject_parent_info=False,  # the replay DAG refuses what is no Param
            )
