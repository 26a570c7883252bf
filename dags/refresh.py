"""`refresh__<subscription>`: read the publications again, as REFRESH PUBLICATION does.

New tables are copied, dropped ones are removed from the subscription. With the Param `reconcile` the
subscriber then equals the publications: rows are inserted and updated, and rows that the publisher does not
have or that the row filter excludes are deleted without confirmation. With `dry_run` nothing is changed, and
the result in the task's log has the counts.
"""

from __future__ import annotations

from airflow.sdk import DAG

from cdc_replay.airflow.operators import DEFAULT_ARGS, EmitAssetEventOperator, SparkJobOperator, dag_arguments
from cdc_replay.airflow.params import refresh_params, refresh_request
from cdc_replay.config import load_config

config = load_config()
for member in config.subscriptions.values():
    with DAG(
        f"refresh__{member.name}",
        description=f"Publications of {member.name}, read again",
        doc_md=__doc__,
        schedule=None,
        **dag_arguments(config, member.subscription.publisher, DEFAULT_ARGS),
        params=refresh_params(),
    ):
        refresh = SparkJobOperator(
            task_id="refresh",
            job="refresh",
            subscriptions=[member.name],
            config=config,
            request=refresh_request,
        )
        refresh >> EmitAssetEventOperator(task_id="announce", subscription=member.name, unless=["dry_run"])
