"""The size of a segment's row groups: what one task reads at a time, and what memory holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

ROW_GROUP_ROWS: Final = 50_000
ROW_GROUP_BYTES: Final = 32 << 20


def regrouped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches, each within the limits unless a given one exceeds them."""
    held: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        if held and (rows + batch.num_rows > ROW_GROUP_ROWS or size_bytes + batch.nbytes > ROW_GROUP_BYTES):
            yield pa.concat_batches(held)
            held, rows, size_bytes = [], 0, 0
        held.append(batch)
        rows += batch.num_rows
        size_bytes += batch.nbytes
    if held:
        yield pa.concat_batches(held)
