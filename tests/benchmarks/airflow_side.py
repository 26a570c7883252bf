"""A side of `freshness` in Airflow: captures on commits, replays by a warm Spark or by `spark-submit`.

All sides of ours read one slot, one after another: a publisher has one set of capture publications.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from benchmarks.programs import ROOT, Session
from benchmarks.stand import Stand
from embedded.airflow import PARTS, Airflow, Client, Settings, wait_for
from embedded.java import spark_environment
from embedded.spark_server import SparkServer

WARM: Final = "airflow_warm"
SUBMIT: Final = "airflow_submit"
SIDES: Final = (WARM, SUBMIT)
EVENTS: Final = "1-60"
FOLLOW: Final = "1min"
START_SECONDS: Final = 120


@dataclass(frozen=True)
class AirflowSides:
    """A running Airflow with the DAGs of both sides, paused, and the Spark Connect server of one of them."""

    at: Stand
    publisher: str
    client: Client
    spark: SparkServer

    @contextlib.contextmanager
    def running(self, side: str) -> Iterator[None]:
        """Its replays and the captures run; the other side's Spark does not."""
        if side == SUBMIT:
            self.spark.stop()
        dag_ids = (f"replay__{side}", f"capture__{self.publisher}", f"watch__{self.publisher}")
        self.client.unpause(*dag_ids)
        try:
            yield
        finally:
            for dag_id in dag_ids:
                self.client.pause(dag_id)


@contextlib.contextmanager
def start(at: Stand, publisher: str) -> Iterator[AirflowSides]:
    """Airflow for the sides, whose tables are copied; `publisher` of the stand's configuration is set up."""
    file = _file(at)
    file.write_text(yaml.safe_dump(_configuration(at, publisher)), encoding="utf-8")
    with Session(at.folder, at.servers) as session:
        for side in SIDES:
            session.run(f"snapshot {at.names(side)[0]} --config {file}")
    with at.subscriber_connection("postgres") as connection:
        connection.execute("create database airflow")
    with SparkServer(at.folder / "spark", token="bench") as spark:
        airflow = Airflow(at.folder / "airflow", _settings(at, file, spark))
        with airflow, airflow.client() as client:
            wanted = {*(f"replay__{side}" for side in SIDES), f"capture__{publisher}", f"watch__{publisher}"}
            wait_for(lambda: wanted <= client.dag_ids(), "the DAGs", START_SECONDS)
            yield AirflowSides(at, publisher, client, spark)


def sync_all(at: Stand) -> None:
    """Bring all sides up to date, as they were measured one after another."""
    with Session(at.folder, at.servers) as session:
        for side in SIDES:
            session.run(f"sync {at.names(side)[0]} --config {_file(at)}")


def _file(at: Stand) -> Path:
    return at.folder / "airflow.yaml"


def _settings(at: Stand, file: Path, spark: SparkServer) -> Settings:
    submit = {
        "conn_type": "spark",
        "host": "local[2]",
        "extra": {"spark-binary": "spark-submit", "deploy-mode": "client"},
    }
    return Settings(
        dags=ROOT / "dags",
        plugins=ROOT / "plugins",
        parts=tuple(PARTS),
        database=at.subscriber.dsn("airflow").replace("postgresql:", "postgresql+psycopg:"),
        environment={
            **spark_environment(),
            "CDC_REPLAY_CONFIG": str(file),
            "CDC_REPLAY_CAPTURE_EVENTS": EVENTS,
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.3",
            "AIRFLOW_CONN_WARM": json.dumps(spark.connection),
            "AIRFLOW_CONN_SUBMIT": json.dumps(submit),
        },
    )


def _configuration(at: Stand, publisher: str, sides: Sequence[str] = SIDES) -> dict[str, object]:
    content: dict[str, object] = yaml.safe_load(at.file.read_text(encoding="utf-8"))
    publishers = content["publishers"]
    assert isinstance(publishers, dict)
    return {
        "publishers": {publisher: publishers[publisher]},
        "subscriptions": {
            name: {
                "publisher": publisher,
                "publications": list(publications),
                "dsn": at.subscriber.dsn(name),
                "group": side,
            }
            for side in sides
            for name, publications in zip(at.names(side), at.subscriptions, strict=True)
        },
        "groups": {
            WARM: {"spark_conn_id": "warm", "follow": FOLLOW},
            SUBMIT: {"spark_conn_id": "submit", "follow": FOLLOW},
        },
    }
