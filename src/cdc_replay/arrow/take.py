"""Rows of batches in another order, with a compiled loop that copies the texts of a list at once.

Arrow's own `take` copies texts one by one, and joins the chunks of a chunked table on each call: that was a
third of the CPU time that workers spend on a change.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from cdc_replay.arrow.arrays import (
    Int64s,
    is_valid,
    offsets_from_lengths,
    string_array,
    text_buffers,
    text_lists,
)

_TEXTS: Final = pa.list_(pa.string())
_MOST_BYTES: Final = 2**31 - 1
"""The largest 32-bit offset."""


def take_rows(batch: pa.RecordBatch, rows: Int64s) -> pa.RecordBatch:
    """The `rows` of a batch, in their order; as `batch.take`.

    Raises:
        pyarrow.ArrowInvalid: if the texts of a column are more than 2 GiB.
    """
    row_array = pa.array(rows)
    columns = [
        take_lists(column, rows) if column.type == _TEXTS else column.take(row_array)
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def take_lists(lists: pa.ListArray, rows: Int64s) -> pa.ListArray:
    """The `rows` of lists of texts, in their order; as `lists.take`.

    Raises:
        pyarrow.ArrowInvalid: if their texts are more than 2 GiB.
    """
    starts = lists.offsets.to_numpy()
    values = lists.values
    offsets, data = text_buffers(values)
    firsts, lasts = starts[rows], starts[rows + 1]
    counts, sizes = lasts - firsts, offsets[lasts].astype(np.int64) - offsets[firsts]
    size, count = int(sizes.sum()), int(counts.sum(dtype=np.int64))
    if max(size, count) > _MOST_BYTES:
        raise pa.ArrowInvalid(f"{size} bytes of {count} texts exceed the limit of an array")
    list_offsets = offsets_from_lengths(counts)
    text_offsets = np.zeros(count + 1, dtype=np.int32)
    text_data = np.empty(size, dtype=np.uint8)
    # Not at the top: the driver only plans, and need not load or compile the kernel.
    from cdc_replay.arrow.list_kernels import copy_texts  # noqa: PLC0415

    copy_texts(firsts, lasts, offsets, data, text_offsets, text_data)
    valid = np.ones(count, dtype=np.bool_)
    if values.null_count:
        valid = is_valid(values)[np.repeat(firsts - list_offsets[:-1], counts) + np.arange(count)]
    texts = string_array(text_offsets, text_data, valid)
    return text_lists(list_offsets, texts, is_valid(lists)[rows])
