"""The scripts in `jobs/` under `spark-submit`: what their exit codes say, and what is done before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.status import subscription_result
from cdc_replay.errors import ServerUnavailable, SubscriptionParked
from embedded.java import spark_environment
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

JOBS: Final = Path(__file__).resolve().parents[3] / "jobs"
SPARK_SUBMIT: Final = Path(sys.executable).with_name("spark-submit")
TABLES: Final = "create table t (id int primary key, a int)"


def submitted(twin: Twin, job: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SPARK_SUBMIT, "--master", "local[1]", JOBS / job, f"--config={twin.file}", *arguments],
        env=os.environ | spark_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def results(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    forms = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {form["subscription"]: form for form in forms}


def allow_connections(twin: Twin, name: str, *, allowed: bool) -> None:
    twin.pairs["good"].ours.run(f"alter database {twin.pairs[name].ours.name} allow_connections {allowed}")


def test_replay_asks_for_a_retry_after_a_transient_error(twin: Twin) -> None:
    """`gone` does not answer at first, `stuck` has a permanent conflict; `good` gets everything at once."""
    twin.publisher.run(f"{TABLES}; create publication p for table t")
    for name in ("good", "gone", "stuck"):
        twin.subscribe(name, "p", tables=TABLES, native=False)
    twin.sync_ours()
    twin.pairs["stuck"].ours.run("insert into t values (1, 0)")
    twin.publisher.run("insert into t values (1, 1)")
    capture(twin.config, "pub")
    allow_connections(twin, "gone", allowed=False)

    done = submitted(twin, "replay.py", *twin.pairs)

    assert done.returncode == 75, done.stderr
    forms = results(done)
    assert {name: form["retry"] for name, form in forms.items()} == {
        "good": None,
        "gone": "later",
        "stuck": "never",
    }
    assert twin.pairs["good"].ours.rows("table t") == [(1, 1)]
    with pytest.raises(ServerUnavailable):
        subscription_result(twin.config, "gone")
    with pytest.raises(SubscriptionParked, match=r"\(id\)=\(1\)"):
        subscription_result(twin.config, "stuck")

    allow_connections(twin, "gone", allowed=True)
    done = submitted(twin, "replay.py", *twin.pairs)
    # What `stuck` has come to is its report's to tell.
    assert done.returncode == 0, done.stderr
    assert twin.pairs["gone"].ours.rows("table t") == [(1, 1)]
    assert results(done)["stuck"]["retry"] == "never"


def test_permanent_error_has_its_own_exit_code_and_no_traceback(twin: Twin) -> None:
    twin.publisher.run(f"{TABLES}; create publication p for table t")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    for job, arguments, reason in (
        ("backfill.py", ("s", "--from=0/2", "--to=0/1"), "0/2"),
        ("replay.py", ("nobody",), '"nobody"'),
        ("replay.py", ("s", "--to-lsn=here"), '"here"'),
    ):
        done = submitted(twin, job, *arguments)
        output = done.stdout + done.stderr  # `spark-submit` sends both of the driver's to the first
        assert done.returncode == 65, output
        assert reason in output
        assert "Traceback" not in output
