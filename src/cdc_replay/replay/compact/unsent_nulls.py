"""Net changes that would insert rows without unsent values (R4.6), and NULL in their place.

| kind in an INSERT            | becomes                                                              |
|------------------------------|----------------------------------------------------------------------|
| `GIVEN_UP`                   | NULL: row or value does not exist any more                           |
| `u`, entered where NULL is   | NULL, as a native worker stores it                                   |
| accepted                     |                                                                      |
| `u` otherwise                | stays; staging refuses it                                            |

In an UPDATE both keep the subscriber's value, as in the fold. A backfill stores no NULL: both become `u`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import Int64s, booleans, int_array
from cdc_replay.model.frames import GIVEN_UP, NetKind
from cdc_replay.model.lsn import Lsn, Window

KEYS_SHOWN: Final = 5
"""Maximum number of keys of a table in a log line."""


@dataclass(frozen=True, slots=True)
class EnteredRow:
    """A row that enters without values: its key, and the kinds of its values."""

    target: int
    commit_lsn: Lsn
    key: tuple[str | None, ...]
    kinds: str


@dataclass(slots=True)
class MissingValues:
    """Rows that are inserted without values: `rows` is their number.

    `nulls` are the values that became NULL, by target, `first` the first of their rows. `unknown` is the
    number of rows with a value that is neither given up nor accepted, `first_unknown` the first of these.
    """

    rows: int = 0
    nulls: Counter[int] = field(default_factory=Counter)
    first: dict[int, list[EnteredRow]] = field(default_factory=dict)
    unknown: int = 0
    first_unknown: list[EnteredRow] = field(default_factory=list)

    def add(self, other: MissingValues) -> None:
        """Add those of other net changes."""
        self.rows += other.rows
        self.nulls += other.nulls
        self.unknown += other.unknown
        self.first_unknown = _first([*self.first_unknown, *other.first_unknown], 1)
        for target, rows in other.first.items():
            self.first[target] = _first([*self.first.get(target, ()), *rows], KEYS_SHOWN)

    def add_row(self, row: EnteredRow, nulls: int, *, is_unknown: bool) -> None:
        """Add a row with so many NULLs."""
        first = {row.target: [row]} if nulls else {}
        unknown = [row] if is_unknown else []
        self.add(MissingValues(1, Counter({row.target: nulls}), first, len(unknown), unknown))


def _first(rows: Iterable[EnteredRow], count: int) -> list[EnteredRow]:
    """The first rows in commit order."""
    # NULLs cannot be compared.
    return sorted(rows, key=lambda row: (row.commit_lsn, row.target, [text or "" for text in row.key]))[
        :count
    ]


@dataclass(frozen=True, slots=True)
class NullRule:
    """Where NULL is stored for values that are not found in a window; picklable.

    `targets` are those of unsent values. `accepted` is, by target, the commit up to which a row may have
    entered; None: NULL is stored nowhere.
    """

    window: Window
    targets: frozenset[int]
    accepted: Mapping[int, Lsn] | None = None

    def ordinals(self, changes: pa.RecordBatch) -> Int64s:
        """The positions of changes (ROUTED) in the window, as one number each; they tell the commit.

        The bits that the commit leaves are enough for a billion changes of one transaction in a window of
        less than 8 GiB of WAL, and for eight million in one of less than 1 TiB. Changes beyond that share one
        number.
        """
        commits = int_array(changes["commit_lsn"]) - self.window.after.value
        return (commits << self._seq_bits) + np.minimum(int_array(changes["seq"]), (1 << self._seq_bits) - 1)

    @property
    def _seq_bits(self) -> int:
        return 63 - (self.window.upto.value - self.window.after.value).bit_length()

    def apply(self, net: Iterable[pa.RecordBatch], missing: MissingValues) -> Iterator[pa.RecordBatch]:
        """`net` (NET) with NULL for values where that is stored; adds the rows that lack values to `missing`.

        Those of `targets` do not carry contingent changes any more: folded again, they would lack the values.
        Each batch with INSERTs is of one target.
        """
        for batch in net:
            if batch.num_rows and batch["target"][0].as_py() not in self.targets:
                yield batch
                continue
            lacking = pc.match_substring_regex(batch["kinds"], f"[u{GIVEN_UP}]")
            lacking = booleans(pc.and_(pc.equal(batch["kind"], NetKind.INSERT.value), lacking))
            kinds = pc.replace_substring(batch["kinds"], GIVEN_UP, "u")
            if lacking.any():
                rows = batch.filter(pa.array(lacking)).to_pylist()
                inserted = [self._insert_kinds(row, missing) for row in rows]
                kinds = pc.replace_with_mask(kinds, pa.array(lacking), pa.array(inserted, pa.string()))
            column = batch.schema.get_field_index("kinds")
            yield batch.set_column(column, "kinds", kinds).replace_schema_metadata(None)

    def _insert_kinds(self, row: Mapping[str, Any], missing: MissingValues) -> str:
        kinds: str = row["kinds"]
        entered = EnteredRow(row["target"], self._entry_lsn(row), tuple(row["base_key"]), kinds)
        becomes_null = GIVEN_UP
        if self.accepted is None:
            becomes_null = ""
        elif entered.commit_lsn <= self.accepted.get(entered.target, self.window.after):
            becomes_null = f"{GIVEN_UP}u"
        stored = "".join("n" if kind in becomes_null else kind for kind in kinds).replace(GIVEN_UP, "u")
        nulls = sum(kind in becomes_null for kind in kinds)
        missing.add_row(entered, nulls, is_unknown="u" in stored)
        return stored

    def _entry_lsn(self, row: Mapping[str, Any]) -> Lsn:
        if row["insert_ordinal"] is None:
            return Lsn(row["last_lsn"])
        return Lsn(self.window.after.value + (row["insert_ordinal"] >> self._seq_bits))
