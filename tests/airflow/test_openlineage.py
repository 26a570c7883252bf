"""What the provider of OpenLineage extracts from the operators, with servers that answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Ready
from cdc_replay.subscriber.state_schema import install
from cdc_replay.subscriber.subscription_records import bind_subscription
from cdc_replay.subscriber.subscription_tables import set_table_state
from embedded.postgres import Cluster
from fixtures.airflow import RunInAirflow
from fixtures.postgres import ANY_DATABASE, Database, create_database, drop_database

CONFIGURATION = """
publishers:
  shop: {conn_id: shop_publisher, change_log: /var/log/shop}
  far: {dsn: "postgresql://far.example,other.example:6432/db", change_log: "s3://bucket/logs/far"}
subscriptions:
  nsw: {publisher: shop, publications: [nsw], conn_id: dwh}
  all: {publisher: shop, publications: [everything], conn_id: dwh}
"""

SECRET = "s3cret-word"

EXTRACT = """
from types import SimpleNamespace

from airflow.providers.openlineage.extractors.manager import ExtractorManager
from airflow.sdk import DAG
from airflow.utils.state import TaskInstanceState
from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
from openlineage.client.serde import Serde
from cdc_replay.airflow import (
    BackfillOperator, CaptureOperator, RefreshOperator, ReplayOperator, ReportOperator, SnapshotOperator,
    ValidateOperator,
)

window = {"from_lsn": "0/10", "to_lsn": "0/20"}
nsw = {"subscription": "nsw", **window}
with DAG("d", schedule=None):
    tasks = {
        "capture": (CaptureOperator, {"publisher": "shop"}, [{"publisher": "shop", **window}]),
        "far": (CaptureOperator, {"publisher": "far"}, []),
        "replay": (ReplayOperator, {"subscriptions": ["nsw", "all"]}, [nsw, {**nsw, "subscription": "all"}]),
        "report": (
            ReportOperator, {"subscription": "nsw", "replay_task_id": "r"}, [{**nsw, "transactions": 3}]
        ),
        "half": (
            ReplayOperator, {"subscriptions": ["nsw", "all"]},
            [nsw, {**nsw, "subscription": "all", "error": "refused"}],
        ),
        "snapshot": (
            SnapshotOperator, {"subscription": "all"},
            [{**nsw, "subscription": "all", "tables": [{"table": "public.items", "rows": 7, "bytes": 70}]}],
        ),
        "refresh": (
            RefreshOperator, {"subscription": "nsw", "is_dry_run": "True"}, [{**nsw, "snapshot": {}}]
        ),
        "backfill": (
            BackfillOperator, {"subscription": "nsw", "start": "0/1", "end": "0/2", "into_conn_id": "audit"},
            [nsw],
        ),
        "validate": (
            ValidateOperator, {"subscription": "nsw"},
            [{**nsw, "tables": [{"table": "public.orders", "success": False}]}],
        ),
    }
    operators = {name: kind(task_id=name, **given) for name, (kind, given, _) in tasks.items()}

manager, run = ExtractorManager(), SimpleNamespace(run_id="r")

def extract(task, state):
    found = manager.extract_metadata(run, task, state, SimpleNamespace(task=task))
    event = RunEvent(
        eventTime="2026-01-01T00:00:00Z", eventType=RunState.COMPLETE, job=Job("n", task.task_id),
        run=Run("01890000-0000-7000-8000-000000000000", found.run_facets), inputs=found.inputs,
        outputs=found.outputs,
    )
    import json
    return json.loads(Serde.to_json(event))

answer = {}
for name, task in operators.items():
    answer[name] = {"before": extract(task, TaskInstanceState.RUNNING)}
    task.results = tuple(tasks[name][2])
    state = TaskInstanceState.FAILED if name in ("far", "validate") else TaskInstanceState.SUCCESS
    answer[name]["after"] = extract(task, state)
"""


@pytest.fixture(scope="module")
def databases(publisher_cluster: Cluster, subscriber_cluster: Cluster) -> Any:  # noqa: ANN401 - a generator
    publisher = create_database(publisher_cluster, "shop")
    subscriber = create_database(subscriber_cluster, "dwh")
    for database in (publisher, subscriber):
        database.run("create table orders (id int primary key, note text); create table items (id int)")
    publisher.run("create publication nsw for table orders where (id > 0); create publication everything")
    publisher.run("alter publication everything add table orders, items")
    subscriber.run("alter table items rename to articles")
    with subscriber.connect() as connection:
        install(connection)
        bind_subscription(connection, "nsw", "1", ["nsw"], ANY_DATABASE)
        bind_subscription(connection, "all", "1", ["everything"], ANY_DATABASE)
        for name, table in (("nsw", "orders"), ("all", "orders"), ("all", "articles")):
            set_table_state(connection, name, QualifiedName("public", table), Ready(Lsn(16)))
        connection.execute(
            "update cdc_replay.subscription_table set table_name = 'items' where table_name = 'articles'"
        )
    yield publisher, subscriber
    for database in (publisher, subscriber):
        drop_database(database)


@pytest.fixture(scope="module")
def events(run_in_airflow: RunInAirflow, databases: tuple[Database, Database]) -> dict[str, Any]:
    publisher, subscriber = databases
    with_secret = {
        name: database.dsn.replace("postgres@", f"postgres:{SECRET}@")
        for name, database in (("SHOP_PUBLISHER", publisher), ("DWH", subscriber))
    }
    assert all(SECRET in dsn for dsn in with_secret.values())
    answer: dict[str, Any] = run_in_airflow(
        EXTRACT,
        config=CONFIGURATION,
        AIRFLOW_CONN_AUDIT=f"postgresql://app:{SECRET}@[::1]:5433/archive",
        **{f"AIRFLOW_CONN_{name}": dsn for name, dsn in with_secret.items()},
    )
    assert SECRET not in json.dumps(answer)
    return answer


def names(datasets: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(dataset["namespace"], dataset["name"]) for dataset in datasets]


def table(database: Database, name: str) -> tuple[str, str]:
    """A table as OpenLineage names it."""
    return f"postgres://127.0.0.1:{database.cluster.port}", f"{database.name}.public.{name}"


LOG = ("file", "/var/log/shop")


def test_capture_reads_published_tables_and_writes_the_log(
    events: dict[str, Any], databases: tuple[Database, Database]
) -> None:
    publisher, _ = databases
    before, after = events["capture"]["before"], events["capture"]["after"]
    assert (names(before["inputs"]), names(before["outputs"])) == ([], [LOG])
    assert names(after["inputs"]) == [table(publisher, "items"), table(publisher, "orders")]
    assert names(after["outputs"]) == [LOG]
    assert names(events["far"]["after"]["outputs"]) == [("s3://bucket", "logs/far")]


def test_replay_reads_log_and_tables_and_writes_the_subscribers_tables(
    events: dict[str, Any], databases: tuple[Database, Database]
) -> None:
    publisher, subscriber = databases
    before, after = events["replay"]["before"], events["replay"]["after"]
    assert (names(before["inputs"]), before["outputs"]) == ([LOG], [])
    assert names(after["inputs"]) == [LOG, table(publisher, "orders"), table(publisher, "items")]
    # `items` is called `articles` on the subscriber.
    assert set(names(after["outputs"])) == {table(subscriber, "orders"), table(subscriber, "articles")}
    assert [window["subscription"] for window in after["run"]["facets"]["cdcReplay"]["windows"]] == [
        "nsw",
        "all",
    ]

    assert names(events["half"]["after"]["outputs"]) == [table(subscriber, "orders")]

    report = events["report"]["after"]
    assert names(report["inputs"]) == [LOG, table(publisher, "orders")]
    assert names(report["outputs"]) == [table(subscriber, "orders")]
    assert report["run"]["facets"]["cdcReplay"]["windows"] == [
        {"subscription": "nsw", "fromLsn": "0/10", "toLsn": "0/20", "transactions": 3}
    ]


def test_snapshot_tells_the_copied_tables_with_their_rows(
    events: dict[str, Any], databases: tuple[Database, Database]
) -> None:
    publisher, subscriber = databases
    before, after = events["snapshot"]["before"], events["snapshot"]["after"]
    assert (before["inputs"], before["outputs"]) == ([], [])
    assert names(after["inputs"]) == [table(publisher, "items")]
    (output,) = after["outputs"]
    assert names([output]) == [table(subscriber, "articles")]
    statistics = output["outputFacets"]["outputStatistics"]
    assert (statistics["rowCount"], statistics["size"]) == (7, 70)


def test_dry_run_has_no_outputs_and_a_backfill_those_of_its_target(events: dict[str, Any]) -> None:
    assert events["refresh"]["after"]["outputs"] == []
    assert [output["namespace"] for output in events["backfill"]["after"]["outputs"]] == [
        "postgres://[::1]:5433"
    ]
    assert events["backfill"]["after"]["outputs"][0]["name"] == "archive.public.orders"


def test_failed_validation_tells_both_sides_and_the_verdict(
    events: dict[str, Any], databases: tuple[Database, Database]
) -> None:
    publisher, subscriber = databases
    after = events["validate"]["after"]
    assert names(after["inputs"]) == [table(publisher, "orders"), table(subscriber, "orders")]
    (assertion,) = after["inputs"][1]["inputFacets"]["dataQualityAssertions"]["assertions"]
    assert (assertion["assertion"], assertion["success"]) == ("subscriber_consistent", False)
    assert after["outputs"] == []
