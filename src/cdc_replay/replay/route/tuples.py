"""The old and new rows of a batch of changes, and projections of them.

All values of a batch are in one array: those of the new rows, those of the old ones, then the leaves' oids,
one per route. A projection is a list of indexes into it: reordering columns, omitting some and filling unsent
values from the old row are arithmetic, and Arrow copies the values once.

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
    """Per route, the columns of a projection, in order.

    Each is a position in the leaf's tuple; `MISSING` where this relation version does not have the column;
    `LEAF` for the leaf's oid. Route `i` has `positions[starts[i]:starts[i] + widths[i]]`; `is_whole[i]` where
    that is the leaf's tuple.
    """

    starts: Int64s
    widths: Int64s
    positions: Int64s
    is_whole: Bools

    @property
    def has_leaf(self) -> bool:
        """Whether a route's columns include a leaf's oid."""
        return bool((self.positions == LEAF).any())

    @classmethod
    def from_positions(cls, layouts: Sequence[tuple[Positions, int]]) -> Self:
        """Of positions (None: `MISSING`) and the width of the leaf's tuple, by route id."""
        widths = np.array([len(columns) for columns, _ in layouts], dtype=np.int64)
        flat = [MISSING if position is None else position for columns, _ in layouts for position in columns]
        return cls(
            starts=np.concatenate([[0], np.cumsum(widths)])[:-1].astype(np.int64),
            widths=widths,
            positions=np.array(flat, dtype=np.int64),
            is_whole=np.array([columns == tuple(range(width)) for columns, width in layouts], dtype=np.bool_),
        )


@dataclass(frozen=True, slots=True)
class Tuples:
    """The old and new rows of a batch of CHANGES.

    `new_at` and `old_at` are the indexes of each row's first value in `values`, and of its kind in `kinds`.
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
    """The index of the first route's leaf in `values`, if it has leaves."""

    @classmethod
    def from_changes(cls, changes: pa.RecordBatch) -> Self:
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
        """The same rows, with the leaves' oids by route."""
        return dataclasses.replace(
            self, values=pa.concat_arrays([self.values, pa.array(leaves, pa.string())])
        )

    def new_rows(
        self, rows: Int64s, routes: Int64s, projection: ColumnProjection, *, included: Bools, fill: Bools
    ) -> ProjectedRows:
        """The new rows of `rows` where they are `included`, each projected as its route says.

        Where `fill`, unsent values are taken from the old row (R4.4): the kind of a value that the old row
        has becomes `t`; that of a value that neither row has stays `u`.
        """
        starts = self.new_at[rows]
        projected = ProjectedRows.project(self, starts, routes, projection, included & self.has_new[rows])
        if not self.has_unsent:
            return projected
        is_filled = (fill & self.has_old[rows])[projected.rows] & (projected.kinds == _UNSENT)
        from_old = (self.old_at - self.new_at)[rows][projected.rows]
        indexes = np.where(is_filled, projected.indexes + from_old, projected.indexes)
        is_text = is_filled & (self.kinds[np.where(is_filled, indexes, 0)] == _TEXT)
        kinds = np.where(is_text, np.uint8(_TEXT), projected.kinds)
        return dataclasses.replace(projected, indexes=indexes, kinds=kinds)

    def rows_before(
        self, rows: Int64s, routes: Int64s, projection: ColumnProjection, *, included: Bools
    ) -> ProjectedRows:
        """What a change finds its row by: the old row, the new one where no old row was sent (R1.6)."""
        starts = np.where(self.has_old, self.old_at, self.new_at)[rows]
        return ProjectedRows.project(
            self, starts, routes, projection, included & (self.has_old | self.has_new)[rows]
        )


@dataclass(frozen=True, slots=True)
class ProjectedRows:
    """Lists of values: list `i` is elements `offsets[i]` to `offsets[i + 1]`, NULL unless `included[i]`.

    Per element, `rows` is the position of its list, `indexes` that of its value in `values`, below 0 for
    none.
    """

    values: pa.StringArray
    included: Bools
    offsets: Int32s
    rows: Int64s
    indexes: Int64s
    kinds: Bytes

    @classmethod
    def project(
        cls, tuples: Tuples, starts: Int64s, routes: Int64s, projection: ColumnProjection, included: Bools
    ) -> Self:
        """The columns of `projection` from the tuples that start at `starts`."""
        widths = np.where(included, projection.widths[routes], 0)
        offsets = offsets_from_lengths(widths)
        rows = np.repeat(np.arange(len(routes)), widths)
        within = np.arange(len(rows)) - offsets[:-1][rows]
        positions = projection.positions[projection.starts[routes][rows] + within]
        is_column = positions >= 0
        indexes = np.where(is_column, starts[rows] + positions, positions)
        kinds = np.full(len(rows), _NOT_SENT, dtype=np.uint8)
        kinds[is_column] = tuples.kinds[indexes[is_column]]
        indexes = np.where(positions == LEAF, tuples.leaves_at + routes[rows], indexes)
        return cls(tuples.values, included, offsets, rows, indexes, kinds)

    @property
    def lists(self) -> pa.ListArray:
        """The values."""
        values = self.values.take(pa.array(self.indexes, mask=self.indexes < 0))
        return text_lists(self.offsets, values, self.included)

    def columns(self, width: int) -> list[pa.StringArray]:
        """The values as `width` columns, for included lists of that length; NULL for the others."""
        indexes = np.full((len(self.included), width), MISSING)
        indexes[self.included] = self.indexes.reshape(int(self.included.sum()), width)
        return [
            self.values.take(pa.array(column, mask=column < 0)) for column in np.ascontiguousarray(indexes.T)
        ]

    @property
    def kind_texts(self) -> pa.StringArray:
        """Their kinds."""
        return string_array(self.offsets, self.kinds, self.included)


def _lengths(lists: pa.ListArray) -> Int64s:
    return int_array(pc.list_value_length(lists))
