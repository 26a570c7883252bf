"""`replay__<group>`: one Spark application applies the change log to all subscriptions of the group.

Runs when the change log has new transactions, and when `watch__<publisher>` finds a lagging subscription; or
else on the group's schedule. The next run applies all changes that arrive while one is active. Every
subscription has its own report task, which fails while the subscription is failed or parked.
"""

from __future__ import annotations

from airflow.sdk import DAG, TriggerRule

from cdc_replay.airflow.assets import change_log
from cdc_replay.airflow.dag_ids import replay_dag
from cdc_replay.airflow.operators import FOLLOWING_ARGS, ReplayOperator, ReportOperator, dag_arguments
from cdc_replay.airflow.params import replay_params
from cdc_replay.airflow.schedules import START
from cdc_replay.config import load_config

config = load_config()
for group in config.groups.values():
    with DAG(
        replay_dag(group.name),
        description=f"Change log of {group.publisher} → {', '.join(group.subscriptions)}",
        doc_md=__doc__,
        schedule=group.schedule or [change_log(group.publisher)],
        start_date=START,
        **dag_arguments(config, group.publisher, FOLLOWING_ARGS),
        params=replay_params(),
    ):
        replay = ReplayOperator(
            task_id="replay",
            subscriptions=group.subscriptions,
            config=config,
        )
        for name in group.subscriptions:
            replay >> ReportOperator(
                task_id=f"report.{name}",
                subscription=name,
                replay_task_id="replay",
                trigger_rule=TriggerRule.ALL_DONE,
            )
