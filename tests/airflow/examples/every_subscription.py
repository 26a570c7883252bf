"""One mapped task for every subscription of the configuration, three at a time."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import DAG

from cdc_replay.airflow import ValidateOperator, load_config

with DAG("prove_all", schedule="@weekly", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False):
    ValidateOperator.partial(task_id="validate", max_active_tis_per_dag=3).expand(
        subscription=list(load_config().subscriptions)
    )
