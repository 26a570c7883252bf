"""Timelines: which history of the cluster a server writes, and where it left those before.

A promotion, and a restore to a point in time, begin a new timeline. Up to the position where it left its
parent it has the parent's WAL; from there on the same positions hold something else:

    timeline 1   ───────────●───────────▶      the old primary, perhaps still running
                            │ left at 0/5000000
    timeline 2              └───────────▶

So what was read on timeline 1 is part of timeline 2 exactly up to that position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psycopg import errors as pg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.connection import Connection, connect, translated_errors

# The grammar of replication commands knows upper case only.
HISTORY: Final = sql.SQL("TIMELINE_HISTORY {}")


@dataclass(frozen=True, slots=True)
class TimelineHistory:
    """The timelines that a timeline comes from, each with the position where it was left."""

    timeline: int
    ancestors: tuple[tuple[int, Lsn], ...] = ()

    def left(self, timeline: int) -> Lsn | None:
        """Up to where this timeline has the WAL of `timeline`; None if it does not come from it."""
        return dict(self.ancestors).get(timeline)

    @classmethod
    def parse(cls, timeline: int, text: str) -> TimelineHistory:
        """Read a history file: lines of timeline, position and reason; `#` begins a comment.

        Raises:
            InvalidLsn: if a position is none.
            ValueError: if a timeline is not a number.
        """
        lines = (line.split() for line in text.splitlines() if not line.lstrip().startswith("#"))
        return cls(timeline, tuple((int(line[0]), Lsn.parse(line[1])) for line in lines if line))


def timeline_history(connection: Connection, timeline: int) -> TimelineHistory:
    """Where the server's `timeline` comes from; no ancestors if the server has no history file of it.

    It is read by a walsender, which every role with REPLICATION may have; the file itself is for superusers.

    Raises:
        ServerUnavailable, MissingPrivilege: if there is no connection to be had.
    """
    info = connection.info
    dsn = make_conninfo(info.dsn, password=info.password or None)
    with (
        connect(dsn, purpose="timeline history", replication=True) as walsender,
        translated_errors(f"cannot read the history of timeline {timeline}"),
    ):
        try:
            ((_, text),) = walsender.execute(HISTORY.format(timeline)).fetchall()
        except pg.UndefinedFile:
            return TimelineHistory(timeline)
    return TimelineHistory.parse(timeline, text)
