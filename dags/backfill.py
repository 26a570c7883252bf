"""`backfill__<subscription>`: apply a past range of the change log again.

In the subscriber it repairs rows: those that the range has changed get their state of the applied LSN. In
another database the range is applied unchanged.
"""

from __future__ import annotations

from airflow.sdk import DAG

from cdc_replay.airflow.operators import DEFAULT_ARGS, EmitAssetEventOperator, SparkJobOperator, dag_arguments
from cdc_replay.airflow.params import backfill_params, backfill_request
from cdc_replay.config import load_config

config = load_config()
for member in config.subscriptions.values():
    with DAG(
        f"backfill__{member.name}",
        description=f"A past range of the log, again, for {member.name}",
        doc_md=__doc__,
        schedule=None,
        **dag_arguments(config, member.subscription.publisher, DEFAULT_ARGS),
        params=backfill_params(),
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
