"""The UPDATE transformation (R4.1-R4.7).

| old row passes | new row passes | the subscriber sees | with                                  |
|----------------|----------------|---------------------|---------------------------------------|
| no             | no             | nothing             |                                       |
| no             | yes            | INSERT              | the new row, filled from the old one  |
| yes            | no             | DELETE              | the old row                           |
| yes            | yes            | UPDATE              | the old row and the new one, as sent  |

An UPDATE without an old tuple has not changed its key, and a filter of an UPDATE reads key columns only
(R5.6), so the new row's answer holds for both (R4.3). The INSERT or DELETE is sent even if the publication
does not publish that action; only the filter for UPDATE is evaluated (R4.1).

A value of such an INSERT that neither tuple has stays `u`: native replication stores NULL for it (R4.6). The
changes are routed a second time with the value (`replay.toast`), and `apply` inserts no row without it.

Old tuples depend on the leaf's own replica identity, which the log has. If that of the published root
differs, the native letter K or O contradicts the content (R1.7), and under a FULL root native replication
searches rows by values that the leaves did not send (R8.11). Here a whole old row fills every value, whatever
the root's letter, and a key is used as a key.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cdc_replay.arrow.arrays import Bools, Bytes
from cdc_replay.model.frames import ChangeKind

# R4.4. Key: (old row passes, new row passes).
UPDATE_OUTCOME: Final[dict[tuple[bool, bool], ChangeKind | None]] = {
    (False, False): None,
    (False, True): ChangeKind.INSERT,
    (True, False): ChangeKind.DELETE,
    (True, True): ChangeKind.UPDATE,
}

_OUTCOMES: Final = np.array(
    [
        [ord(kind.value) if (kind := UPDATE_OUTCOME[old, new]) else 0 for new in (False, True)]
        for old in (False, True)
    ],
    dtype=np.uint8,
)


def update_outcomes(old_passes: Bools, new_passes: Bools) -> Bytes:
    """The kind of change that each UPDATE becomes, as `ChangeKind`'s byte; 0 for nothing.

    A filter that yields NULL does not pass (R3.1), and an UPDATE without an old tuple is given `old_passes =
    new_passes` by the caller (R4.3).
    """
    return _OUTCOMES[old_passes.astype(np.intp), new_passes.astype(np.intp)]
