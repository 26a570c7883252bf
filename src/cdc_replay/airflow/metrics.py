"""Gauges for Airflow's metrics (StatsD, DataDog, OpenTelemetry), with the object's name as a tag.

`gauges` lists them. The watch asks servers only if Airflow sends metrics at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk.configuration import conf
from airflow.sdk.observability.stats import Stats

from cdc_replay.airflow.gauges import GAUGES, PREFIX, tag_of
from cdc_replay.config import Config

if TYPE_CHECKING:
    from cdc_replay.model.results import CaptureResult, ValidateResult

_SWITCHES = ("statsd_on", "statsd_datadog_enabled", "otel_on")


def of_capture(result: CaptureResult) -> None:
    """What a capture did."""
    _set("capture_seconds", result.seconds, result.publisher)
    _set("capture_transactions", result.transactions, result.publisher)


def of_replay(result: Mapping[str, Any]) -> None:
    """What a replay did for one subscription, as it is recorded."""
    subscription = str(result["subscription"])
    _set("replay_seconds", result["seconds"], subscription)
    _set("replay_rows", sum(result["applied"].values()), subscription)
    _set("replay_conflicts", sum(result["conflicts"].values()), subscription)


def of_validation(result: ValidateResult) -> None:
    """The verdict of a validation."""
    _set("validate_seconds", result.seconds, result.subscription)
    _set("validate_consistent", int(result.success), result.subscription)


def of_watch(config: Config, publisher: str, subscriptions: Iterable[str]) -> None:
    """The state of a publisher and of its subscriptions."""
    if not any(conf.getboolean("metrics", switch, fallback=False) for switch in _SWITCHES):
        return
    from cdc_replay.monitoring.progress import publisher_and_subscriptions

    state = publisher_and_subscriptions(config, publisher, subscriptions)
    _set("retained_wal_bytes", state.retained_wal_bytes, publisher)
    for name, progress in state.subscriptions.items():
        _set("lag_seconds", progress.lag_seconds, name)
        _set("proof_age_seconds", progress.proof_age_seconds, name)
        for table, age in progress.table_proof_ages.items():
            _set("table_proof_age_seconds", age, name, table)


def _set(name: str, value: float | None, owner: str, *parts: str) -> None:
    """Set a gauge of the object `owner`, or of these parts of it."""
    if value is not None:
        gauge = GAUGES[name]
        names = zip((gauge.tag, *gauge.more_tags), (owner, *parts), strict=True)
        tags = {tag: tag_of(name) for tag, name in names}
        Stats.gauge(f"{PREFIX}{name}", value, tags=tags)
