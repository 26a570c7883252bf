"""A report on tables that are brought up to date, and proved, before it is built."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import DAG, task

from cdc_replay.airflow import ReplayTaskGroup

with DAG("morning_report", schedule="0 6 * * *", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False):
    tables = ReplayTaskGroup("tables", subscriptions=["nsw"], validate=True)

    @task
    def build_report() -> str:
        """Read the subscriber's tables."""
        return "built"

    tables >> build_report()
