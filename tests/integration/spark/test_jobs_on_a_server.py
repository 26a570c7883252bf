"""The jobs on a running Spark Connect server: what a task with such a connection does, without Airflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.setup import setup
from cdc_replay.config import load_config
from embedded.spark_server import SparkServer
from fixtures.postgres import Database

pytestmark = pytest.mark.spark

TOKEN = "let-me-in"
TABLES = """
create table t (id int primary key, a int not null, big text);
alter table t alter big set storage external;
create table u (id int primary key, b int);
"""
PROGRAM = """
import json, sys, threading
from cdc_replay.errors import CdcReplayError
from cdc_replay.jobs.application import parse_arguments
from cdc_replay.spark.connect import connected_to
from cdc_replay.spark.session import SESSION_DEFAULTS
import importlib
url, name, *arguments = sys.argv[1:]
job = importlib.import_module(f"cdc_replay.jobs.{name}")
parser = job.build_parser()
try:
    with connected_to(url, name, SESSION_DEFAULTS):
        results = [result.to_dict() for result in job.command(parse_arguments(parser, arguments))]
    answer = {"results": results}
except CdcReplayError as error:
    answer = {"error": type(error).__name__, "text": str(error), "retry": error.retry.name}
from pyspark import SparkContext
answer["jvm"] = SparkContext._gateway is not None
print(json.dumps(answer))
"""

WAITING = """
import sys, time
from cdc_replay.spark import connect
from cdc_replay.spark.session import SESSION_DEFAULTS, spark_session
connect.SIGN_OF_LIFE_SECONDS = 0.5
with connect.connected_to(sys.argv[1], "waiting", SESSION_DEFAULTS):
    session = spark_session("waiting")
    time.sleep(8)
    print(session.range(10).count())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkServer]:
    with SparkServer(tmp_path_factory.mktemp("spark"), token=TOKEN) as server:
        yield server


@pytest.fixture
def config(publisher: Database, subscriber: Database, native: Database, tmp_path: Path) -> Path:
    """`s` gets rows of t with a > 10 and all of u; `both` gets t and u, in another database."""
    publisher.run(
        TABLES
        + """
        create unique index t_identity on t (id, a);
        alter table t replica identity using index t_identity;
        insert into t select i, i, 'x' from generate_series(1, 40) i;
        insert into u select i, i from generate_series(1, 40) i;
        create publication filtered for table t where (a > 10), u;
        create publication whole for table t, u;
        """
    )
    for database in (subscriber, native):
        database.run(TABLES)
    file = tmp_path / "cdc_replay.yaml"
    file.write_text(
        textwrap.dedent(
            f"""
            publishers:
              pub: {{dsn: "{publisher.dsn}", slot: "replay_{publisher.name}", change_log: "{tmp_path}/log"}}
            subscriptions:
              s: {{publisher: pub, publications: [filtered], dsn: "{subscriber.dsn}"}}
              both: {{publisher: pub, publications: [whole], dsn: "{native.dsn}"}}
            """
        ),
        encoding="utf-8",
    )
    setup(load_config(file), "pub")
    return file


def run(server: SparkServer, config: Path, job: str, *arguments: str, url: str = "") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url or server.url, job, f"--config={config}", *arguments],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer.pop("jvm") is False
    return answer


def rows(database: Database, condition: str = "true") -> list[tuple[Any, ...]]:
    return database.rows(f"select id, a, length(big) from t where {condition} order by id")


def test_two_groups_share_a_server_for_everything_that_they_do(
    server: SparkServer, config: Path, publisher: Database, subscriber: Database, native: Database
) -> None:
    with ThreadPoolExecutor(2) as threads:
        for answer in threads.map(lambda name: run(server, config, "snapshot", name), ["s", "both"]):
            assert answer["results"][0]["tables"], answer
    assert rows(subscriber) == rows(publisher, "a > 10")
    assert rows(native) == rows(publisher)

    # Row 1 enters the filter without its big value, which only the publisher's row has by now.
    publisher.run("update t set big = repeat('y', 9000) where id = 1")
    publisher.run("update t set a = 99 where id = 1")
    publisher.run("delete from u where id < 10; update t set a = 1 where id = 40")
    capture(load_config(config), "pub")
    with ThreadPoolExecutor(2) as threads:
        for answer in threads.map(lambda name: run(server, config, "replay", name), ["s", "both"]):
            assert answer["results"][0]["error"] is None, answer
    assert rows(subscriber) == rows(publisher, "a > 10")
    assert rows(native) == rows(publisher)
    assert subscriber.rows("select count(*) from u") == [(31,)]

    subscriber.run("delete from u where id > 20; update t set a = 77 where id = 20")
    refreshed = run(server, config, "refresh", "s", "--reconcile")
    assert "error" not in refreshed, refreshed
    assert rows(subscriber) == rows(publisher, "a > 10")
    assert subscriber.rows("select count(*) from u") == [(31,)]

    native.run("delete from t where id = 1")
    start, end = (answer["results"][0][key] for key in ("from_lsn", "to_lsn"))
    backfilled = run(server, config, "backfill", "both", f"--from={start}", f"--to={end}")
    assert "error" not in backfilled, backfilled
    assert rows(native) == rows(publisher)


def test_a_wrong_token_is_refused_for_good(server: SparkServer, config: Path) -> None:
    answer = run(server, config, "replay", "s", url=server.url.replace(TOKEN, "wrong"))
    assert (answer["error"], answer["retry"]) == ("SparkServerRefused", "NEVER")
    assert "wrong" not in answer["text"]


def test_a_server_that_is_gone_is_a_transient_error_with_a_remedy(server: SparkServer, config: Path) -> None:
    server.kill()
    try:
        answer = run(server, config, "replay", "s")
    finally:
        server.start()
    assert (answer["error"], answer["retry"]) == ("SparkServerUnavailable", "LATER")
    assert f"localhost:{server.port}" in answer["text"]
    assert TOKEN not in answer["text"]
    assert run(server, config, "snapshot", "s")["results"]


def test_a_session_is_kept_while_its_command_waits_for_a_database(tmp_path: Path) -> None:
    manager = "spark.connect.session.manager"
    settings = {f"{manager}.defaultSessionTimeout": "2s", f"{manager}.maintenanceInterval": "1s"}
    with SparkServer(tmp_path, master="local[1]", settings=settings) as server:
        done = subprocess.run(
            [sys.executable, "-c", WAITING, server.url],
            env=os.environ, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
    assert done.stdout == "10\n", done.stderr
