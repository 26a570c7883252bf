"""Airflow's tasks write files for their user only, whatever the umask of its workers (`private_files`)."""

from __future__ import annotations

import stat
from pathlib import Path

from fixtures.airflow import RunInAirflow

IN_A_TASK = """
import os
from cdc_replay.airflow.operators.in_process import CommandOperator

class Writing(CommandOperator):
    def run_command(self, config, context):
        os.mkdir("{folder}/made")
        open("{folder}/made/file", "w").close()
        return dict()

os.umask(0)
Writing(task_id="writing").execute(dict())
answer = os.umask(0)
"""

IN_A_DRIVER = """
import os
from types import SimpleNamespace
from airflow.dag_processing.dagbag import DagBag

os.umask(0)
task = DagBag().dags["snapshot__nsw"].get_task("snapshot")
task.tables = []
task.execute({"dag_run": SimpleNamespace(conf={})})
answer = os.umask(0)
"""

CONNECTIONS = {
    "AIRFLOW_CONN_SPARK_DEFAULT": "spark://local",
    "AIRFLOW_CONN_SHOP_PUBLISHER": "postgresql://shop/db",
    "AIRFLOW_CONN_DWH": "postgresql://dwh/db",
}


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_command_in_a_task_writes_for_its_user_only(run_in_airflow: RunInAirflow, tmp_path: Path) -> None:
    """The task's umask is as before afterwards: it is Airflow's process."""
    assert run_in_airflow(IN_A_TASK.format(folder=tmp_path), **CONNECTIONS) == 0
    assert permissions(tmp_path / "made") == 0o700
    assert permissions(tmp_path / "made" / "file") == 0o600


def test_spark_application_of_a_task_writes_for_its_user_only(
    run_in_airflow: RunInAirflow, tmp_path: Path
) -> None:
    """A program in the place of spark-submit writes a file."""
    spark_submit = tmp_path / "spark-submit"
    spark_submit.write_text(f"#!/bin/sh\necho > {tmp_path}/file\n", encoding="utf-8")
    spark_submit.chmod(0o755)
    assert run_in_airflow(IN_A_DRIVER, **CONNECTIONS, PATH=f"{tmp_path}:/usr/bin:/bin") == 0
    assert permissions(tmp_path / "file") == 0o600
