"""What a change log holds, and what a subscription still needs of it."""

from __future__ import annotations

from dataclasses import dataclass

from cdc_replay.model.database import Database
from cdc_replay.model.lsn import Lsn


@dataclass(frozen=True, slots=True)
class LogExtent:
    """Whose changes a change log holds: what committed in `(start_lsn, end_lsn]`."""

    system_identifier: str
    database: Database
    start_lsn: Lsn
    end_lsn: Lsn


@dataclass(frozen=True, slots=True)
class LogRequirement:
    """What a subscription still needs: what commits after `lsn`."""

    subscription: str
    lsn: Lsn
    is_busy: bool
    """One of its jobs runs, which may read more than it needs."""
