"""`refresh__<subscription>`: read the publications again, as REFRESH PUBLICATION does.

New tables are copied, dropped ones forgotten. With the Param `reconcile` the subscriber then holds exactly
what the publications say: rows that a changed row filter concerns are brought or deleted, without a full
copy.
"""

from __future__ import annotations

from airflow.sdk import DAG

from cdc_replay.config import load_config
from cdc_replay_airflow.assets import subscription
from cdc_replay_airflow.operators import DEFAULT_ARGS, SparkJobOperator
from cdc_replay_airflow.params import refresh_params, refresh_request

config = load_config()
for member in config.subscriptions.values():
    with DAG(
        f"refresh__{member.name}",
        description=f"Publications of {member.name}, read again",
        doc_md=__doc__,
        schedule=None,
        max_active_runs=1,
        default_args=DEFAULT_ARGS,
        params=refresh_params(),
        tags=["cdc-replay", member.subscription.publisher],
    ):
        SparkJobOperator(
            task_id="refresh",
            job="refresh",
            subscriptions=[member.name],
            config=config,
            request=refresh_request,
            outlets=[subscription(member.name)],
        )
