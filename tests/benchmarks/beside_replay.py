"""What people and schedulers wait for beside a replay: a backfill, `status`, and the parsing of the DAGs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.backlogs import BACKLOGS
from benchmarks.floors import ask_subscribers
from benchmarks.memory import Peaks
from benchmarks.programs import ROOT, Run, Session, fresh
from benchmarks.stand import Stand, stand

ROWS_BEFORE: Final = 300_000
"""Rows of the table whose range is applied again: what is touched must matter, not what is there."""

PARSE: Final = """
import runpy, sys, time
import airflow.dag_processing.processor
began = time.monotonic()
runpy.run_path(sys.argv[1])
print(time.monotonic() - began)
"""
"""As Airflow's DAG processor: each file in a process of its own, which has Airflow loaded."""


def measure_backfill(changes: int) -> tuple[dict[str, Run], tuple[str, ...]]:
    """Apply a range again that the subscriber has applied, after it has counted; what that changed."""
    backlog = BACKLOGS["churn"]
    with stand((("p",),)) as at, Session(at.folder, at.servers) as session:
        at.create_databases(backlog.publisher_script, backlog.subscriber_script, ["warm"])
        at.set_up(["warm"], session.run)
        [name] = at.names("warm")
        with at.publisher_connection() as connection:
            backlog.run(connection, ROWS_BEFORE)
            session.run(at.line("sync", name))
            start = _position(at)
            backlog.run(connection, changes)
            end = _position(at)
            backlog.run(connection, changes)
        session.run(at.line("sync", name))
        before = at.content(name)
        at.write_out()
        words = ("--from", start, "--to", end)
        runs = {
            "dry_run": session.run(at.line("backfill", name, *words, "--dry-run")),
            "warm": session.run(at.line("backfill", name, *words)),
        }
        after = at.content(name)
    return runs, () if before == after else ("the backfill has changed what was right",)


def measure_many_subscriptions(count: int) -> dict[str, Run]:
    """`status` of so many subscriptions as a new process, and the slowest DAG file with all of them."""
    backlog = BACKLOGS["churn"]
    with stand((("p",),) * count) as at, Session(at.folder, at.servers) as session:
        at.create_databases(backlog.publisher_script, backlog.subscriber_script, ["warm"])
        at.set_up(["warm"], session.run)
        session.run(at.line("sync", *at.names("warm")))
        return {
            "floor": ask_subscribers(at),
            "status": fresh(at.command("status"), at.folder, at.servers),
            "parse": _parse(at),
        }


def _parse(at: Stand) -> Run:
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(at.folder / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "CDC_REPLAY_CONFIG": str(at.file),
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "plugins")),
    }

    def seconds(file: Path) -> float:
        command = [sys.executable, "-c", PARSE, str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout.splitlines()[-1])

    slowest = max(seconds(file) for file in sorted((ROOT / "dags").glob("*.py")))
    return Run(slowest, Peaks(0.0, {}), {})


def _position(at: Stand) -> str:
    """Where the log ends when everything that is committed by now is in it."""
    with at.publisher_connection() as connection:
        row = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    return str(row[0])
