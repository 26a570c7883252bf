"""Changes of other origins in the log, which a subscription with `origin: none` does not apply (R8.19).

Where both sides write, these are mostly the subscriber's own: they have come back by the subscription in the
other direction. What the publisher itself did to such a row before is not what the subscriber holds.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.segment import read_columns
from cdc_replay.model.frames import ChangeKind
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import RelationId

_COLUMNS: Final = ("commit_lsn", "relation_id", "kind", "origin")


def last_of_other_origins(change_log: ChangeLog, window: Window) -> dict[RelationId | None, Lsn]:
    """By leaf, the last transaction of the window with a change of another origin; None: with a TRUNCATE.

    Raises:
        ChangeLogDamaged: if the log cannot be read.
    """
    kinds = pa.array([kind.value for kind in ChangeKind])
    last: dict[RelationId | None, Lsn] = {}
    for group in change_log.segments(window):
        messages = read_columns(group, _COLUMNS, window)
        is_other = pc.and_(pc.is_valid(messages["origin"]), pc.is_in(messages["kind"], value_set=kinds))
        commits = messages.filter(is_other).group_by("relation_id").aggregate([("commit_lsn", "max")])
        for row in commits.to_pylist():
            leaf = None if row["relation_id"] is None else RelationId(row["relation_id"])
            last[leaf] = max(last.get(leaf, window.after), Lsn(row["commit_lsn_max"]))
    return last
