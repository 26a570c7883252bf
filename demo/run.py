"""`make demo`: the whole pipeline on embedded servers, with every departure from New York as input.

    PostgreSQL (publisher, subscriber, Airflow's own)  →  Airflow: capture → snapshot → replay → validate

The DAGs do the work, through Airflow's own scheduler: this program starts the servers, lets the airports
live, watches, and prints what came of it. All files are below `.runtime/demo`; whatever happens, all that was
started is stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
import yaml
from rich.console import Console
from rich.table import Table

from cdc_replay.commands.setup import setup, subscriber_script
from cdc_replay.commands.status import status
from cdc_replay.config import Config, load_config
from cdc_replay.model.lsn import Lsn
from cdc_replay.private_files import set_private_umask
from embedded.airflow import USER, Airflow, Client, Run, Settings, wait_for
from embedded.java import spark_environment
from embedded.postgres import Cluster
from traffic import Period, Played, load_history, play

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / ".runtime" / "demo"
PUBLISHER: Final = "airports"
CAPTURE: Final = "capture"
APPLY: Final = "apply"
"""The roles of publisher and subscribers: they may log in, and what `setup --dry-run` gives them."""
SUBSCRIPTIONS: Final[dict[str, list[str]]] = {
    "jfk_board": ["jfk_open"],
    "operations": ["late_flights", "one_airline"],
    "analytics": ["analytics_flights", "analytics_weather"],
}
MOST_DAYS: Final = 300
SECONDS_PER_DAY: Final = 25
CAPTURE_EVERY_SECONDS: Final = 10

_TOTALS: Final = """
    select coalesce(sum((result ->> 'changes_read')::bigint), 0),
        coalesce(sum((result ->> 'filtered_out')::bigint), 0),
        coalesce(sum((result ->> 'updates_to_insert')::bigint), 0),
        coalesce(sum((result ->> 'updates_to_delete')::bigint), 0),
        coalesce(sum((result -> 'applied' ->> 'insert')::bigint), 0),
        coalesce(sum((result -> 'applied' ->> 'update')::bigint), 0),
        coalesce(sum((result -> 'applied' ->> 'delete')::bigint), 0),
        coalesce(sum((result -> 'applied' ->> 'truncate')::bigint), 0),
        count(*)
    from cdc_replay.result where command = 'replay' and result ->> 'error' is null
"""

REPORTED: Final = (
    "changes read", "filtered out", "UPDATE to INSERT", "UPDATE to DELETE", "rows inserted", "rows updated",
    "rows deleted", "tables truncated", "windows", "lag", "verdict", "as of",
)  # fmt: skip
"""What the report shows per subscription: the totals, then lag and verdict."""

console = Console(highlight=False)


@dataclass(slots=True)
class Stages:
    """Says what is going on, and how long each stage took."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a stage and measure it."""
        console.print(f"[bold]{name}[/bold] …")
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began
        console.print(f"  done in {self.seconds[name]:.1f} s")


@dataclass(frozen=True, slots=True)
class Demo:
    """Everything that runs."""

    publisher: Cluster
    subscriber: Cluster
    airflow: Airflow
    config: Config
    stages: Stages

    @property
    def client(self) -> Client:
        """Airflow's API, freshly logged in."""
        return self.airflow.client()


@contextlib.contextmanager
def started(stages: Stages, period: Period) -> Iterator[Demo]:
    """All servers, with the publisher's history loaded."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Where root may not make namespaces, the servers run as another user, who has to come through.
    FOLDER.chmod(0o711)
    set_private_umask()
    with contextlib.ExitStack() as stack:
        with stages.stage("PostgreSQL: publisher, subscriber and Airflow's metadata"):
            publisher, subscriber, metadata = (
                stack.enter_context(Cluster(FOLDER, name)) for name in ("publisher", "subscriber", "metadata")
            )
            create_databases(publisher, subscriber, metadata)
        with stages.stage(f"history before {period.start} into the publisher"):
            with psycopg.connect(publisher.dsn("airports"), autocommit=True) as connection:
                count = load_history(connection, period)
            console.print(f"  {count} departures of the week before, all airlines, airports and planes")
        environment = environment_of(publisher, subscriber)
        os.environ.update(environment)
        with stages.stage("roles that own nothing: what `setup --dry-run` prints, run by an administrator"):
            give_privileges(publisher, subscriber)
        with stages.stage("Airflow: api-server, scheduler, dag-processor"):
            settings = Settings(
                dags=ROOT / "dags",
                plugins=ROOT / "plugins",
                environment=environment,
                database=metadata.dsn("airflow").replace("postgresql:", "postgresql+psycopg:"),
            )
            airflow = stack.enter_context(Airflow(FOLDER / "airflow", settings))
            console.print(f"  {airflow.url}  user {USER}, password {airflow.password}")
        yield Demo(publisher, subscriber, airflow, load_config(), stages)


def create_databases(publisher: Cluster, subscriber: Cluster, metadata: Cluster) -> None:
    """The databases with their tables and publications."""
    with psycopg.connect(metadata.dsn(), autocommit=True) as connection:
        connection.execute("create database airflow")
    for cluster, role in ((publisher, CAPTURE), (subscriber, APPLY)):
        with psycopg.connect(cluster.dsn(), autocommit=True) as connection:
            connection.execute(f"create role owner; create role {role} login".encode())
    create_database(publisher, "airports", "schema.sql", "publications.sql")
    for name in SUBSCRIPTIONS:
        create_database(subscriber, name, "subscriber.sql")


def create_database(cluster: Cluster, name: str, *scripts: str) -> None:
    """A database whose tables do not belong to a superuser."""
    with psycopg.connect(cluster.dsn(), autocommit=True) as connection:
        connection.execute(f"create database {name} owner owner".encode())
    with psycopg.connect(cluster.dsn(name), autocommit=True) as connection:
        connection.execute("set role owner")
        for script in scripts:
            connection.execute((ROOT / "demo" / script).read_bytes())


def give_privileges(publisher: Cluster, subscriber: Cluster) -> None:
    """What an administrator does once: run what `setup --dry-run` prints, for each side."""
    config = load_config()
    done = {publisher.dsn(PUBLISHER): setup(config, PUBLISHER, dry_run=True)}
    done |= {subscriber.dsn(name): subscriber_script(config, PUBLISHER, name) for name in SUBSCRIPTIONS}
    for dsn, result in done.items():
        with psycopg.connect(dsn, autocommit=True) as connection:
            for statement in result.statements:
                connection.execute(statement.encode())


def environment_of(publisher: Cluster, subscriber: Cluster) -> dict[str, str]:
    """Write the configuration; the environment in which Airflow and its tasks find it and the servers."""
    file = FOLDER / "cdc_replay.yaml"
    content = {
        "publishers": {PUBLISHER: {"conn_id": "airports", "change_log": "./change_log"}},
        "subscriptions": {
            name: {"publisher": PUBLISHER, "publications": publications, "conn_id": name}
            for name, publications in SUBSCRIPTIONS.items()
        },
    }
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    connections = {"AIRFLOW_CONN_AIRPORTS": publisher.dsn("airports", CAPTURE)}
    connections |= {f"AIRFLOW_CONN_{name.upper()}": subscriber.dsn(name, APPLY) for name in SUBSCRIPTIONS}
    return {
        **spark_environment(),
        **{name: dsn.replace("postgresql:", "postgres:") for name, dsn in connections.items()},
        "AIRFLOW_CONN_SPARK_DEFAULT": '{"conn_type": "spark", "host": "local[2]",'
        ' "extra": {"spark-binary": "spark-submit", "deploy-mode": "client"}}',
        "CDC_REPLAY_CONFIG": str(file),
        "CDC_REPLAY_EXPECTATIONS": str(FOLDER / "expectations"),
        "CDC_REPLAY_CAPTURE_SCHEDULE": str(CAPTURE_EVERY_SECONDS),
        "GX_ANALYTICS_ENABLED": "false",
    }


def run_pipeline(demo: Demo, period: Period) -> Played:
    """Setup and snapshots, then live traffic under the scheduled DAGs until all is applied and proved."""
    client = demo.client
    validations = [f"validate__{name}" for name in SUBSCRIPTIONS]
    with demo.stages.stage("DAG capture: publications, slot and change log"):
        capture = f"capture__{PUBLISHER}"
        wait_for(lambda: {capture, *validations} <= client.dag_ids(), "the DAGs to be parsed", 120)
        client.unpause(capture)
        wait_for(lambda: succeeded(client, capture), "the first capture", 120)
    with demo.stages.stage("DAGs snapshot: three initial copies, each through its filters"):
        snapshots = [f"snapshot__{name}" for name in SUBSCRIPTIONS]
        client.unpause(*snapshots)
        finished(client, [client.trigger(dag_id) for dag_id in snapshots])
    client.unpause(f"replay__{PUBLISHER}")
    with demo.stages.stage(f"live traffic, {period.start} to {period.end}; DAGs capture and replay at work"):
        played = live_traffic(demo, period)
    with demo.stages.stage("the last window"):
        client.unpause(*validations)
        end = last_position(demo)
        wait_for(lambda: all_applied(demo, end), f"all subscriptions to reach {end}", 600)
    with demo.stages.stage("DAGs validate: Great Expectations at a fence LSN"):
        wait_for(lambda: all_validated(demo, end, client), "the validations", 240)
    return played


def succeeded(client: Client, dag_id: str) -> bool:
    """Whether a run of the DAG has succeeded.

    Raises:
        RuntimeError: with the log, if one has failed.
    """
    runs = client.runs(dag_id)
    for run in runs:
        if run.state == "failed":
            raise RuntimeError(failure(client, run))
    return any(run.state == "success" for run in runs)


def finished(client: Client, runs: list[Run]) -> None:
    """Wait until all runs have succeeded.

    Raises:
        RuntimeError: with the log, if one has failed.
    """
    for run in runs:
        if client.wait_for_run(run).state != "success":
            raise RuntimeError(failure(client, run))


def failure(client: Client, run: Run) -> str:
    """What the failed tasks of a run said at the end."""
    failed = [task for task, state in client.task_states(run).items() if state == "failed"]
    tails = "\n".join(client.log(run, task)[-3000:] for task in failed)
    return f"{run.dag_id} failed in {', '.join(failed)}:\n{tails}"


def live_traffic(demo: Demo, period: Period) -> Played:
    """Let the days happen while the DAGs run; shows the demo's clock and the subscribers' lag."""
    shown = Played()
    failures: list[BaseException] = []

    def happen() -> None:
        try:
            with psycopg.connect(demo.publisher.dsn("airports"), autocommit=True) as connection:
                play(connection, period, seconds=SECONDS_PER_DAY * period.days, progress=keep)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            failures.append(error)

    def keep(played: Played) -> None:
        shown.transactions, shown.statements, shown.minute = (
            played.transactions, played.statements, played.minute,
        )  # fmt: skip

    thread = threading.Thread(target=happen, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=5)
        behind = max(lags(demo).values())
        console.print(
            f"  {shown.now:%b %d %H:%M}  {shown.statements:6d} events; behind: {behind / 1e6:.1f} MB of WAL"
        )
    if failures:
        raise failures[0]
    return shown


def lags(demo: Demo) -> Mapping[str, int]:
    """Bytes of WAL that each subscriber is behind the publisher."""
    return {each.subscription: each.lag_bytes or 0 for each in status(demo.config).subscriptions}


def last_position(demo: Demo) -> Lsn:
    """The publisher's position after a last change, which makes the last window."""
    with psycopg.connect(demo.publisher.dsn("airports"), autocommit=True) as connection:
        connection.execute("update planes set landings = landings + 1 where tailnum = 'N10156'")
        row = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
    return Lsn.parse(row[0] if row else "")


def all_applied(demo: Demo, end: Lsn) -> bool:
    """Whether every subscriber holds everything up to `end`."""
    reached = [each.applied_lsn for each in status(demo.config).subscriptions]
    return all(applied is not None and applied >= end for applied in reached)


def validations_of(demo: Demo) -> dict[str, dict[str, Any]]:
    """The last validation of each subscription that has one."""
    found = {}
    for name in SUBSCRIPTIONS:
        with psycopg.connect(demo.subscriber.dsn(name)) as connection:
            row = connection.execute(
                "select result from cdc_replay.result where command = 'validate' order by number desc limit 1"
            ).fetchone()
        if row is not None:
            found[name] = row[0]
    return found


def all_validated(demo: Demo, end: Lsn, client: Client) -> bool:
    """Whether every subscription was validated at `end` or later."""
    done = validations_of(demo)
    if len(done) < len(SUBSCRIPTIONS):
        for name in SUBSCRIPTIONS:
            if name not in done:
                succeeded(client, f"validate__{name}")
        return False
    return all(Lsn.parse(each["to_lsn"]) >= end for each in done.values())


def report(demo: Demo) -> bool:
    """Print what came of it; whether every subscription is consistent."""
    validations = validations_of(demo)
    behind = lags(demo)
    columns = []
    for name in SUBSCRIPTIONS:
        with psycopg.connect(demo.subscriber.dsn(name)) as connection:
            counts = [str(count) for count in connection.execute(_TOTALS).fetchone() or ()]
        verdict = "[green]consistent[/]" if validations[name]["success"] else "[red]NOT consistent[/]"
        columns.append([*counts, f"{behind[name]} bytes", verdict, validations[name]["to_lsn"]])
    table = Table("", *SUBSCRIPTIONS, box=None)
    for label, values in zip(REPORTED, zip(*columns, strict=True), strict=True):
        table.add_row(label, *values)
    console.print(table)
    for name, validation in validations.items():
        console.print(f"report of {name}: {validation['report']}", soft_wrap=True)
    console.print(f"Great Expectations Data Docs: {validations['analytics']['data_docs']}", soft_wrap=True)
    return all(validation["success"] for validation in validations.values())


def main() -> int:
    """Run the demo; 0 if every subscription is consistent."""
    parser = argparse.ArgumentParser(description="Run the whole pipeline on embedded servers.")
    parser.add_argument("--days", type=int, default=3, help="live days (1 to 300)")
    parser.add_argument("--keep", action="store_true", help="leave Airflow up until Ctrl-C")
    arguments = parser.parse_args()
    if not 1 <= arguments.days <= MOST_DAYS:
        parser.error(f"--days must be from 1 to {MOST_DAYS}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Where a shell has started this in the background, SIGINT would be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    period = Period.of_days(arguments.days)
    stages = Stages()
    began = time.monotonic()
    try:
        with started(stages, period) as demo:
            run_pipeline(demo, period)
            consistent = report(demo)
            console.print(f"{time.monotonic() - began:.0f} s in all; files in {FOLDER}")
            if arguments.keep:
                console.print(f"Airflow: {demo.airflow.url}  user {USER}, password {demo.airflow.password}")
                console.print("Press Ctrl-C to stop everything.")
                signal.pause()
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    return 0 if consistent else 1


if __name__ == "__main__":
    sys.exit(main())
