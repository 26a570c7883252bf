"""Airflow with a warm Spark and events: commits arrive without a clock, and without a JVM for each task."""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from embedded.airflow import PARTS, Airflow, Client, Settings, wait_for
from embedded.java import spark_environment
from embedded.postgres import Cluster
from embedded.spark_server import SparkServer
from fixtures.postgres import Database, create_database, drop_database

pytestmark = [pytest.mark.airflow, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
ORDERS = "create table orders (id int primary key, region text not null)"
CONFIG = """
publishers:
  shop: {conn_id: shop_publisher, change_log: ./change_log}
subscriptions:
  nsw: {publisher: shop, publications: [nsw], conn_id: nsw_target}
  all: {publisher: shop, publications: [whole], conn_id: all_target, group: second}
  live: {publisher: shop, publications: [whole], conn_id: live_target, group: live}
groups:
  shop: {spark_conn_id: warm, spark_conf: {spark.sql.shuffle.partitions: 2, spark.executor.memory: 1g}}
  second: {spark_conn_id: warm}
  live: {spark_conn_id: warm, follow: 30s}
"""


DAGS = ("capture__shop", "replay__shop", "replay__second")


@dataclass(frozen=True)
class Warm:
    airflow: Airflow
    client: Client
    spark: SparkServer
    publisher: Database
    nsw: Database
    everything: Database
    live: Database

    def wait_for(self, *ids: int) -> None:
        """Wait until the rows have arrived, those of nsw in both databases."""

        def have_arrived() -> bool:
            arrived = {row[0] for row in self.everything.rows("select id from orders")}
            filtered = {row[0] for row in self.nsw.rows("select id from orders")}
            here = {row[0] for row in self.publisher.rows("select id from orders where region = 'nsw'")}
            return set(ids) <= arrived and set(ids) & here <= filtered

        wait_for(have_arrived, f"orders {ids}")

    def run_count(self) -> int:
        return sum(len(self.client.runs(dag_id)) for dag_id in DAGS)


@pytest.fixture(scope="module")
def warm(
    publisher_cluster: Cluster,
    subscriber_cluster: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Warm]:
    home = tmp_path_factory.mktemp("warm")
    publisher = create_database(publisher_cluster, "shop")
    metadata, nsw, everything, live = (
        create_database(subscriber_cluster, name) for name in ("airflow", "nsw", "everything", "live")
    )
    for database in (publisher, nsw, everything, live):
        database.run(ORDERS)
    publisher.run(
        "create table unpublished (id int); alter table orders replica identity full;"
        " create publication nsw for table orders where (region = 'nsw');"
        " create publication whole for table orders; insert into orders values (1, 'nsw'), (2, 'vic')"
    )
    (home / "cdc_replay.yaml").write_text(CONFIG, encoding="utf-8")
    shutil.copytree(ROOT / "dags", home / "dags")
    with SparkServer(home / "spark", token="s3cret-token") as spark:
        targets = {
            "shop_publisher": publisher,
            "nsw_target": nsw,
            "all_target": everything,
            "live_target": live,
        }
        settings = Settings(
            dags=home / "dags",
            plugins=ROOT / "plugins",
            parts=tuple(PARTS),
            database=metadata.dsn.replace("postgresql://", "postgresql+psycopg://"),
            environment={
                **spark_environment(),
                "CDC_REPLAY_CONFIG": str(home / "cdc_replay.yaml"),
                "CDC_REPLAY_CAPTURE_EVENTS": "1-30",
                "CDC_REPLAY_CAPTURE_SCHEDULE": "none",
                "CDC_REPLAY_WATCH_SCHEDULE": "none",
                "AIRFLOW_CONN_WARM": json.dumps(spark.connection),
                **{f"AIRFLOW_CONN_{name.upper()}": database.dsn for name, database in targets.items()},
            },
        )
        airflow = Airflow(home / "airflow", settings)
        with airflow, airflow.client() as client:
            warm = Warm(airflow, client, spark, publisher, nsw, everything, live)
            _fill(warm)
            yield warm
    for database in (publisher, metadata, nsw, everything, live):
        drop_database(database)


def _fill(warm: Warm) -> None:
    client = warm.client
    per_subscription = ("backfill", "refresh", "resume", "snapshot", "validate")
    expected = 1 + 1 + 3 + len(per_subscription) * 3
    wait_for(lambda: len(client.dag_ids()) == expected, f"the {expected} DAGs")
    assert client.import_errors() == ()
    # The publisher has no slot yet: the watch starts the capture that makes it.
    client.unpause("capture__shop", "snapshot__nsw", "snapshot__all", "snapshot__live")
    wait_for(lambda: client.runs("capture__shop"), "the first capture")
    for run in client.runs("capture__shop"):
        assert client.wait_for_run(run).state == "success"
    for run in [client.trigger(f"snapshot__{name}") for name in ("nsw", "all", "live")]:
        finished = client.wait_for_run(run)
        assert finished.state == "success", client.log(finished, "snapshot")
    client.unpause("replay__shop", "replay__second")


def test_a_commit_arrives_by_itself_and_no_task_starts_a_jvm(warm: Warm) -> None:
    warm.publisher.run("insert into orders values (10, 'nsw'), (11, 'vic')")
    warm.wait_for(10, 11)
    [replay, *_] = warm.client.runs("replay__shop")
    log = warm.client.log(warm.client.wait_for_run(replay), "replay")
    assert 'on the Spark Connect server of connection "warm"' in log
    assert "spark.executor.memory" in log  # is the server's, and the log says so
    assert "s3cret-token" not in log


def test_an_idle_publisher_starts_nothing(warm: Warm) -> None:
    def is_quiet() -> bool:
        states = [run.state for dag_id in DAGS for run in warm.client.runs(dag_id)]
        return set(states) <= {"success", "failed"}

    wait_for(is_quiet, "all runs to end")
    before = warm.run_count()
    warm.publisher.run("insert into unpublished select generate_series(1, 1000)")
    time.sleep(10)
    assert warm.run_count() == before


def test_a_group_that_follows_applies_commits_without_a_run_for_each(warm: Warm) -> None:
    client = warm.client

    def has(database: Database, *ids: int) -> bool:
        return set(ids) <= {row[0] for row in database.rows("select id from orders")}

    client.unpause("replay__live")
    try:
        warm.publisher.run("insert into orders values (50, 'nsw')")
        wait_for(lambda: has(warm.live, 50), "the first row")
        captures, runs = len(client.runs("capture__shop")), client.runs("replay__live")
        for row in range(51, 61):
            warm.publisher.run(f"insert into orders values ({row}, 'vic')")
            wait_for(functools.partial(has, warm.live, row), f"row {row}")
        # Without following, each of these ten rows takes a capture and a replay.
        assert len(client.runs("replay__live")) < len(runs) + 5
        assert len(client.runs("capture__shop")) < captures + 5
        logs = [client.log(client.wait_for_run(run), "replay") for run in runs]
        assert any("publisher shop: followed, " in log for log in logs)
        # The log is announced: the other groups are started, and this one again, which finds nothing.
        warm.wait_for(*range(50, 61))
        wait_for(lambda: len(client.runs("replay__live")) > len(runs), "the next run")
        for run in client.runs("replay__live"):
            assert client.wait_for_run(run).state == "success"
        runs = client.runs("replay__live")
        time.sleep(5)
        assert client.runs("replay__live") == runs
    finally:
        client.pause("replay__live")


def test_a_triggerer_that_was_killed_watches_again(warm: Warm) -> None:
    warm.airflow.kill_part("triggerer")
    warm.publisher.run("insert into orders values (20, 'nsw')")
    warm.airflow.start_part("triggerer")
    warm.wait_for(20)


def test_a_publisher_that_was_restarted_is_watched_again(warm: Warm) -> None:
    warm.publisher.cluster.stop()
    warm.publisher.cluster.start()
    warm.publisher.run("insert into orders values (30, 'nsw')")
    warm.wait_for(30)


def test_a_spark_server_that_is_gone_is_waited_for(warm: Warm) -> None:
    client = warm.client
    known = {run.run_id for run in client.runs("replay__shop")}
    warm.spark.kill()
    warm.publisher.run("insert into orders values (40, 'nsw')")

    def states() -> set[str | None]:
        runs = [run for run in client.runs("replay__shop") if run.run_id not in known]
        return {state for run in runs for state in client.task_states(run).values()}

    wait_for(lambda: "up_for_retry" in states(), "the second try")
    warm.spark.start()
    warm.wait_for(40)
    run = next(run for run in client.runs("replay__shop") if run.run_id not in known)
    assert "the Spark Connect server is unavailable" in client.log(client.wait_for_run(run), "replay", 1)
