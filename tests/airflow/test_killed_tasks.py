"""What becomes of a task's work when Airflow ends it: with SIGTERM, of which it calls `on_kill`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.airflow import RunInAirflow

CONNECTIONS = {
    "AIRFLOW_CONN_SPARK_DEFAULT": "spark://local",
    "AIRFLOW_CONN_SHOP_PUBLISHER": "postgresql://shop/db",
    "AIRFLOW_CONN_DWH": "postgresql://dwh/db",
}

COMMAND = """
import os, signal, time
from cdc_replay.airflow.operators.in_process import CommandOperator

class Waiting(CommandOperator):
    def run_command(self, config, context):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return dict()

task = Waiting(task_id="waiting")
signal.signal(signal.SIGTERM, lambda *_: task.on_kill())  # as Airflow's task runner does
try:
    answer = task.execute(dict())
except SystemExit as ended:
    answer = ended.code
"""

TIMED_OUT = """
from airflow.sdk.exceptions import AirflowTaskTimeout
from cdc_replay.airflow import ReportOperator

task = ReportOperator(task_id="report", subscription="nsw", replay_task_id="replay")
try:
    try:
        raise AirflowTaskTimeout
    except AirflowTaskTimeout:
        task.on_kill()
        raise
except BaseException as error:
    answer = type(error).__name__
"""

APPLICATION = """
import threading, time
from pathlib import Path
from types import SimpleNamespace
from airflow.dag_processing.dagbag import DagBag

task = DagBag().dags["snapshot__nsw"].get_task("snapshot")
task.tables = []

def kill_once_it_runs():
    while not Path("{folder}/started").exists():
        time.sleep(0.1)
    task.on_kill()

threading.Thread(target=kill_once_it_runs).start()
try:
    task.execute({{"dag_run": SimpleNamespace(conf={{}})}})
    answer = None
except Exception as error:
    answer = str(error)
"""


def test_command_ends_where_it_is(run_in_airflow: RunInAirflow) -> None:
    """Airflow only calls `on_kill`, and waits until it kills."""
    assert run_in_airflow(COMMAND, **CONNECTIONS) == 143


def test_timeout_stays_a_timeout(run_in_airflow: RunInAirflow) -> None:
    assert run_in_airflow(TIMED_OUT, **CONNECTIONS) == "AirflowTaskTimeout"


@pytest.mark.slow
def test_spark_application_is_asked_before_it_is_killed(run_in_airflow: RunInAirflow, tmp_path: Path) -> None:
    """The provider's hook would kill at once. A program in the place of spark-submit says what it got."""
    spark_submit = tmp_path / "spark-submit"
    spark_submit.write_text(
        f"#!/bin/sh\ntrap 'echo > {tmp_path}/asked; exit 143' TERM\necho > {tmp_path}/started\n"
        "while :; do sleep 0.1; done\n",
        encoding="utf-8",
    )
    spark_submit.chmod(0o755)
    answer = run_in_airflow(
        APPLICATION.format(folder=tmp_path), **CONNECTIONS, PATH=f"{tmp_path}:/usr/bin:/bin"
    )
    assert (tmp_path / "asked").exists()
    assert answer.startswith("the Spark application ended with exit code 143 (SIGTERM)")
