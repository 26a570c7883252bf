"""The states of a subscribed table, each with what is known in it.

| state   | set by                                  | replay                                      |
|---------|-----------------------------------------|---------------------------------------------|
| Pending | refresh, when the table enters          | leaves it out                               |
| Copying | snapshot, when its copy starts          | leaves it out                               |
| Ready   | snapshot, with the last row of the copy | applies what is after `applied_lsn`         |
| Parked  | replay, when the publisher rewrote it   | leaves it out until it is copied again      |
|         | replay, when a change of it was refused | leaves it out until it is copied or resumed |
|         | replay, when nobody has a value for it  | the same                                    |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from cdc_replay.model.lsn import Lsn


@dataclass(frozen=True, slots=True)
class Pending:
    """The table waits for its snapshot."""


@dataclass(frozen=True, slots=True)
class Copying:
    """The table is being copied as of `consistent_point`."""

    consistent_point: Lsn


@dataclass(frozen=True, slots=True)
class Ready:
    """The table holds everything up to `applied_lsn`."""

    applied_lsn: Lsn


@dataclass(frozen=True, slots=True)
class Parked:
    """The table holds everything up to `applied_lsn`, and not what came then.

    That is in the log where `transaction` is given: it was committed there, and the subscriber refuses a
    change of it (R8.5), or lacks a value for it (R4.6). Without one only a copy helps (R11.9).
    """

    applied_lsn: Lsn
    reason: str
    transaction: Lsn | None = None


TableState: TypeAlias = Pending | Copying | Ready | Parked


def describe(state: TableState) -> str:
    """One line for `cdc-replay status`."""
    match state:
        case Pending():
            return "waiting for its snapshot"
        case Copying(consistent_point):
            return f"copying as of {consistent_point}"
        case Ready(applied_lsn):
            return f"replayed up to {applied_lsn}"
        case Parked(applied_lsn, reason, None):
            return f"parked at {applied_lsn}: {reason}"
        case Parked(applied_lsn, reason, transaction):
            return f"parked at {applied_lsn}, before transaction {transaction}: {reason}"
    assert_never(state)
