"""`backfill__<subscription>`: apply a past range of the change log again.

Into the subscriber it repairs: the rows that the range touches end as of the subscriber's applied LSN. Into
another database the range is applied as it was.
"""

from __future__ import annotations

from airflow.sdk import DAG

from cdc_replay.airflow.operators import DEFAULT_ARGS, EmitAssetEventOperator, SparkJobOperator, limited
from cdc_replay.airflow.params import backfill_params, backfill_request
from cdc_replay.config import load_config

config = load_config()
for member in config.subscriptions.values():
    with DAG(
        f"backfill__{member.name}",
        description=f"A past range of the log, again, for {member.name}",
        doc_md=__doc__,
        schedule=None,
        max_active_runs=1,
        **limited(config, DEFAULT_ARGS),
        params=backfill_params(),
        tags=["cdc-replay", member.subscription.publisher],
    ):
        backfill = SparkJobOperator(
            task_id="backfill",
            job="backfill",
            subscriptions=[member.name],
            config=config,
            request=backfill_request,
        )
        backfill >> EmitAssetEventOperator(
            task_id="announce", subscription=member.name, unless=["into_conn_id", "dry_run"]
        )
