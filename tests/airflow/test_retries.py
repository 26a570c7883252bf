"""Which failures of a Spark application Airflow tries again: the exit code says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.airflow import RunInAirflow

EXECUTE = """
from types import SimpleNamespace
from airflow.dag_processing.dagbag import DagBag

task = DagBag().dags["snapshot__nsw"].get_task("snapshot")
context = {"dag_run": SimpleNamespace(conf={}), "params": {"tables": []}}
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
        assert f"Error code is: {code}." in answer["says"]
