"""The loop behind `taking`, compiled."""

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
    firsts: Int32s, lasts: Int32s, offsets: Int32s, data: Bytes, found_offsets: Int32s, found_data: Bytes
) -> None:
    """Copy texts `firsts[i]` to `lasts[i]` for each `i`, into arrays of exactly their size."""
    filled = 0
    element = 0
    for row in range(len(firsts)):
        begin, end = offsets[firsts[row]], offsets[lasts[row]]
        for each in range(firsts[row], lasts[row]):
            element += 1
            found_offsets[element] = filled + offsets[each + 1] - begin
        # Signed indexes could count from the end of an array, which would have to be looked for at each byte.
        source, target = np.uint64(begin), np.uint64(filled)
        for at in range(np.uint64(end - begin)):
            found_data[target + at] = data[source + at]
        filled += end - begin
