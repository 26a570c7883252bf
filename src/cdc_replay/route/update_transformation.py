"""The UPDATE transformation (R4.1-R4.7).

| old row passes | new row passes | the subscriber sees | with                                  |
|----------------|----------------|---------------------|---------------------------------------|
| no             | no             | nothing             |                                       |
| no             | yes            | INSERT              | the new row, filled from the old one  |
| yes            | no             | DELETE              | the old row                           |
| yes            | yes            | UPDATE              | the old row and the new one, as sent  |

An UPDATE without an old tuple has not changed its key, and a filter of an UPDATE reads key columns only
(R5.6), so the new row's answer holds for both (R4.3). The INSERT or DELETE is sent even where the publication
does not publish that action; only the filter for UPDATE is asked (R4.1).

A value of such an INSERT that neither tuple has stays `u`: native stores NULL for it (R4.6). What it is comes
with the changes that are routed a second time (`fill`), and `apply` inserts no row without it.

Old tuples are what the leaf's own replica identity makes them: the log is in leaf identity. Where that of the
published root is another, native's letter K or O says one thing and its content another (R1.7), and under a
root that is FULL native looks for rows by values that its leaves did not send (R8.11). Here a whole
old row fills every value, whatever the root's letter, and a key is used as a key.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F

from cdc_replay.model.change import ChangeKind

# R4.4. Key: (old row passes, new row passes).
UPDATE_OUTCOME: Final[dict[tuple[bool, bool], ChangeKind | None]] = {
    (False, False): None,
    (False, True): ChangeKind.INSERT,
    (True, False): ChangeKind.DELETE,
    (True, True): ChangeKind.UPDATE,
}


def update_outcome(old_passes: Column, new_passes: Column) -> Column:
    """The kind of change that an UPDATE becomes, as a string; NULL for nothing.

    Both arguments are boolean and never NULL: a filter that yields NULL does not pass (R3.1), and an UPDATE
    without an old tuple is given `old_passes = new_passes` by the caller (R4.3).
    """
    outcome = F.lit(None).cast("string")
    for (old, new), kind in UPDATE_OUTCOME.items():
        passes = (old_passes == F.lit(old)) & (new_passes == F.lit(new))
        outcome = F.when(passes, F.lit(kind.value if kind else None).cast("string")).otherwise(outcome)
    return outcome


def filled_values(old: Column, new: Column, new_kinds: Column) -> Column:
    """The new row with values that were not sent (`u`) taken from the old one, where there is one (R4.4)."""
    filled = F.transform(
        new, lambda value, index: F.when(_kind_at(new_kinds, index) == "u", old[index]).otherwise(value)
    )
    return F.when(_needs_filling(old, new_kinds), filled).otherwise(new)


def filled_kinds(old: Column, old_kinds: Column, new_kinds: Column) -> Column:
    """The kinds of `filled_values`: a `u` that the old row had a value for is `t` now, others stay `u`."""
    count = F.length(new_kinds)
    characters = F.transform(
        F.sequence(F.lit(0), count - 1),
        lambda index: F.when(
            (_kind_at(new_kinds, index) == "u") & (_kind_at(old_kinds, index) == "t"), F.lit("t")
        ).otherwise(_kind_at(new_kinds, index)),
    )
    return F.when(_needs_filling(old, new_kinds), F.array_join(characters, "")).otherwise(new_kinds)


def _needs_filling(old: Column, new_kinds: Column) -> Column:
    return old.isNotNull() & new_kinds.contains("u")


def _kind_at(kinds: Column, index: Column) -> Column:
    return F.substring(kinds, index + 1, F.lit(1))
