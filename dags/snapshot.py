"""`snapshot__<subscription>`: copy the tables that need it, or those named, under one exported snapshot.

Replay skips the tables that are being copied; they catch up from the snapshot's LSN afterwards. The other
tables do not wait.
"""

from __future__ import annotations

from airflow.sdk import DAG

from cdc_replay.airflow.assets import subscription
from cdc_replay.airflow.operators import DEFAULT_ARGS, SparkJobOperator, dag_arguments
from cdc_replay.airflow.params import snapshot_params, snapshot_request
from cdc_replay.config import load_config

config = load_config()
for member in config.subscriptions.values():
    with DAG(
        f"snapshot__{member.name}",
        description=f"Initial state of {member.name}",
        doc_md=__doc__,
        schedule=None,
        **dag_arguments(config, member.subscription.publisher, DEFAULT_ARGS),
        params=snapshot_params(),
    ):
        SparkJobOperator(
            task_id="snapshot",
            job="snapshot",
            subscriptions=[member.name],
            config=config,
            request=snapshot_request,
            outlets=[subscription(member.name)],
        )
