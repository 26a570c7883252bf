"""Why a window ends earlier than requested, as data; what is after its end is another window.

| it ends                                                       | decided in            |
|---------------------------------------------------------------|-----------------------|
| where it would be long                                        | `ChangeLog.split_lsn` |
| after the first transaction that rewrites a table (R11.9)     | `table_rewrites`      |
| before a change at which a native worker stops (R7.12, R8.1)  | `unsubscribed_tables` |
| before a change with a column that its table lacks (R8.1)     | `schema_changes`      |
| before a change that cannot be folded with earlier ones       | `schema_changes`      |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from cdc_replay.changelog.queries import SentChanges
from cdc_replay.errors import SubscriberNotReady
from cdc_replay.model.lsn import Lsn, Window


class EndReason(enum.IntEnum):
    """Why a window ends; of several reasons for one position the first one counts."""

    LENGTH = enum.auto()
    REWRITE = enum.auto()
    UNSUBSCRIBED = enum.auto()
    MISSING_COLUMN = enum.auto()
    UNFOLDABLE = enum.auto()

    @property
    def stops(self) -> bool:
        """Whether what follows waits until somebody alters the subscriber's tables."""
        return self in (EndReason.UNSUBSCRIBED, EndReason.MISSING_COLUMN)


@dataclass(frozen=True, slots=True)
class WindowEnd:
    """Where a window ends, and why; `error` says why what follows cannot be applied."""

    lsn: Lsn
    reason: EndReason
    error: SubscriberNotReady | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """Changes before which a window ends: those of `versions` of relations, and `sent`.

    The log answers up to which LSN `window` has none of them.
    """

    reason: EndReason
    window: Window
    versions: frozenset[int] = frozenset()
    sent: SentChanges | None = None
