"""The gauges that tasks set, as data: `metrics` sets them, `docs/metrics.md` is generated from them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "cdc_replay."
"""Before every name."""

_UNUSUAL: Final = re.compile(r"[^A-Za-z0-9_./-]")
_LONGEST_TAG: Final = 80
_HASH_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class Gauge:
    """One gauge: the tag with the object's name, the task that sets it, its unit, and what it means."""

    tag: str
    task: str
    unit: str
    meaning: str
    more_tags: tuple[str, ...] = ()


GAUGES: Final[Mapping[str, Gauge]] = {
    "capture_seconds": Gauge("publisher", "capture", "s", "duration of the last capture"),
    "capture_transactions": Gauge(
        "publisher", "capture", "transactions", "what the last capture added to the change log"
    ),
    "replay_seconds": Gauge("subscription", "report.<subscription>", "s", "duration of the last replay"),
    "replay_rows": Gauge(
        "subscription", "report.<subscription>", "rows",
        "rows that the last replay inserted, updated and deleted, and tables that it truncated",
    ),
    "replay_conflicts": Gauge(
        "subscription", "report.<subscription>", "rows", "conflicts of the last replay, of all kinds"
    ),
    "validate_seconds": Gauge("subscription", "validate", "s", "duration of the last validation"),
    "validate_consistent": Gauge(
        "subscription", "validate", "0 or 1", "1 if the last validation found the subscriber consistent"
    ),
    "retained_wal_bytes": Gauge("publisher", "watch", "bytes", "WAL that the slot retains"),
    "lag_seconds": Gauge(
        "subscription", "watch", "s",
        "age of the oldest captured transaction that is not applied; 0 without one"
    ),
    "proof_age_seconds": Gauge(
        "subscription", "watch", "s",
        "age of the proof that the subscriber is consistent: that of its table whose proof is oldest; not"
        " set while one has none"
    ),
    "table_proof_age_seconds": Gauge(
        "subscription", "watch", "s",
        "age of the proof of one table: all its rows were equal since; not set while it has none",
        ("table",),
    ),
}  # fmt: skip
"""By name. An unknown value sets no gauge."""


def tag_of(name: str) -> str:
    """A name as the value of a tag, which every backend of Airflow sends as it is.

    StatsD bears few characters and 250 of them: without a tag, tables would share one gauge, and owners of
    tables choose names. Unusual and long names are told apart by their hash.
    """
    tag = _UNUSUAL.sub("_", name)[:_LONGEST_TAG]
    if tag == name:
        return tag
    return f"{tag}-{hashlib.sha256(name.encode()).hexdigest()[:_HASH_DIGITS]}"
