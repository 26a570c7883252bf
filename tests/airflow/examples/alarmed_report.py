"""Tasks that tell their failures to the channels of the configuration, each once until it is over."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import DAG, task

from cdc_replay.airflow import AlarmNotifier, ReplayTaskGroup, ResolvedNotifier

with DAG(
    "alarmed_report",
    schedule="0 6 * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    default_args={
        "on_failure_callback": AlarmNotifier(),
        "on_success_callback": ResolvedNotifier(),
        "on_skipped_callback": ResolvedNotifier(),
    },
):

    @task
    def build_report() -> str:
        """Read the subscriber's tables."""
        return "built"

    ReplayTaskGroup("tables", subscriptions=["nsw"]) >> build_report()
