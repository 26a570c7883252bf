"""Alarms: what somebody is told about, without being asked.

| kind             | told when                                          | critical when                  |
|------------------|----------------------------------------------------|--------------------------------|
| no answer        | a server does not answer                           | always                         |
| slot             | a slot is missing or lost                          | always                         |
| log not readable | the change log cannot be read                      | always                         |
| log not writable | it cannot be written, or its disk is full          | always                         |
| no capture       | the publisher writes, and nothing moves the log's  | always                         |
|                  | end for longer than the bound of a lag             |                                |
| retained WAL     | a slot retains more than the bound                 | it is near lost                |
| parked           | a table or the subscription is parked              | the subscription is parked     |
| replay failed    | the last replay failed                             |                                |
| not consistent   | the last validation found a difference             | always                         |
| table dropped    | the subscriber has dropped a subscribed table      |                                |
| not captured     | published changes do not reach the subscription    |                                |
| lag, proof age   | a bound is exceeded                                | it is exceeded `WORSE` times   |
| task failed      | a task of Airflow has failed, after its last retry |                                |

Alarms leave the house: their texts are ours, and never have the words of a server about a row.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import Result

WORSE: Final = 4


class AlarmKind(enum.Enum):
    """What an alarm is about."""

    NO_ANSWER = "no answer"
    SLOT = "slot"
    LOG_NOT_READABLE = "log not readable"
    LOG_NOT_WRITABLE = "log not writable"
    NO_CAPTURE = "no capture"
    RETAINED_WAL = "retained WAL"
    PARKED = "parked"
    REPLAY_FAILED = "replay failed"
    NOT_CONSISTENT = "not consistent"
    TABLE_DROPPED = "table dropped"
    NOT_CAPTURED = "not captured"
    LAG = "lag"
    PROOF_AGE = "proof age"
    TASK_FAILED = "task failed"
    TEST = "test"
    """Sent on request, to see whether it arrives."""


PASSING: Final = frozenset({AlarmKind.NO_ANSWER, AlarmKind.LOG_NOT_READABLE, AlarmKind.REPLAY_FAILED})
"""Kinds that often pass by themselves: told only when they last."""


class Severity(enum.Enum):
    """How bad it is; an alarm is told again only when it becomes worse."""

    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Higher is worse; 0 is left for what was never told."""
        return 1 + list(Severity).index(self)


@dataclass(frozen=True, slots=True, order=True)
class AlarmKey:
    """The identity of an alarm; `part` is a table, or the end of the log, if the alarm is about one."""

    subject: str
    """Such as `publisher shop`, `subscription nsw` or `task DAG.TASK`."""
    kind: str
    part: str = ""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm as it is now.

    `since` is in ISO 8601, None if only the watcher knows it. `lsn` is the position that the alarm concerns.
    One that has not been seen for `told_after_seconds` is no alarm yet.
    """

    key: AlarmKey
    severity: Severity
    message: str
    hint: str = ""
    since: str | None = None
    lsn: Lsn | None = None
    link: str = ""
    told_after_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Observed:
    """What one look has seen.

    Alarms of `unknown` subjects and kinds may hold or not: a server or log did not answer, or another alarm
    hides them. `is_all_unknown`: nobody looked.
    """

    alarms: tuple[Alarm, ...]
    unknown: frozenset[tuple[str, AlarmKind]] = frozenset()
    is_all_unknown: bool = False

    def is_unknown(self, key: AlarmKey) -> bool:
        """Whether this look cannot say if the alarm holds."""
        return self.is_all_unknown or (key.subject, AlarmKind(key.kind)) in self.unknown


@dataclass(frozen=True, slots=True)
class Notice:
    """One message: alarms that are new or worse, and alarms that are over."""

    raised: tuple[Alarm, ...] = ()
    resolved: tuple[Alarm, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.raised or self.resolved)


@dataclass(frozen=True, slots=True)
class AlarmsResult(Result):
    """All present alarms, how many each channel was told of, and why a channel could not be told."""

    alarms: tuple[Alarm, ...]
    sent: dict[str, int] = field(default_factory=dict)
    resolved: dict[str, int] = field(default_factory=dict)
    error: str | None = None
