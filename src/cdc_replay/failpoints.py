"""Named points at which tests kill or fail the process.

| `CDC_REPLAY_FAILPOINT` | when the process reaches the point                                      |
|------------------------|-------------------------------------------------------------------------|
| `name`                 | it is killed (SIGKILL)                                                  |
| `name=error`           | `FailpointReached` is raised                                            |
| `name=stop`            | it is stopped (SIGSTOP), so that a test can change the world around it  |
| `name@3`               | the same at the third time only; also `name@3=error`                    |

Without the variable a point costs one dictionary look-up. `FAILPOINTS` has all names, so that a test of an
unknown name fails.
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
    "capture.after_roots": "the data file also has the rows of second peeks, no commit names it",
    "capture.after_definitions": "relations and definitions are in the log, no commit names the data file",
    "capture.after_commit": "the change log holds the changes, the slot still does too",
    "capture.after_advance": "the slot has moved",
    "peek.between_pieces": "the first of two pieces of a pull is read, the second is not; nothing is durable",
    "compaction.after_segment": "a merged segment is durable, no commit names it",
    "compaction.after_commit": "the merged segment is in the log, the replaced ones are still files",
    "prune.after_commit": "segments are out of the log, they are still files",
    "snapshot.after_export": "the snapshot is exported, no row is copied",
    "snapshot.mid_copy": "a chunk is copied, the table is not complete",
    "snapshot.after_chunk": "a chunk of a table is staged, others are not",
    "snapshot.after_late": "rows that the log has changed are read again at the fence, nothing is visible",
    "snapshot.before_swap": "all chunks are staged, the table is not visible",
    "snapshot.after_table": "one table is complete and recorded",
    "reconcile.after_digests": "the rows that can differ are known, none is staged",
    "reconcile.after_staging": "the rows that can differ are staged in temporary tables, nothing is merged",
    "reconcile.mid_merge": "a table is merged, nothing is committed",
    "reconcile.before_commit": "all tables are merged, nothing is committed",
    "reconcile.after_commit": "rows and states are committed",
    "validate.after_fence": "both sides are open at one position, nothing is compared",
    "validate.after_digests": "the digests of a table are known, its differences are not",
    "fill.after_fence": "the log reaches the fence at which unsent values are read, nothing is staged",
    "fill.after_read": "unsent values are read, nothing is staged",
    "replay.mid_staging": "an executor has sent net changes, its COPY is open",
    "replay.after_staging": "net changes are staged, nothing is merged",
    "replay.mid_merge": "some tables are merged, nothing is committed",
    "replay.before_commit": "all is merged, nothing is committed",
    "replay.after_commit": "rows and progress are committed, staging tables remain",
    "parking.after_park": "a subscription or a table is parked, nothing is reported",
    "resume.before_commit": "subscription or tables are resumed, nothing is committed",
    "resume.after_commit": "subscription or tables are resumed, nothing is reported",
    "backfill.after_state": "another database has a state for the backfill, no row is applied",
    "validate.after_report": "the report is written, the result is not recorded",
    "certify.after_subscribe": "a native subscription has its slots on the publisher",
    "certify.at_fence": "native is stopped and ours replayed to the same position, nothing is compared",
    "teardown.after_slot": "the slot is dropped, capture publications and event triggers remain",
    "teardown.after_publications": "slot and capture publications are dropped, event triggers remain",
    "teardown.after_staging": "staging of killed runs is dropped, the state remains",
    "teardown.after_state": "the state is removed, replication origins remain",
}
"""Name → what is durable when the process dies there."""

_reached: collections.Counter[str] = collections.Counter()


class FailpointReached(RuntimeError):
    """Raised at a failpoint that is set to `error`."""


def failpoint(name: str) -> None:
    """Kill, stop or fail here if the environment says so.

    Raises:
        FailpointReached: if the point is set to `error`.
        KeyError: if `name` is not in `FAILPOINTS`.
    """
    setting = os.environ.get(VARIABLE)
    if setting is None:
        return
    _ = FAILPOINTS[name]
    target, _, action = setting.partition("=")
    target, _, occurrence = target.partition("@")
    if target != name:
        return
    _reached[name] += 1
    if _reached[name] != int(occurrence or 1):
        return
    if action == "error":
        raise FailpointReached(name)
    # To this thread: another one may handle a signal to the process, while this one continues.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP if action == "stop" else signal.SIGKILL)
