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


SEND_BY_STATSD = """
import inspect
from airflow._shared.observability.metrics.statsd_logger import SafeStatsdLogger
from airflow.sdk.observability.stats import Stats
from cdc_replay.airflow import metrics

sent = []

class Client:
    def gauge(self, stat, value, rate, delta):
        sent.append(stat)

legacy = {"export_legacy_names": True}
known = inspect.signature(Stats.initialize).parameters
Stats.initialize(
    factory=lambda: SafeStatsdLogger(Client(), influxdb_tags_enabled=True, statsd_influxdb_enabled=True),
    **{name: value for name, value in legacy.items() if name in known},
)
for name in ("nsw", "new south", "a,subscription=nsw", "x:0|g\\ny", "x" * 300):
    metrics.of_replay({"subscription": name, "seconds": 1.5, "applied": {}, "conflicts": {}})
answer = [stat for stat in sent if "replay_seconds" in stat]
"""


def test_a_gauge_reaches_statsd_under_a_tag_of_its_own_whatever_the_name_of_its_object(
    run_in_airflow: RunInAirflow,
) -> None:
    answer = run_in_airflow(SEND_BY_STATSD)
    assert answer[0] == "cdc_replay.replay_seconds,subscription=nsw"
    assert len(answer) == len(set(answer)) == 5
    assert all(stat.count(",") == stat.count("=") == 1 for stat in answer)
