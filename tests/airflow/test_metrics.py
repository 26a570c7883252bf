"""Gauges for Airflow's metrics."""

from __future__ import annotations

from fixtures.airflow import RunInAirflow

MEASURE = """
import inspect
from airflow.sdk.observability.stats import Stats
from cdc_replay.airflow import metrics
from cdc_replay.airflow.connections import airflow_config

gauges = []

class Backend:
    def gauge(self, stat, value, tags):
        gauges.append([stat, value, tags])

# Airflow 3.2 has no such parameter.
legacy = {"export_legacy_names": True}
known = inspect.signature(Stats.initialize).parameters
Stats.initialize(factory=Backend, **{name: value for name, value in legacy.items() if name in known})
metrics.of_replay({
    "subscription": "nsw", "seconds": 1.5,
    "applied": {"insert": 2, "delete": 1}, "conflicts": {"insert_exists": 1},
})
metrics.of_watch(airflow_config(), "depot", ["stock"])  # nobody answers, which is no failure
answer = gauges
"""


def test_gauges_have_the_object_as_a_tag(run_in_airflow: RunInAirflow) -> None:
    answer = run_in_airflow(MEASURE, AIRFLOW__METRICS__OTEL_ON="True")
    tags = {"subscription": "nsw"}
    assert answer == [
        ["cdc_replay.replay_seconds", 1.5, tags],
        ["cdc_replay.replay_rows", 3, tags],
        ["cdc_replay.replay_conflicts", 1, tags],
    ]
