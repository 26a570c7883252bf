"""The old and new rows of a batch of changes, and the lists that are made of them.

All values of a batch lie in one array: first those of the new rows, then those of the old ones, at last the
leaves' oids, one per route. A list that
is to be made is a list of places in it, so that reordering columns, leaving some out and filling unsent
values from the old row are arithmetic, and the values are copied once, by Arrow.

    row         0             1                     2
    new         a b c         d -                   (none)      kinds  ttt  tu
    old         (none)        e f                   g h                tt   tn
    all values  a b c d - e f g h
    filled      0 1 2         3 6                                      row 1's second value is the old row's
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import (
    Bools,
    Bytes,
    Int32s,
    Int64s,
    ascii_bytes,
    int_array,
    is_valid,
    offsets_from_lengths,
    string_array,
    text_lists,
)
from cdc_replay.replay.route.attribute_map import NOT_SENT, Positions

_UNSENT: Final = ord("u")
_TEXT: Final = ord("t")
_NOT_SENT: Final = ord(NOT_SENT)

MISSING: Final = -1
LEAF: Final = -2


@dataclass(frozen=True, slots=True)
class ColumnProjection:
    """Per route, which of the leaf's columns a list holds, in order.

    Each is a position in the leaf's tuple; `MISSING` where this relation version does not have the column;
    `LEAF` for the leaf's oid in place of a column.

    Route `i` has `positions[starts[i]:starts[i] + widths[i]]`; `is_whole[i]` where that is the leaf's tuple.
    """

    starts: Int64s
    widths: Int64s
    positions: Int64s
    is_whole: Bools

    @property
    def has_leaf(self) -> bool:
        """Whether a list has a leaf's oid."""
        return bool((self.positions == LEAF).any())

    @classmethod
    def of(cls, layouts: Sequence[tuple[Positions, int]]) -> Self:
        """Positions (None: `MISSING`) and width of the leaf's tuple, by number of the route."""
        widths = np.array([len(wanted) for wanted, _ in layouts], dtype=np.int64)
        flat = [MISSING if position is None else position for wanted, _ in layouts for position in wanted]
        return cls(
            starts=np.concatenate([[0], np.cumsum(widths)])[:-1].astype(np.int64),
            widths=widths,
            positions=np.array(flat, dtype=np.int64),
            is_whole=np.array([wanted == tuple(range(width)) for wanted, width in layouts], dtype=np.bool_),
        )


@dataclass(frozen=True, slots=True)
class Tuples:
    """The old and new rows of a batch of CHANGES.

    `new_at` and `old_at` are the places of each row's first value in `values`, and of its kind in `kinds`.
    """

    values: pa.StringArray
    kinds: Bytes
    new_at: Int64s
    old_at: Int64s
    has_new: Bools
    has_old: Bools
    has_unsent: bool
    """Whether any new row has a value that was not sent."""
    leaves_at: int
    """The place of the first route's leaf in `values`, where there are any."""

    @classmethod
    def of(cls, changes: pa.RecordBatch) -> Self:
        """Of a batch with the columns `old`, `old_kinds`, `new`, `new_kinds`."""
        new, old = changes["new"], changes["old"]
        new_values, old_values = new.flatten(), old.flatten()
        new_kinds = ascii_bytes(pc.fill_null(changes["new_kinds"], ""))
        old_kinds = ascii_bytes(pc.fill_null(changes["old_kinds"], ""))
        return cls(
            values=pa.concat_arrays([new_values, old_values]),
            kinds=np.concatenate([new_kinds, old_kinds]),
            new_at=offsets_from_lengths(_lengths(new))[:-1].astype(np.int64),
            old_at=offsets_from_lengths(_lengths(old))[:-1].astype(np.int64) + len(new_values),
            has_new=is_valid(new),
            has_old=is_valid(old),
            has_unsent=bool((new_kinds == _UNSENT).any()),
            leaves_at=len(new_values) + len(old_values),
        )

    def with_leaves(self, leaves: Sequence[str]) -> Tuples:
        """The same, with the leaves' oids by route."""
        return dataclasses.replace(
            self, values=pa.concat_arrays([self.values, pa.array(leaves, pa.string())])
        )

    def new_rows(
        self, rows: Int64s, routes: Int64s, layout: ColumnProjection, *, wanted: Bools, fill: Bools
    ) -> ProjectedRows:
        """The new rows of `rows` where they are `wanted`, each in the layout of its route.

        Where `fill` says so, unsent values are those of the old row (R4.4): the kind of a value that it had
        is `t` then; one that neither row has stays `u`.
        """
        picked = ProjectedRows.of(self, self.new_at[rows], routes, layout, wanted & self.has_new[rows])
        if not self.has_unsent:
            return picked
        is_filled = (fill & self.has_old[rows])[picked.rows] & (picked.kinds == _UNSENT)
        from_old = (self.old_at - self.new_at)[rows][picked.rows]
        places = np.where(is_filled, picked.places + from_old, picked.places)
        is_text = is_filled & (self.kinds[np.where(is_filled, places, 0)] == _TEXT)
        return dataclasses.replace(
            picked, places=places, kinds=np.where(is_text, np.uint8(_TEXT), picked.kinds)
        )

    def rows_before(
        self, rows: Int64s, routes: Int64s, layout: ColumnProjection, *, wanted: Bools
    ) -> ProjectedRows:
        """What a change finds its row by: the old row, the new one where no old row was sent (R1.6)."""
        starts = np.where(self.has_old, self.old_at, self.new_at)[rows]
        return ProjectedRows.of(self, starts, routes, layout, wanted & (self.has_old | self.has_new)[rows])


@dataclass(frozen=True, slots=True)
class ProjectedRows:
    """Lists that were picked: list `i` is elements `offsets[i]` to `offsets[i + 1]`, NULL unless `wanted[i]`.

    Per element, `rows` is the number of its list, `places` where its value is, below 0 if it has none.
    """

    values: pa.StringArray
    wanted: Bools
    offsets: Int32s
    rows: Int64s
    places: Int64s
    kinds: Bytes

    @classmethod
    def of(
        cls, tuples: Tuples, starts: Int64s, routes: Int64s, layout: ColumnProjection, wanted: Bools
    ) -> Self:
        """The columns of `layout` from the tuples that start at `starts`."""
        widths = np.where(wanted, layout.widths[routes], 0)
        offsets = offsets_from_lengths(widths)
        rows = np.repeat(np.arange(len(routes)), widths)
        within = np.arange(len(rows)) - offsets[:-1][rows]
        positions = layout.positions[layout.starts[routes][rows] + within]
        is_column = positions >= 0
        places = np.where(is_column, starts[rows] + positions, positions)
        kinds = np.full(len(rows), _NOT_SENT, dtype=np.uint8)
        kinds[is_column] = tuples.kinds[places[is_column]]
        places = np.where(positions == LEAF, tuples.leaves_at + routes[rows], places)
        return cls(tuples.values, wanted, offsets, rows, places, kinds)

    @property
    def lists(self) -> pa.ListArray:
        """The values."""
        values = self.values.take(pa.array(self.places, mask=self.places < 0))
        return text_lists(self.offsets, values, self.wanted)

    def columns(self, width: int) -> list[pa.StringArray]:
        """The values as columns, where the lists that are wanted have so many; NULL for the others."""
        places = np.full((len(self.wanted), width), MISSING)
        places[self.wanted] = self.places.reshape(int(self.wanted.sum()), width)
        return [self.values.take(pa.array(each, mask=each < 0)) for each in np.ascontiguousarray(places.T)]

    @property
    def kind_texts(self) -> pa.StringArray:
        """Their kinds."""
        return string_array(self.offsets, self.kinds, self.wanted)


def _lengths(lists: pa.ListArray) -> Int64s:
    return int_array(pc.list_value_length(lists))
