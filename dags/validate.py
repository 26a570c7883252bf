"""`validate__<subscription>`: prove with Great Expectations that the subscriber is consistent.

Runs after each write to the subscriber. Compares both sides at one LSN under live writes.
"""

from __future__ import annotations

from airflow.sdk import DAG

from cdc_replay.airflow.assets import subscription
from cdc_replay.airflow.dag_ids import validate_dag
from cdc_replay.airflow.operators import DEFAULT_ARGS, ValidateOperator, dag_arguments
from cdc_replay.config import load_config

config = load_config()
for member in config.subscriptions.values():
    with DAG(
        validate_dag(member.name),
        description=f"Is {member.name} what its publications say?",
        doc_md=__doc__,
        schedule=[subscription(member.name)],
        **dag_arguments(config, member.subscription.publisher, DEFAULT_ARGS),
    ):
        ValidateOperator(task_id="validate", subscription=member.name)
