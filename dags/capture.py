"""`capture__<publisher>`: set up the slot if it is missing, then pull its changes into the change log.

One run at a time per slot. `CDC_REPLAY_CAPTURE_SCHEDULE` is a number of seconds (default 60), a cron
expression or preset, or `none` for runs that a person or another system starts.
"""

from __future__ import annotations

from airflow.sdk import DAG

from cdc_replay.airflow.dag_ids import capture_dag
from cdc_replay.airflow.operators import FOLLOWING_ARGS, CaptureOperator, SetupOperator, dag_arguments
from cdc_replay.airflow.params import capture_params
from cdc_replay.airflow.schedules import START, capture_schedule
from cdc_replay.config import load_config

config = load_config()
for publisher in config.publishers:
    with DAG(
        capture_dag(publisher),
        description=f"Slot of {publisher} → change log",
        doc_md=__doc__,
        schedule=capture_schedule(),
        start_date=START,
        **dag_arguments(config, publisher, FOLLOWING_ARGS),
        params=capture_params(),
    ):
        setup = SetupOperator(task_id="setup", publisher=publisher)
        capture = CaptureOperator(task_id="capture", publisher=publisher, to_lsn="{{ params.to_lsn or '' }}")
        setup >> capture
