"""The rows of a row group that filters read, shared by the filters of all routing groups.

The filters of several subscriptions usually read the same columns of the same rows. Each column is taken and
parsed once, and so is what filters compute of columns and constants alone, such as `id % 8`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from cdc_replay.arrow.arrays import Int64s
from cdc_replay.filters.expression import Expression
from cdc_replay.filters.sortable_forms import Datum
from cdc_replay.replay.route.tuples import ColumnProjection, ProjectedRows, Tuples

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class FilterInput:
    """The old or the new rows of some changes.

    `texts` are the columns by attribute number that were taken so far; `computed` is what filters have
    computed of them.
    """

    row_count: int
    project: Callable[[ColumnProjection], ProjectedRows]
    texts: dict[int, pa.StringArray] = field(default_factory=dict)
    computed: dict[Expression, Datum] = field(default_factory=dict)

    def columns(self, positions: Mapping[int, int | None]) -> Mapping[int, pa.StringArray]:
        """At least the columns with these positions in the rows (None: NULL), by attribute number."""
        missing = [attnum for attnum in positions if attnum not in self.texts]
        if missing:
            layout = (tuple(positions[attnum] for attnum in missing), 0)
            columns = self.project(ColumnProjection.from_positions([layout])).columns(len(missing))
            self.texts.update(zip(missing, columns, strict=True))
        return self.texts


@dataclass(frozen=True, slots=True)
class FilterInputs:
    """The old and the new rows of the changes at `rows`.

    What was not sent of a new row is filled from the old one (R4.4).
    """

    rows: Int64s
    old: FilterInput
    new: FilterInput

    @classmethod
    def of_rows(cls, tuples: Tuples, rows: Int64s, routes: Int64s) -> Self:
        """Of the changes at `rows`; a projection has a layout for each of the `routes`."""
        everything = np.ones(len(rows), dtype=np.bool_)

        def project_old(projection: ColumnProjection) -> ProjectedRows:
            return tuples.rows_before(rows, routes, projection, included=tuples.has_old[rows])

        def project_new(projection: ColumnProjection) -> ProjectedRows:
            return tuples.new_rows(rows, routes, projection, included=everything, fill=everything)

        return cls(rows, FilterInput(len(rows), project_old), FilterInput(len(rows), project_new))


@dataclass(frozen=True, slots=True)
class SharedInputs:
    """The inputs of a row group by the layout of their table: those that were asked for last."""

    tuples: Tuples
    by_layout: dict[Hashable, FilterInputs] = field(default_factory=dict)

    def of(self, layout: Hashable, rows: Int64s) -> FilterInputs:
        """The inputs of the changes at `rows`; `layout` tells which columns their tuples have, and where."""
        known = self.by_layout.get(layout)
        if known is None or not np.array_equal(known.rows, rows):
            known = self.by_layout[layout] = FilterInputs.of_rows(self.tuples, rows, np.zeros_like(rows))
        return known
