"""Timelines: the history of a cluster, and where each timeline branched off.

A promotion, or a restore to a point in time, starts a new timeline. Up to the branch point it has its
parent's WAL; after it the same positions contain something else:

    timeline 1   ───────────●───────────▶      the old primary, perhaps still running
                            │ branched off at 0/5000000
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

# The grammar of replication commands accepts upper case only.
HISTORY: Final = sql.SQL("TIMELINE_HISTORY {}")


@dataclass(frozen=True, slots=True)
class TimelineHistory:
    """The ancestors of a timeline, each with the position where the next one branched off."""

    timeline: int
    ancestors: tuple[tuple[int, Lsn], ...] = ()

    def branch_lsn(self, timeline: int) -> Lsn | None:
        """The end of the WAL that both timelines have in common; None if `timeline` is no ancestor."""
        return dict(self.ancestors).get(timeline)

    @classmethod
    def parse(cls, timeline: int, text: str) -> TimelineHistory:
        """Parse a history file: lines of timeline, position and reason; `#` begins a comment.

        Raises:
            InvalidLsn: if a position is invalid.
            ValueError: if a timeline is not a number.
        """
        lines = (line.split() for line in text.splitlines() if not line.lstrip().startswith("#"))
        return cls(timeline, tuple((int(line[0]), Lsn.parse(line[1])) for line in lines if line))


def timeline_history(connection: Connection, timeline: int) -> TimelineHistory:
    """The history of the server's `timeline`; no ancestors if the server has no history file for it.

    It is read by a walsender, which requires only REPLICATION; reading the file requires superuser.

    Raises:
        ServerUnavailable, MissingPrivilege: if there is no connection.
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
