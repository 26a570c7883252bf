"""Named points at which tests kill or fail the process.

`CDC_REPLAY_FAILPOINT=name` kills the process (SIGKILL) when it reaches that point; `name=error` raises
`FailpointReached` there instead; `name=stop` stops the process (SIGSTOP) until somebody lets it go on, so
that the world can change around it; `name@3` acts at the third time only. Without the variable a point costs
one dictionary look-up. The names in use are in `FAILPOINTS`, so that a test of a name that does not exist
fails.
"""

from __future__ import annotations

import collections
import os
import signal
import threading
from typing import Final

VARIABLE: Final = "CDC_REPLAY_FAILPOINT"

FAILPOINTS: Final[dict[str, str]] = {
    "capture.after_peek": "changes are read, nothing is written",
    "capture.after_segment": "the data file is durable, no commit names it",
    "capture.after_roots": "the data file also has what second peeks showed, no commit names it",
    "capture.after_definitions": "relations and definitions are in the log, no commit names the data file",
    "capture.after_commit": "the change log holds the changes, the slot still does too",
    "capture.after_advance": "the slot has moved",
    "compaction.after_segment": "a merged segment is durable, no commit names it",
    "compaction.after_commit": "the merged segment is in the log, those that it replaces are still files",
    "prune.after_commit": "segments are out of the log, they are still files",
    "snapshot.after_export": "the snapshot is exported, no row is copied",
    "snapshot.mid_copy": "a chunk is copied, the table is not complete",
    "snapshot.after_chunk": "a chunk of a table is staged, others are not",
    "snapshot.after_late": "what the log has touched is read again at the fence, nothing is visible",
    "snapshot.before_swap": "all chunks are staged, the table is not visible",
    "snapshot.after_table": "one table is complete and recorded",
    "reconcile.after_digests": "the rows that can differ are known, none is staged",
    "reconcile.after_staging": "the rows that can differ are staged in temporary tables, nothing is merged",
    "reconcile.mid_merge": "a table is merged, nothing is committed",
    "reconcile.before_commit": "all tables are merged, nothing is committed",
    "reconcile.after_commit": "rows and states are committed",
    "validate.after_fence": "both sides are open at one position, nothing is compared",
    "validate.after_digests": "the digests of a table are known, its differences are not",
    "fill.after_fence": "the log reaches the fence that unsent values are read at, nothing is staged",
    "fill.after_read": "unsent values are read, nothing is staged",
    "replay.mid_staging": "an executor has sent net changes, its COPY is open",
    "replay.after_staging": "net changes are staged, nothing is merged",
    "replay.mid_merge": "some tables are merged, nothing is committed",
    "replay.before_commit": "all is merged, nothing is committed",
    "replay.after_commit": "rows and progress are committed, staging is left behind",
    "parking.after_park": "a subscription or a table is parked, nobody is told",
    "resume.before_commit": "what was parked is made to go on, nothing is committed",
    "resume.after_commit": "what was parked goes on, nobody is told",
    "backfill.after_state": "another database has a state for the backfill, no row is applied",
    "validate.after_report": "the report is written, the result is not recorded",
    "teardown.after_slot": "the slot is gone, capture publications and event triggers are there",
    "teardown.after_publications": "slot and capture publications are gone, the event triggers are there",
    "teardown.after_staging": "what killed runs have staged is gone, the state is there",
    "teardown.after_state": "the state is gone, replication origins are there",
}
"""Name → what is durable when the process dies there."""

_reached: collections.Counter[str] = collections.Counter()


class FailpointReached(RuntimeError):
    """Raised at a failpoint that is set to `error`."""


def failpoint(name: str) -> None:
    """Die here if the environment says so.

    Raises:
        FailpointReached: if the point is set to `error`.
        KeyError: if `name` is not in `FAILPOINTS`.
    """
    setting = os.environ.get(VARIABLE)
    if setting is None:
        return
    _ = FAILPOINTS[name]
    wanted, _, action = setting.partition("=")
    wanted, _, turn = wanted.partition("@")
    if wanted != name:
        return
    _reached[name] += 1
    if _reached[name] != int(turn or 1):
        return
    if action == "error":
        raise FailpointReached(name)
    # To this thread: a signal to the process is taken by any, and this one may have gone on by then.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP if action == "stop" else signal.SIGKILL)
