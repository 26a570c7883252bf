"""`refresh__<subscription>`: read the publications again, as REFRESH PUBLICATION does.

New tables are copied, dropped ones forgotten. With the Param `reconcile` the subscriber then holds exactly
what the publications say: rows are brought and updated, and all rows are deleted that the publisher does not
have or the row filter shuts out, without a question. With `dry_run` nothing is changed: the result in the
task's log counts what would be.
"""

from __future__ import annotations

from airflow.sdk import DAG

from cdc_replay.airflow.operators import DEFAULT_ARGS, EmitAssetEventOperator, SparkJobOperator, limited
from cdc_replay.airflow.params import refresh_params, refresh_request
from cdc_replay.config import load_config

config = load_config()
for member in config.subscriptions.values():
    with DAG(
        f"refresh__{member.name}",
        description=f"Publications of {member.name}, read again",
        doc_md=__doc__,
        schedule=None,
        max_active_runs=1,
        **limited(config, DEFAULT_ARGS),
        params=refresh_params(),
        tags=["cdc-replay", member.subscription.publisher],
    ):
        refresh = SparkJobOperator(
            task_id="refresh",
            job="refresh",
            subscriptions=[member.name],
            config=config,
            request=refresh_request,
        )
        refresh >> EmitAssetEventOperator(task_id="announce", subscription=member.name, unless=["dry_run"])
