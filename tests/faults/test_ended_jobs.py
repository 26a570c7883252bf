"""Spark applications that Airflow ends, or that lose their JVM: nothing of them goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from benchmarks.memory import descendants
from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from embedded.java import spark_environment
from faults.ending import check_nothing_is_left
from fixtures.native import wait_for
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

JOB: Final = Path(__file__).resolve().parents[2] / "jobs" / "replay.py"
TABLES: Final = "create table t (id int primary key, a int)"
WAITING: Final = (
    "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
)


@pytest.mark.parametrize("how", ["as Airflow does", "its JVM is killed"])
def test_application_that_is_ended_leaves_nothing_behind(twin: Twin, how: str) -> None:
    """While a statement of it waits on the subscriber for a lock that is never released."""
    twin.publisher.run(f"{TABLES}; create publication p for table t")
    twin.subscribe("s", "p", tables=TABLES, native=False, lock_timeout=0)
    twin.sync_ours()
    twin.publish("insert into t values (1, 1)")
    capture(twin.config, "pub")
    ours = twin.pairs["s"].ours
    with ours.connect() as connection, connection.transaction():
        connection.execute("lock table t in share mode")
        process = subprocess.Popen(
            [Path(sys.executable).with_name("spark-submit"), "--master", "local[1]", JOB,
             f"--config={twin.file}", "s"],
            env=os.environ | spark_environment(), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(lambda: bool(ours.rows(WAITING)), "the replay to wait for the lock")
        family = descendants(process.pid)
        if how == "as Airflow does":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            os.kill(process.pid, signal.SIGKILL)
        check_nothing_is_left(twin, family)
        assert process.wait() != 0
    (result,) = replay(twin.config, ["s"])
    assert result.error is None
    assert ours.rows("table t") == [(1, 1)]
