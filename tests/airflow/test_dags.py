"""The DAG files: what they make of a configuration, and how cheaply."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fixtures.airflow import EXAMPLE, RunInAirflow

SUBSCRIPTIONS = ("nsw", "act", "slow", "stock")
HEAVY = ("pyspark", "pyarrow", "psycopg", "great_expectations", "pandas", "numba", "deltalake")

PARSE = """
import sys, time

# The operators need no provider of OpenLineage: only the lock of development has it.
sys.modules["airflow.providers.openlineage"] = None

from airflow.dag_processing.dagbag import DagBag

bag = DagBag()
answer = {
    "errors": {str(file): error for file, error in bag.import_errors.items()},
    "files": [stat.file for stat in bag.dagbag_stats],
    "loaded": sorted(sys.modules),
    "dags": {
        dag_id: {
            "title": dag.dag_display_name,
            "doc": dag.doc_md,
            "schedule": str(dag.schedule),
            "assets": [asset.uri for asset in dag.schedule] if isinstance(dag.schedule, list) else [],
            "is_paused": dag.is_paused_upon_creation,
            "max_active_runs": dag.max_active_runs,
            "catchup": dag.catchup,
            "params": sorted(dag.params),
            "seconds": dag.dagrun_timeout and dag.dagrun_timeout.total_seconds(),
            "tasks": {
                task.task_id: {
                    "upstream": sorted(task.upstream_task_ids),
                    "outlets": [asset.uri for asset in task.outlets],
                    "retries": task.retries,
                    "pool": task.pool,
                    "callbacks": [
                        type(callback).__name__
                        for kind in ("failure", "success", "skipped")
                        for callback in getattr(task, f"on_{kind}_callback") or ()
                    ],
                    "seconds": task.execution_timeout and task.execution_timeout.total_seconds(),
                    "backoff": task.retry_exponential_backoff,
                    "max_retry_delay": task.max_retry_delay and task.max_retry_delay.total_seconds(),
                    "trigger_rule": task.trigger_rule.value,
                    "groups": getattr(task, "members", None),
                    "triggers": getattr(task, "trigger_dag_id", None),
                    "conn_id": getattr(task, "_conn_id", None),
                    "conf": getattr(task, "conf", None),
                    "application": getattr(task, "application", None),
                }
                for task in dag.tasks
            },
        }
        for dag_id, dag in bag.dags.items()
    },
}
"""


@pytest.fixture(scope="module")
def parsed(run_in_airflow: RunInAirflow) -> dict[str, Any]:
    answer: dict[str, Any] = run_in_airflow(PARSE)
    assert answer["errors"] == {}
    return answer


def test_parsing_loads_nothing_heavy(parsed: dict[str, Any]) -> None:
    """The files are parsed again and again for as long as Airflow runs, each in a process of its own."""
    assert len(parsed["files"]) == 8
    loaded = set(parsed["loaded"])
    assert not loaded & set(HEAVY)
    assert not [module for module in loaded if module.startswith("cdc_replay.commands.")]


def test_configuration_determines_the_dags(parsed: dict[str, Any]) -> None:
    expected = {"capture__shop", "capture__depot", "watch__shop", "watch__depot"}
    expected |= {"replay__shop", "replay__depot", "replay__nightly"}
    for verb in ("snapshot", "validate", "backfill", "refresh", "resume"):
        expected |= {f"{verb}__{name}" for name in SUBSCRIPTIONS}
    assert set(parsed["dags"]) == expected


def test_capture_prepares_the_publisher_then_produces_the_change_log(parsed: dict[str, Any]) -> None:
    dag = parsed["dags"]["capture__shop"]
    assert dag["tasks"]["capture"]["upstream"] == ["setup"]
    assert dag["tasks"]["capture"]["outlets"] == ["cdc-replay://change-log/shop"]
    assert dag["max_active_runs"] == 1
    assert dag["catchup"] is False


def test_replay_runs_on_the_change_log_or_on_the_schedule_of_the_group(parsed: dict[str, Any]) -> None:
    assert parsed["dags"]["replay__shop"]["assets"] == ["cdc-replay://change-log/shop"]
    assert parsed["dags"]["replay__depot"]["assets"] == ["cdc-replay://change-log/depot"]
    assert parsed["dags"]["replay__nightly"]["assets"] == []
    assert parsed["dags"]["replay__nightly"]["schedule"] == "0 3 * * *"
    assert parsed["dags"]["replay__shop"]["max_active_runs"] == 1


def test_replay_starts_spark_once_and_reports_each_subscription(parsed: dict[str, Any]) -> None:
    tasks = parsed["dags"]["replay__shop"]["tasks"]
    assert set(tasks) == {"replay", "report.nsw", "report.act"}
    for name in ("nsw", "act"):
        assert tasks[f"report.{name}"]["outlets"] == [f"cdc-replay://subscription/{name}"]
        assert tasks[f"report.{name}"]["upstream"] == ["replay"]
        # A report reads what its subscription did, whether or not the application reached its end.
        assert tasks[f"report.{name}"]["trigger_rule"] == "all_done"


def test_a_group_has_its_own_spark_connection_and_settings(parsed: dict[str, Any]) -> None:
    nightly = parsed["dags"]["replay__nightly"]["tasks"]["replay"]
    assert (nightly["conn_id"], nightly["conf"]["spark.executor.memory"]) == ("cluster", "2g")
    snapshot = parsed["dags"]["snapshot__slow"]["tasks"]["snapshot"]
    assert (snapshot["conn_id"], snapshot["conf"]["spark.executor.memory"]) == ("cluster", "2g")
    assert parsed["dags"]["replay__shop"]["tasks"]["replay"]["conn_id"] == "spark_default"


@pytest.mark.parametrize("name", SUBSCRIPTIONS)
def test_writes_to_a_subscriber_trigger_its_validation(parsed: dict[str, Any], name: str) -> None:
    asset = f"cdc-replay://subscription/{name}"
    assert parsed["dags"][f"validate__{name}"]["assets"] == [asset]
    for verb, task in (("snapshot", "snapshot"), ("refresh", "announce"), ("backfill", "announce")):
        assert parsed["dags"][f"{verb}__{name}"]["tasks"][task]["outlets"] == [asset]


def test_manual_dags_have_typed_params(parsed: dict[str, Any]) -> None:
    dags = parsed["dags"]
    assert dags["backfill__nsw"]["params"] == ["dry_run", "from", "into_conn_id", "tables", "to"]
    assert dags["snapshot__nsw"]["params"] == ["tables"]
    assert dags["refresh__nsw"]["params"] == ["dry_run", "reconcile"]
    assert dags["validate__nsw"]["params"] == [
        *("dry_run", "due", "max_bytes", "max_seconds", "repair", "sample", "tables"),
    ]
    assert dags["replay__shop"]["params"] == ["to_lsn"]
    assert dags["resume__nsw"]["params"] == ["accept_null", "skip", "tables"]
    for verb in ("snapshot", "backfill", "refresh", "resume"):
        assert dags[f"{verb}__nsw"]["schedule"] == "None"


def test_every_task_is_tried_again_with_growing_delays(parsed: dict[str, Any]) -> None:
    for dag_id, dag in parsed["dags"].items():
        for task in dag["tasks"].values():
            is_watch = dag_id.startswith("watch__")  # which runs again soon
            assert (task["retries"], task["backoff"]) == ((0, 0) if is_watch else (3, 3))


def test_tasks_are_in_the_pool_of_the_slot_or_of_the_group(parsed: dict[str, Any]) -> None:
    pools = {
        dag_id: {task["pool"] for task in dag["tasks"].values()} for dag_id, dag in parsed["dags"].items()
    }
    assert pools["capture__shop"] == {"slot of shop"}
    of_group = {
        "replay__nightly",
        *(f"{verb}__slow" for verb in ("validate", "snapshot", "refresh", "backfill")),
    }
    assert {dag_id for dag_id, used in pools.items() if used == {"archive"}} == of_group | {"resume__slow"}
    assert pools["replay__shop"] == pools["capture__depot"] == {"default_pool"}


def test_retries_follow_soon_after_a_server_is_back(parsed: dict[str, Any]) -> None:
    """A run of replay ends before the next one, which has what was missed, can start."""
    pauses = {
        f"{dag_id}.{task_id}": task["max_retry_delay"]
        for dag_id, dag in parsed["dags"].items()
        for task_id, task in dag["tasks"].items()
    }
    for name in ("capture__shop.setup", "capture__shop.capture", "replay__shop.replay"):
        assert pauses[name] == 30
    assert pauses["replay__shop.report.nsw"] == 10
    assert pauses["snapshot__nsw.snapshot"] == 600


def seconds(parsed: dict[str, Any]) -> set[tuple[float | None, float | None]]:
    """What runs and their tasks may take; the watch has a limit of its own."""
    return {
        (dag["seconds"], task["seconds"])
        for dag_id, dag in parsed["dags"].items()
        for task in dag["tasks"].values()
        if not dag_id.startswith("watch__")
    }


def test_tasks_and_runs_have_timeouts(parsed: dict[str, Any], run_in_airflow: RunInAirflow) -> None:
    assert seconds(parsed) == {(4 * 86400, 86400)}
    assert parsed["dags"]["watch__shop"]["tasks"]["watch"]["seconds"] == 600
    assert seconds(run_in_airflow(PARSE, config=f"{EXAMPLE}timeouts: {{task: 2h, run: 5h}}")) == {
        (18000, 7200)
    }
    assert seconds(run_in_airflow(PARSE, config=f"{EXAMPLE}timeouts: {{task: 0, run: 0}}")) == {(None, None)}


def test_new_watch_dag_is_not_paused(parsed: dict[str, Any]) -> None:
    """Nobody has to unpause it. A group that has a schedule of its own is left to that."""
    for name in ("shop", "depot"):
        dag = parsed["dags"][f"watch__{name}"]
        assert dag["is_paused"] is False
        assert dag["schedule"] == "0:00:30"
        assert (dag["max_active_runs"], dag["catchup"]) == (1, False)
        assert dag["tasks"][f"replay.{name}"]["upstream"] == ["watch"]
        assert dag["tasks"][f"replay.{name}"]["triggers"] == f"replay__{name}"
    assert set(parsed["dags"]["watch__shop"]["tasks"]) == {"watch", "replay.shop"}
    assert parsed["dags"]["watch__shop"]["tasks"]["watch"]["groups"] == {"shop": ["nsw", "act"]}
    assert parsed["dags"]["capture__shop"]["is_paused"] is None


def test_with_channels_every_task_tells_and_every_publisher_is_watched(
    parsed: dict[str, Any], run_in_airflow: RunInAirflow
) -> None:
    """Also one whose groups all have a schedule: its watch then triggers nothing."""
    assert {
        tuple(task["callbacks"]) for dag in parsed["dags"].values() for task in dag["tasks"].values()
    } == {()}
    config = f"""{EXAMPLE}  depot: {{schedule: "@daily"}}
alarms: {{notify: [{{webhook: {{conn_id: ops}}}}]}}
"""
    told = run_in_airflow(PARSE, config=config)
    assert told["errors"] == {}
    assert not set(told["loaded"]) & set(HEAVY)
    for dag in told["dags"].values():
        for task in dag["tasks"].values():
            assert task["callbacks"] == ["AlarmNotifier", "ResolvedNotifier", "ResolvedNotifier"]
    assert set(told["dags"]["watch__depot"]["tasks"]) == {"watch"}
    assert told["dags"]["watch__depot"]["schedule"] == "0:00:30"
    assert "alarms.notify" in told["dags"]["watch__depot"]["doc"]


def test_the_dags_that_run_every_day_come_first(parsed: dict[str, Any]) -> None:
    """Airflow's list is sorted by display name."""
    titles = sorted(dag["title"] for dag in parsed["dags"].values() if dag["title"].startswith("shop"))
    verbs = list(dict.fromkeys(title.split()[3] for title in titles))
    assert verbs == ["capture", "replay", "validate", "snapshot", "refresh", "backfill", "resume", "watch"]
    assert "shop · 3 validate nsw" in titles


def test_the_text_of_a_dag_names_its_own_objects(parsed: dict[str, Any]) -> None:
    for dag_id, dag in parsed["dags"].items():
        assert not re.search(r"<\w+>|…", dag["doc"]), dag_id
        assert re.search(r"configuration \| `[0-9a-f]{12}`", dag["doc"]), dag_id
    assert "| publications | `p1, p2` |" in parsed["dags"]["backfill__nsw"]["doc"]
    assert "postgresql://" not in "".join(dag["doc"] for dag in parsed["dags"].values())


def test_every_spark_job_is_a_file_of_the_project(parsed: dict[str, Any]) -> None:
    jobs = {
        Path(task["application"])
        for dag in parsed["dags"].values()
        for task in dag["tasks"].values()
        if task["application"]
    }
    assert {job.stem for job in jobs} == {"replay", "snapshot", "backfill", "refresh"}
    assert all(job.is_file() for job in jobs)


@pytest.mark.parametrize(
    ("setting", "schedule"),
    [("", "0:01:00"), ("15", "0:00:15"), ("*/5 * * * *", "*/5 * * * *"), ("none", "None")],
)
def test_environment_sets_the_schedules_of_capture_and_watch(
    run_in_airflow: RunInAirflow, setting: str, schedule: str
) -> None:
    answer = run_in_airflow(PARSE, CDC_REPLAY_CAPTURE_SCHEDULE=setting, CDC_REPLAY_WATCH_SCHEDULE=setting)
    assert answer["dags"]["capture__shop"]["schedule"] == schedule
    assert answer["dags"]["watch__shop"]["schedule"] == (schedule if setting else "0:00:30")


def test_a_wrong_configuration_is_an_import_error_that_names_the_key(run_in_airflow: RunInAirflow) -> None:
    answer = run_in_airflow(PARSE, config=EXAMPLE.replace("publications: [p1, p2]", "publication: [p1]"))
    assert answer["dags"] == {}
    assert len(answer["errors"]) == 8
    assert all("publication" in error and "line 6" in error for error in answer["errors"].values())


def test_the_plugins_folder_gives_airflow_one_plugin_and_hides_the_package(
    run_in_airflow: RunInAirflow,
) -> None:
    """Airflow executes every other file below plugins/ under its bare name: `operators`, `params`."""
    answer = run_in_airflow(
        """
        import sys
        from airflow import plugins_manager

        plugins, errors = plugins_manager._get_plugins()
        answer = {
            "plugins": [plugin.name for plugin in plugins if plugin.name.startswith("cdc")],
            "errors": errors,
            "loaded": sorted(sys.modules),
        }
        """
    )
    assert answer["plugins"] == ["cdc_replay"]
    assert answer["errors"] == {}
    assert not {"operators", "params", "assets", "connections", "links"} & set(answer["loaded"])
    assert not set(HEAVY) & set(answer["loaded"])
