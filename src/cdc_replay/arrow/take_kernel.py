"""The compiled loop of `arrow.take`."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from cdc_replay.arrow.arrays import Bytes, Int32s
from cdc_replay.arrow.jit import compiled

_BYTES: Final = types.Array(types.uint8, 1, "C", readonly=True)
_INT32S: Final = types.Array(types.int32, 1, "C", readonly=True)
_MUTABLE_BYTES: Final = types.Array(types.uint8, 1, "C")
_MUTABLE_INT32S: Final = types.Array(types.int32, 1, "C")


@compiled(types.void(_INT32S, _INT32S, _INT32S, _BYTES, _MUTABLE_INT32S, _MUTABLE_BYTES))
def copy_texts(
    firsts: Int32s, lasts: Int32s, offsets: Int32s, data: Bytes, target_offsets: Int32s, target_data: Bytes
) -> None:
    """Copy texts `firsts[i]` to `lasts[i]` for each `i` into arrays of exactly their size."""
    filled = 0
    target_index = 0
    for row in range(len(firsts)):
        begin, end = offsets[firsts[row]], offsets[lasts[row]]
        for index in range(firsts[row], lasts[row]):
            target_index += 1
            target_offsets[target_index] = filled + offsets[index + 1] - begin
        # Unsigned: with signed indexes, numba checks at each byte whether they count from the end.
        source, target = np.uint64(begin), np.uint64(filled)
        for position in range(np.uint64(end - begin)):
            target_data[target + position] = data[source + position]
        filled += end - begin
