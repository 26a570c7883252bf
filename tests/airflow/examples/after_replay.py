"""Work that waits for what the shipped DAGs do. A triggerer waits, no worker does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.sdk import DAG, task

from cdc_replay.airflow import CaughtUpSensor, LagSensor, ProofSensor

with DAG("after_replay", schedule="@hourly", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False):
    # All that the publisher has committed by now.
    caught_up = CaughtUpSensor(task_id="caught_up", subscription="nsw", poke_interval=5)
    is_fresh = LagSensor(task_id="is_fresh", subscription="nsw", seconds=300, poke_interval=5)
    is_proved = ProofSensor(task_id="is_proved", subscription="nsw", within=timedelta(days=1))

    @task
    def export() -> str:
        """Read the subscriber's tables."""
        return "exported"

    caught_up >> is_fresh >> is_proved >> export()
