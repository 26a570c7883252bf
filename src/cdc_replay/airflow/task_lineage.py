"""Where a task moves rows, as `openlineage_events` tells it.

| flow        | inputs                                | outputs                           |
|-------------|---------------------------------------|-----------------------------------|
| `CAPTURE`   | the published tables                  | the change log                    |
| `REPLAY`    | the change log, the published tables  | the subscriber's tables           |
| `COPY`      | the published tables that were copied | the subscriber's, with their rows |
| `RECONCILE` | the published tables                  | the subscriber's tables           |
| `VALIDATE`  | both sides' tables, with the verdict  |                                   |
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class Flow(enum.Enum):
    """Where a task moves rows, or compares them."""

    CAPTURE = "capture"
    REPLAY = "replay"
    COPY = "copy"
    RECONCILE = "reconcile"
    VALIDATE = "validate"

    @property
    def reads_log(self) -> bool:
        """Whether the change log is an input."""
        return self is Flow.REPLAY


@dataclass(frozen=True, slots=True)
class TaskLineage:
    """A task's flow, for subscriptions or a publisher, with the results of its command."""

    flow: Flow
    subscriptions: tuple[str, ...] = ()
    publisher: str | None = None
    results: Sequence[Mapping[str, Any]] = ()
    into_conn_id: str | None = None
    is_dry_run: bool = False
