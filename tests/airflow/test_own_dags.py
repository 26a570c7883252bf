"""DAG files of a user: the documented examples, and what the names of the package accept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fixtures.airflow import ROOT, RunInAirflow

EXAMPLES = Path(__file__).parent / "examples"
HEAVY = ("pyspark", "pyarrow", "psycopg", "great_expectations", "pandas", "numba", "deltalake")

PARSE = """
import sys
from airflow.dag_processing.dagbag import DagBag

from cdc_replay.airflow import ReplayDag
from cdc_replay.errors import InvalidConfiguration

try:
    ReplayDag(["nsw"])
    refused = None
except InvalidConfiguration as error:
    refused = str(error)

bag = DagBag()
answer = {
    "refused": refused,
    "errors": {str(file): error for file, error in bag.import_errors.items()},
    "loaded": sorted(sys.modules),
    "dags": {
        dag_id: {
            "tasks": {
                task.task_id: {
                    "upstream": sorted(task.upstream_task_ids),
                    "retries": task.retries,
                    "owner": task.owner,
                    "pool": task.pool,
                    "mapped": task.is_mapped,
                    "links": [link.name for link in task.operator_extra_links],
                    "subscription": getattr(task, "subscription", None),
                    "callbacks": [
                        type(callback).__name__
                        for kind in ("failure", "success", "skipped")
                        for callback in getattr(task, f"on_{kind}_callback") or ()
                    ],
                    "replay_task_id": getattr(task, "replay_task_id", None),
                }
                for task in dag.tasks
            },
            "tags": sorted(dag.tags),
        }
        for dag_id, dag in bag.dags.items()
    },
}
"""


@pytest.fixture(scope="module")
def examples(run_in_airflow: RunInAirflow) -> dict[str, Any]:
    answer: dict[str, Any] = run_in_airflow(PARSE, AIRFLOW__CORE__DAGS_FOLDER=str(EXAMPLES))
    assert answer["errors"] == {}
    return answer


def test_the_documentation_shows_the_examples() -> None:
    page = (ROOT / "docs" / "airflow.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    assert {file.read_text(encoding="utf-8") for file in EXAMPLES.glob("*.py")} <= shown


def test_examples_are_parsed_and_load_nothing_heavy(examples: dict[str, Any]) -> None:
    assert set(examples["dags"]) == {
        "morning_report",
        "after_replay",
        "alarmed_report",
        "nsw_at_night",
        "prove_all",
    }
    assert not set(examples["loaded"]) & set(HEAVY)


def test_a_task_group_is_a_replay_inside_of_another_dag(examples: dict[str, Any]) -> None:
    tasks = examples["dags"]["morning_report"]["tasks"]
    assert {name: task["upstream"] for name, task in tasks.items()} == {
        "tables.setup": [],
        "tables.capture": ["tables.setup"],
        "tables.replay": ["tables.capture"],
        "tables.report.nsw": ["tables.replay"],
        "tables.validate.nsw": ["tables.report.nsw"],
        "build_report": ["tables.validate.nsw"],
    }
    assert tasks["tables.report.nsw"]["replay_task_id"] == "tables.replay"
    assert (tasks["tables.replay"]["retries"], tasks["build_report"]["retries"]) == (3, 0)
    assert {name: task["pool"] for name, task in tasks.items() if task["pool"] != "default_pool"} == {
        "tables.setup": "slot of shop",
        "tables.capture": "slot of shop",
    }


def test_a_dag_of_ones_own_has_its_own_owner_pool_and_tags(examples: dict[str, Any]) -> None:
    dag = examples["dags"]["nsw_at_night"]
    assert set(dag["tasks"]) == {"setup", "capture", "replay", "report.nsw", "validate.nsw"}
    assert {(task["owner"], task["pool"]) for task in dag["tasks"].values()} == {("finance", "warehouse")}
    assert set(dag["tags"]) == {"cdc-replay", "shop", "replay", "finance"}


def test_callbacks_of_a_dag_are_those_of_its_task_groups(examples: dict[str, Any]) -> None:
    tasks = examples["dags"]["alarmed_report"]["tasks"]
    assert set(tasks) > {"tables.setup", "tables.replay", "build_report"}
    for task in tasks.values():
        assert task["callbacks"] == ["AlarmNotifier", "ResolvedNotifier", "ResolvedNotifier"]


def test_links_are_those_of_the_operator_in_any_dag(examples: dict[str, Any]) -> None:
    tasks = examples["dags"]["morning_report"]["tasks"]
    assert tasks["tables.validate.nsw"]["links"] == ["Validation report", "CDC replay status"]
    assert tasks["tables.replay"]["links"] == ["Spark history", "CDC replay status"]
    assert examples["dags"]["prove_all"]["tasks"]["validate"]["mapped"]


def test_a_part_of_a_group_needs_a_name_of_its_own(examples: dict[str, Any]) -> None:
    assert "Give the DAG a `dag_id` of its own." in examples["refused"]
