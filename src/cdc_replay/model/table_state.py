"""The states of a subscribed table.

| state   | set by                                   | replay                                       |
|---------|------------------------------------------|----------------------------------------------|
| Pending | refresh, for a new table                 | skips it                                     |
| Copying | snapshot, when the copy starts           | skips it                                     |
| Ready   | snapshot, with the last row of the copy  | applies transactions after `applied_lsn`     |
| Parked  | replay, after a rewrite by the publisher | skips it until it is copied                  |
|         | replay, after a permanent apply error    | skips it until it is copied or resumed       |
|         | replay, after a lost unchanged TOAST     | skips it until it is copied or resumed       |
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
    """The table holds everything up to `applied_lsn`, and nothing later.

    `transaction` is the commit LSN of the transaction that failed: the subscriber rejects a change of it
    (R8.5), or an unchanged TOAST value is lost (R4.6).
    """

    applied_lsn: Lsn
    reason: str
    transaction: Lsn


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
        case Parked(applied_lsn, reason, transaction):
            return f"parked at {applied_lsn}, before transaction {transaction}: {reason}"
    assert_never(state)
