"""What becomes of a failed Spark application: whether Airflow tries again, and what the task's error says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fixtures.airflow import RunInAirflow

EXECUTE = """
from types import SimpleNamespace
from airflow.dag_processing.dagbag import DagBag

task = DagBag().dags["snapshot__nsw"].get_task("snapshot")
task.tables = []
context = {"dag_run": SimpleNamespace(conf={})}
try:
    task.execute(context)
    answer = {"raised": None}
except Exception as error:
    answer = {"raised": type(error).__name__, "says": str(error)}
"""


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        (0, None),
        (1, "AirflowException"),
        (65, "AirflowFailException"),
        (75, "AirflowException"),
        (137, "AirflowException"),
    ],
)
def test_only_permanent_errors_fail_at_once(
    run_in_airflow: RunInAirflow, tmp_path: Path, code: int, raised: str | None
) -> None:
    """Airflow tries every exception again but AirflowFailException. The hook is the provider's own."""
    spark_submit = tmp_path / "spark-submit"
    # A number in what the application says is not its exit code.
    spark_submit.write_text(f"#!/bin/sh\necho 'Error code is: 65.'\nexit {code}\n", encoding="utf-8")
    spark_submit.chmod(0o755)
    answer = run_in_airflow(
        EXECUTE,
        PATH=f"{tmp_path}:/usr/bin:/bin",
        AIRFLOW_CONN_SPARK_DEFAULT="spark://local",
        AIRFLOW_CONN_SHOP_PUBLISHER="postgresql://shop/db",
        AIRFLOW_CONN_DWH="postgresql://dwh/db",
    )
    assert answer["raised"] == raised, answer
    if raised:
        assert answer["says"].startswith(f"the Spark application ended with exit code {code}")
        assert ("SIGKILL" in answer["says"]) == (code == 137)


def test_the_error_of_a_task_is_that_of_its_application(run_in_airflow: RunInAirflow, tmp_path: Path) -> None:
    """An alert carries it. That of the provider's hook begins with the command."""
    outcome = {"results": [], "error": 'subscriber "nsw" does not answer'}
    (tmp_path / "outcome.json").write_text(json.dumps(outcome), encoding="utf-8")
    spark_submit = tmp_path / "spark-submit"
    spark_submit.write_text(
        f'#!/bin/sh\ncat {tmp_path}/outcome.json > "$CDC_REPLAY_OUTCOME_FILE"\nexit 75\n', encoding="utf-8"
    )
    spark_submit.chmod(0o755)
    answer = run_in_airflow(
        EXECUTE,
        PATH=f"{tmp_path}:/usr/bin:/bin",
        AIRFLOW_CONN_SPARK_DEFAULT="spark://local",
        AIRFLOW_CONN_SHOP_PUBLISHER="postgresql://shop/db",
        AIRFLOW_CONN_DWH="postgresql://dwh/db",
    )
    assert answer == {"raised": "AirflowException", "says": outcome["error"]}
