"""The benchmark runs, compares what it says, and judges by its bounds. Its figures are not tested."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]
SIDES = {"native", "cold", "warm"}


@pytest.fixture
def demo_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "demo"))


def bench(out: Path, *arguments: str) -> dict[str, Any]:
    """What a run of the benchmark writes; it must find all subscribers equal and no bound broken."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", *arguments, "--out", str(out)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}/tools:{ROOT}/tests:{ROOT}/demo"},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert ET.parse(out / "bench.svg").getroot().tag.endswith("svg")
    found: dict[str, Any] = json.loads((out / "bench.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_a_small_backlog_is_drained_by_all_and_their_tables_are_equal(tmp_path: Path) -> None:
    [measured] = bench(tmp_path, "hot_keys", "--rows", "5000")["workloads"]
    assert set(measured["runs"]) == SIDES | {"pg_recvlogical"}
    assert measured["changes"] >= 5000
    assert measured["differences"] == []
    assert all(measured["peaks"][side]["ours"] > 0 for side in ("cold", "warm"))


@pytest.mark.slow
def test_freshness_of_a_native_subscription_and_of_all_ways_of_ours_is_measured(tmp_path: Path) -> None:
    [measured] = bench(tmp_path, "freshness", "--quick")["workloads"]
    assert set(measured["runs"]) == {"native", "follow", "airflow_warm", "airflow_submit"}
    for values in measured["details"].values():
        assert 0 < values["p50"] <= values["p95"] <= values["max"]
    assert ET.parse(tmp_path / "freshness.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
def test_copies_empty_windows_and_real_flights_are_measured_too(tmp_path: Path) -> None:
    found = bench(tmp_path, "copy_20", "empty_window", "flights_filtered", "--quick")
    flights, copied, empty = found["workloads"]
    assert set(copied["runs"]) == SIDES
    assert set(empty["runs"]) == {"cold", "warm"}
    assert flights["changes"] > 0
    assert [(each["workload"], each["holds"]) for each in found["bounds"]] == [("empty_window", True)]


@pytest.mark.slow
def test_a_validation_is_measured_beside_what_hashing_alone_costs(tmp_path: Path) -> None:
    [measured] = bench(tmp_path, "validate_1e7", "--quick")["workloads"]
    assert set(measured["runs"]) == {"floor", "warm", "sample"}
    assert measured["differences"] == []
    assert set(measured["details"]) == {"warm", "sample"}


@pytest.mark.slow
def test_a_backfill_many_tables_and_many_subscriptions_are_measured_too(tmp_path: Path) -> None:
    found = bench(tmp_path, "backfill", "copy_many", "subscriptions_200", "--quick")["workloads"]
    copied, backfilled, many = found
    assert set(copied["runs"]) == SIDES
    assert set(backfilled["runs"]) == {"dry_run", "warm"}
    assert backfilled["differences"] == []
    assert set(many["runs"]) == {"floor", "status", "parse"}
    assert many["subscriptions"] == 5


@pytest.mark.usefixtures("demo_on_path")
def test_a_bound_is_judged_at_full_size_only_and_a_broken_one_fails_the_run() -> None:
    from benchmarks.bounds import judged
    from benchmarks.measures import Measured
    from benchmarks.report import Report
    from benchmarks.workloads import WORKLOADS

    full = WORKLOADS["hot_keys"].size
    slow = Measured("hot_keys", 1, full, 1.0, {"native": 10.0, "warm": 6.1}, {}, {}, ())
    assert list(judged(slow, full - 1)) == []
    [verdict] = judged(slow, full)
    assert (verdict.figure, verdict.limit, verdict.holds) == (0.61, 0.6, False)
    assert not Report({}, [slow], [verdict]).is_good
    assert Report({}, [slow], []).is_good


@pytest.mark.usefixtures("demo_on_path")
@pytest.mark.parametrize(
    ("floor", "limit", "holds"), [(1.9, 2.0, False), (2.0, 2.0, False), (2.1, 3.15, True), (None, 2.0, False)]
)
def test_a_bound_below_what_the_steps_take_without_us_is_a_share_of_that(
    floor: float | None, limit: float, holds: bool
) -> None:
    from benchmarks.bounds import judged
    from benchmarks.measures import Measured

    runs = {"status": 3.1, "parse": 0.5} | ({} if floor is None else {"floor": floor})
    status, _ = judged(Measured("subscriptions_200", 200, 0, 0.0, runs, {}, {}, ()), 200)
    assert (status.limit, status.holds, status.floor) == (limit, holds, floor)


@pytest.mark.usefixtures("demo_on_path")
def test_unequal_tables_fail_the_run() -> None:
    from benchmarks.measures import Measured
    from benchmarks.report import Report

    wrong = Measured("churn", 1, 5, 1.0, {}, {}, {}, ("cold_0.t",))
    assert not Report({}, [wrong], []).is_good


@pytest.mark.usefixtures("demo_on_path")
def test_a_workload_that_cannot_be_measured_fails_the_run_but_not_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import run as program
    from benchmarks.measures import Measured
    from benchmarks.memory import Peaks
    from benchmarks.workloads import Workload

    def measure(workload: Workload, size: int) -> Measured:
        if workload.name == "hot_keys":
            raise OSError("no space left")
        runs, peaks = dict.fromkeys(SIDES, 1.0), dict.fromkeys(SIDES, Peaks(0.0, {}))
        return Measured(workload.name, 1, size, 1.0, runs, peaks, {}, ())

    monkeypatch.setattr(program, "measure", measure)
    report = program.run(program.chosen(["hot_keys", "growth_1e5"]), rows=None, is_quick=True, out=tmp_path)
    assert [each.workload for each in report.measured] == ["growth_1e5"]
    assert not report.is_good
    written = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert written["failures"] == {"hot_keys": "OSError: no space left"}


@pytest.mark.usefixtures("demo_on_path")
def test_no_flight_leaves_the_year_that_its_table_has_partitions_for() -> None:
    from flights import EventKind, events_of, read_flights

    def postponed(date: dt.date) -> int:
        return sum(
            event.kind is EventKind.POSTPONED
            for flight in read_flights(date, date)
            for event in events_of(flight)
        )

    assert postponed(dt.date(2013, 1, 31)) > 0
    assert postponed(dt.date(2013, 12, 31)) == 0
