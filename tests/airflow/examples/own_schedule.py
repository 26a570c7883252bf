"""One subscription in a DAG of its own: at night, with the owner and the pool of its team."""

from __future__ import annotations

from cdc_replay.airflow import ReplayDag

ReplayDag(
    ["nsw"],
    dag_id="nsw_at_night",
    schedule="0 3 * * *",
    capture=True,
    validate=True,
    tags=["finance"],
    default_args={"owner": "finance", "pool": "warehouse"},
)
