"""`make demo`: the whole pipeline on embedded servers, with every departure from New York as input.

    PostgreSQL (publisher, subscriber, Airflow's own)  →  Airflow: capture → snapshot → replay → validate

The DAGs do the work, through Airflow's own scheduler: this program starts the servers, plays the traffic and
prints the results. All files are below `.runtime/demo`. The servers are stopped at the end, also after an
error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
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
from embedded.airflow import PARTS, USER, Airflow, Client, Run, Settings, wait_for
from embedded.java import spark_environment
from embedded.postgres import Cluster
from embedded.spark_server import SparkServer
from traffic import DateRange, TrafficStats, load_history, play

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / ".runtime" / "demo"
PUBLISHER: Final = "airports"
CAPTURE: Final = "capture"
APPLY: Final = "apply"
"""The roles of publisher and subscribers: LOGIN, and the grants that `setup --dry-run` prints."""
SUBSCRIPTIONS: Final[dict[str, list[str]]] = {
    "jfk_board": ["jfk_open"],
    "operations": ["late_flights", "one_airline"],
    "analytics": ["analytics_flights", "analytics_weather"],
}
MOST_DAYS: Final = 300
SECONDS_PER_DAY: Final = 25
EVENT_SECONDS: Final = "5-60"
"""A capture follows a commit, but not sooner than five seconds after another."""
SPARK: Final = "spark_connect_default"

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
class StageTimer:
    """Prints each stage, and how long it took."""

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
    """The running servers."""

    publisher: Cluster
    subscriber: Cluster
    airflow: Airflow
    config: Config
    timer: StageTimer

    @property
    def client(self) -> Client:
        """Airflow's API, freshly logged in."""
        return self.airflow.client()


@contextlib.contextmanager
def start_demo(timer: StageTimer, period: DateRange) -> Iterator[Demo]:
    """All servers, with the publisher's history loaded."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Where root may not create namespaces, the servers run as another user, who must be able to enter.
    FOLDER.chmod(0o711)
    set_private_umask()
    with contextlib.ExitStack() as stack:
        with timer.stage("PostgreSQL: publisher, subscriber and Airflow's metadata"):
            publisher, subscriber, metadata = (
                stack.enter_context(Cluster(FOLDER, name)) for name in ("publisher", "subscriber", "metadata")
            )
            create_databases(publisher, subscriber, metadata)
        with timer.stage(f"history before {period.start} into the publisher"):
            with psycopg.connect(publisher.dsn("airports"), autocommit=True) as connection:
                count = load_history(connection, period)
            console.print(f"  {count} departures of the week before, all airlines, airports and planes")
        with timer.stage("Spark Connect: a server for all tasks"):
            spark = stack.enter_context(SparkServer(FOLDER / "spark", token=secrets.token_urlsafe(16)))
        environment = write_configuration(publisher, subscriber, spark)
        os.environ.update(environment)
        with timer.stage("grants of `setup --dry-run`, for roles that own nothing"):
            run_grant_scripts(publisher, subscriber)
        with timer.stage("Airflow: api-server, scheduler, dag-processor, triggerer"):
            settings = Settings(
                dags=ROOT / "dags",
                plugins=ROOT / "plugins",
                environment=environment,
                parts=tuple(PARTS),
                database=metadata.dsn("airflow").replace("postgresql:", "postgresql+psycopg:"),
            )
            airflow = stack.enter_context(Airflow(FOLDER / "airflow", settings))
            console.print(f"  {airflow.url}  user {USER}, password {airflow.password}")
        yield Demo(publisher, subscriber, airflow, load_config(), timer)


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


def run_grant_scripts(publisher: Cluster, subscriber: Cluster) -> None:
    """Run as an administrator what `setup --dry-run` prints for each side."""
    config = load_config()
    scripts = {publisher.dsn(PUBLISHER): setup(config, PUBLISHER, dry_run=True)}
    scripts |= {subscriber.dsn(name): subscriber_script(config, PUBLISHER, name) for name in SUBSCRIPTIONS}
    for dsn, result in scripts.items():
        with psycopg.connect(dsn, autocommit=True) as connection:
            for statement in result.statements:
                connection.execute(statement.encode())


def write_configuration(publisher: Cluster, subscriber: Cluster, spark: SparkServer) -> dict[str, str]:
    """Write the configuration; returns the environment of Airflow, with the file and the connections."""
    file = FOLDER / "cdc_replay.yaml"
    content = {
        "publishers": {PUBLISHER: {"conn_id": "airports", "change_log": "./change_log"}},
        "subscriptions": {
            name: {"publisher": PUBLISHER, "publications": publications, "conn_id": name}
            for name, publications in SUBSCRIPTIONS.items()
        },
        "groups": {PUBLISHER: {"spark_conn_id": SPARK}},
    }
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    connections = {"AIRFLOW_CONN_AIRPORTS": publisher.dsn("airports", CAPTURE)}
    connections |= {f"AIRFLOW_CONN_{name.upper()}": subscriber.dsn(name, APPLY) for name in SUBSCRIPTIONS}
    return {
        **spark_environment(),
        **{name: dsn.replace("postgresql:", "postgres:") for name, dsn in connections.items()},
        f"AIRFLOW_CONN_{SPARK.upper()}": json.dumps(spark.connection),
        "CDC_REPLAY_CONFIG": str(file),
        "CDC_REPLAY_EXPECTATIONS": str(FOLDER / "expectations"),
        "CDC_REPLAY_CAPTURE_EVENTS": EVENT_SECONDS,
        "GX_ANALYTICS_ENABLED": "false",
    }


def run_pipeline(demo: Demo, period: DateRange) -> TrafficStats:
    """Setup and snapshots, then live traffic under the scheduled DAGs until it is applied and validated."""
    client = demo.client
    validations = [f"validate__{name}" for name in SUBSCRIPTIONS]
    with demo.timer.stage("DAG capture: publications, slot and change log"):
        capture = f"capture__{PUBLISHER}"
        wait_for(lambda: {capture, *validations} <= client.dag_ids(), "the DAGs to be parsed", 120)
        client.unpause(capture)
        wait_for(lambda: has_succeeded(client, capture), "the first capture", 120)
    with demo.timer.stage("DAGs snapshot: three initial copies, each through its filters"):
        snapshots = [f"snapshot__{name}" for name in SUBSCRIPTIONS]
        client.unpause(*snapshots)
        wait_until_succeeded(client, [client.trigger(dag_id) for dag_id in snapshots])
    client.unpause(f"replay__{PUBLISHER}")
    with demo.timer.stage(f"live traffic, {period.start} to {period.end}; DAGs capture and replay"):
        stats = run_traffic(demo, period)
    with demo.timer.stage("the last window"):
        client.unpause(*validations)
        end = make_last_change(demo)
        wait_for(lambda: are_applied(demo, end), f"all subscriptions to reach {end}", 600)
    with demo.timer.stage("DAGs validate: Great Expectations at a fence LSN"):
        wait_for(lambda: are_validated(demo, end, client), "the validations", 240)
    return stats


def has_succeeded(client: Client, dag_id: str) -> bool:
    """Whether a run of the DAG has succeeded.

    Raises:
        RuntimeError: with the log, if one has failed.
    """
    runs = client.runs(dag_id)
    for run in runs:
        if run.state == "failed":
            raise RuntimeError(describe_failure(client, run))
    return any(run.state == "success" for run in runs)


def wait_until_succeeded(client: Client, runs: list[Run]) -> None:
    """Wait until all runs have succeeded.

    Raises:
        RuntimeError: with the log, if one has failed.
    """
    for run in runs:
        if client.wait_for_run(run).state != "success":
            raise RuntimeError(describe_failure(client, run))


def describe_failure(client: Client, run: Run) -> str:
    """The ends of the logs of a run's failed tasks."""
    failed = [task for task, state in client.task_states(run).items() if state == "failed"]
    tails = "\n".join(client.log(run, task)[-3000:] for task in failed)
    return f"{run.dag_id} failed in {', '.join(failed)}:\n{tails}"


def run_traffic(demo: Demo, period: DateRange) -> TrafficStats:
    """Play the days while the DAGs run; prints the demo's clock and the subscribers' lag."""
    latest = TrafficStats()
    failures: list[BaseException] = []

    def play_traffic() -> None:
        try:
            with psycopg.connect(demo.publisher.dsn("airports"), autocommit=True) as connection:
                play(connection, period, seconds=SECONDS_PER_DAY * period.days, progress=copy_stats)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            failures.append(error)

    def copy_stats(stats: TrafficStats) -> None:
        latest.transactions, latest.statements, latest.minute = (
            stats.transactions, stats.statements, stats.minute,
        )  # fmt: skip

    thread = threading.Thread(target=play_traffic, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=5)
        lag = max(read_lags(demo).values())
        console.print(
            f"  {latest.now:%b %d %H:%M}  {latest.statements:6d} events; lag: {lag / 1e6:.1f} MB of WAL"
        )
    if failures:
        raise failures[0]
    return latest


def read_lags(demo: Demo) -> Mapping[str, int]:
    """The lag of each subscriber, in bytes of WAL."""
    subscriptions = status(demo.config).subscriptions
    return {subscription.subscription: subscription.lag_bytes or 0 for subscription in subscriptions}


def make_last_change(demo: Demo) -> Lsn:
    """Make one more change, for the last window; returns the publisher's position after it."""
    with psycopg.connect(demo.publisher.dsn("airports"), autocommit=True) as connection:
        connection.execute("update planes set landings = landings + 1 where tailnum = 'N10156'")
        row = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
    return Lsn.parse(row[0] if row else "")


def are_applied(demo: Demo, end: Lsn) -> bool:
    """Whether every subscriber holds everything up to `end`."""
    subscriptions = status(demo.config).subscriptions
    return all(
        subscription.applied_lsn is not None and subscription.applied_lsn >= end
        for subscription in subscriptions
    )


def read_validations(demo: Demo) -> dict[str, dict[str, Any]]:
    """The last validation of each subscription that has one."""
    validations = {}
    for name in SUBSCRIPTIONS:
        with psycopg.connect(demo.subscriber.dsn(name)) as connection:
            row = connection.execute(
                "select result from cdc_replay.result where command = 'validate' order by number desc limit 1"
            ).fetchone()
        if row is not None:
            validations[name] = row[0]
    return validations


def are_validated(demo: Demo, end: Lsn, client: Client) -> bool:
    """Whether every subscription was validated at `end` or later."""
    validations = read_validations(demo)
    if len(validations) < len(SUBSCRIPTIONS):
        for name in SUBSCRIPTIONS:
            if name not in validations:
                has_succeeded(client, f"validate__{name}")
        return False
    return all(Lsn.parse(validation["to_lsn"]) >= end for validation in validations.values())


def print_report(demo: Demo) -> bool:
    """Print totals and verdicts; whether every subscription is consistent."""
    validations = read_validations(demo)
    lags = read_lags(demo)
    columns = []
    for name in SUBSCRIPTIONS:
        with psycopg.connect(demo.subscriber.dsn(name)) as connection:
            counts = [str(count) for count in connection.execute(_TOTALS).fetchone() or ()]
        verdict = "[green]consistent[/]" if validations[name]["success"] else "[red]NOT consistent[/]"
        columns.append([*counts, f"{lags[name]} bytes", verdict, validations[name]["to_lsn"]])
    table = Table("", *SUBSCRIPTIONS, box=None)
    for label, values in zip(REPORTED, zip(*columns, strict=True), strict=True):
        table.add_row(label, *values)
    console.print(table)
    for name, validation in validations.items():
        console.print(f"report of {name}: {validation['report']}", soft_wrap=True)
    return all(validation["success"] for validation in validations.values())


def print_tour(demo: Demo) -> None:
    """Where to look while everything still runs."""
    name, url = next(iter(SUBSCRIPTIONS)), demo.airflow.url
    for line in (
        f"The page: {url}/plugin/cdc-replay  user {USER}, password {demo.airflow.password}",
        f"1. Open {name}: lag and rows of the last hour, its proofs, tables with their filters, windows.",
        f"2. Its newest proof leads to the report; {url}/dags/validate__{name} has the run.",
        f"3. Change a row of database {name} ({demo.subscriber.dsn(name)}), then press Validate.",
        "4. Press Refresh with *Reconcile*: first as a dry run, then without; validate again.",
        f"5. {url}/dags/backfill__{name}: trigger it, and look at the range in the task `plan`.",
        "Press Ctrl-C to stop everything.",
    ):
        console.print(line, soft_wrap=True)


def main() -> int:
    """Run the demo; 0 if every subscription is consistent."""
    parser = argparse.ArgumentParser(description="Run the whole pipeline on embedded servers.")
    parser.add_argument("--days", type=int, default=3, help="live days (1 to 300)")
    parser.add_argument("--keep", action="store_true", help="leave Airflow up until Ctrl-C")
    arguments = parser.parse_args()
    if not 1 <= arguments.days <= MOST_DAYS:
        parser.error(f"--days must be from 1 to {MOST_DAYS}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A shell that starts this in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    period = DateRange.with_month_end(arguments.days)
    timer = StageTimer()
    began = time.monotonic()
    try:
        with start_demo(timer, period) as demo:
            run_pipeline(demo, period)
            consistent = print_report(demo)
            console.print(f"{time.monotonic() - began:.0f} s in all; files in {FOLDER}")
            if arguments.keep:
                print_tour(demo)
                signal.pause()
            else:
                console.print("`make demo KEEP=1` leaves Airflow up, with a page that shows all of this.")
    except KeyboardInterrupt:
        console.print("stopped")
        return 130  # which `make demo` takes for no error
    return 0 if consistent else 1


if __name__ == "__main__":
    sys.exit(main())
