"""Values that the publisher did not send, for rows that enter a subscription (R4.6, R11.1).

An UPDATE that brings a row into a filter becomes an INSERT. Where the new tuple says "unchanged, not sent"
(`u`), and the old one has the key only, a native subscriber stores NULL. Here the row itself is followed
through the unfiltered changes of its leaf, by its replica identity, whatever a subscription sees of them:

    … I(b = x) … U(b = u) … U(b = u, enters) … U(b = u) … | F
        ▲ earlier: the value          later, unchanged ──▶ the publisher's row at F has it

| the column was sent             | its value at the entry is                                               |
|---------------------------------|-------------------------------------------------------------------------|
| before the entry, by this row   | that of the last such change                                            |
| never in the history            | that of the row at the fence F, where the history ends                  |
| only after the entry            | given up; it is not needed if the subscription sees that later change   |
| never, and the row is gone at F | given up; it is not needed if the subscription sees the row go          |
| never, and the column is gone   | given up, also where the publisher has rewritten the table since        |
| in a way that cannot be told    | lost: under another type, identity, or name without a catalog of it     |

This proves each value, it does not guess: a row that only has the same key again is another row, because an
INSERT, or an UPDATE that moves a row to the key, is in the history. The subscriber's own rows are no source:
that a row there is the same version as the publisher's is what replay brings about, not what it can assume.
What is lost stays `u`, and `apply` refuses to insert it. What is given up (`GIVEN_UP`) is nowhere, and never
will be again, neither on the publisher nor in what the subscription can still see of it.

Nothing is written anywhere. A process that is killed here has read, and the next one reads again.
"""

from cdc_replay.replay.toast.resolve import ChangeHistory, ChangePosition, ResolvedValues, resolve_values
from cdc_replay.replay.toast.tracked_leaf import Shape, TrackedLeaf, TupleColumn, tuple_columns

__all__ = [
    "ChangeHistory",
    "ChangePosition",
    "ResolvedValues",
    "Shape",
    "TrackedLeaf",
    "TupleColumn",
    "resolve_values",
    "tuple_columns",
]
