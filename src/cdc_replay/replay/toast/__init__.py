"""Values that the publisher did not send, for rows that enter a subscription (R4.6, R11.1).

An UPDATE that moves a row into a row filter becomes an INSERT. Where the new tuple says "unchanged, not sent"
(`u`), and the old one has the key only, a native subscriber stores NULL. Here the row is tracked through the
unfiltered changes of its leaf, by its replica identity, whatever a subscription sees of them:

    … I(b = x) … U(b = u) … U(b = u, enters) … U(b = u) … | F
        ▲ earlier: the value          later, unchanged ──▶ the publisher's row at F has it

| the column was sent             | its value at the entry is                                               |
|---------------------------------|-------------------------------------------------------------------------|
| before the entry, by this row   | that of the last such change                                            |
| never in the history            | that of the row at the fence F, where the history ends                  |
| only after the entry            | given up; not needed if the subscription sees that later change         |
| never, and the row is gone at F | given up; not needed if the subscription sees the row leave             |
| never, and the column is gone   | given up, also if the publisher has rewritten the table since           |
| ambiguously                     | lost: under another type, identity, or name without a catalog of it     |

Each value is proved, not guessed: another row with the same key shows in the history by an INSERT, or by an
UPDATE that moves a row to the key. The subscriber's own rows are no source: replay makes them the publisher's
versions, and cannot assume that they are. A lost value stays `u`, and `apply` refuses to insert it. A value
that is given up (`GIVEN_UP`) no longer exists on the publisher, nor in changes that the subscription will
see.

Nothing is written: after a kill, the next process reads again.
"""

from cdc_replay.replay.toast.resolve import ChangeHistory, ResolvedValues, resolve_values
from cdc_replay.replay.toast.tracked_leaf import Shape, TrackedLeaf, TupleColumn, tuple_columns

__all__ = [
    "ChangeHistory",
    "ResolvedValues",
    "Shape",
    "TrackedLeaf",
    "TupleColumn",
    "resolve_values",
    "tuple_columns",
]
