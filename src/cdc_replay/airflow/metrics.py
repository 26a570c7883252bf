"""Gauges for Airflow's metrics (StatsD, DataDog, OpenTelemetry), with the object's name as a tag.

| gauge, after `cdc_replay.`                         | tag            | set by                  |
|----------------------------------------------------|----------------|-------------------------|
| `capture_seconds`, `capture_transactions`          | `publisher`    | `capture`               |
| `replay_seconds`, `replay_rows`, `replay_conflicts` | `subscription` | `report.<subscription>` |
| `validate_seconds`, `validate_consistent`          | `subscription` | `validate`              |
| `retained_wal_bytes`                               | `publisher`    | `watch`                 |
| `lag_seconds`, `proof_age_seconds`                 | `subscription` | `watch`                 |

`validate_consistent` is 1 or 0. `proof_age_seconds` is the age of the last validation, if it found the
subscription consistent. An unknown value sets no gauge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk.configuration import conf
from airflow.sdk.observability.stats import Stats

from cdc_replay.config import Config

if TYPE_CHECKING:
    from cdc_replay.model.results import CaptureResult, ValidateResult

_SWITCHES = ("statsd_on", "statsd_datadog_enabled", "otel_on")


def of_capture(result: CaptureResult) -> None:
    """What a capture did."""
    tags = {"publisher": result.publisher}
    _set("capture_seconds", result.seconds, tags)
    _set("capture_transactions", result.transactions, tags)


def of_replay(result: Mapping[str, Any]) -> None:
    """What a replay did for one subscription, as it is recorded."""
    tags = {"subscription": str(result["subscription"])}
    _set("replay_seconds", result["seconds"], tags)
    _set("replay_rows", sum(result["applied"].values()), tags)
    _set("replay_conflicts", sum(result["conflicts"].values()), tags)


def of_validation(result: ValidateResult) -> None:
    """The verdict of a validation."""
    tags = {"subscription": result.subscription}
    _set("validate_seconds", result.seconds, tags)
    _set("validate_consistent", int(result.success), tags)


def of_watch(config: Config, publisher: str, subscriptions: Iterable[str]) -> None:
    """The state of a publisher and of its subscriptions; they are asked only if Airflow sends metrics."""
    if not any(conf.getboolean("metrics", switch, fallback=False) for switch in _SWITCHES):
        return
    from cdc_replay.commands.progress import publisher_and_subscriptions

    state = publisher_and_subscriptions(config, publisher, subscriptions)
    _set("retained_wal_bytes", state.retained_wal_bytes, {"publisher": publisher})
    for name, progress in state.subscriptions.items():
        _set("lag_seconds", progress.lag_seconds, {"subscription": name})
        _set("proof_age_seconds", progress.proof_age_seconds, {"subscription": name})


def _set(name: str, value: float | None, tags: Mapping[str, str]) -> None:
    if value is not None:
        Stats.gauge(f"cdc_replay.{name}", value, tags=dict(tags))
