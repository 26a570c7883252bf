"""The compiled loops of `arrow.take` and `arrow.list_comparison`."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numba import types

from cdc_replay.arrow.arrays import Bools, Bytes, Int32s
from cdc_replay.arrow.jit import BOOLS, BYTES, INT32S, MUTABLE_BYTES, MUTABLE_INT32S, compiled, inlined

_MUTABLE_BOOLS: Final = types.Array(types.boolean, 1, "C")
_LISTS: Final = types.Tuple((INT32S, INT32S, BYTES, BOOLS))

ListBuffers: TypeAlias = tuple[Int32s, Int32s, Bytes, Bools]
"""Lists of texts: the offsets of the lists, those of the texts, their bytes, and which texts are not NULL."""


@compiled(types.void(INT32S, INT32S, INT32S, BYTES, MUTABLE_INT32S, MUTABLE_BYTES))
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


@inlined
def _is_same_text(left: ListBuffers, index: int, right: ListBuffers, other_index: int) -> bool:
    valid, other_valid = left[3][index], right[3][other_index]
    if not (valid and other_valid):
        return bool(valid == other_valid)
    # Unsigned: with signed indexes, numba checks at each byte whether they count from the end.
    start, other_start = np.uint64(left[1][index]), np.uint64(right[1][other_index])
    size = np.uint64(left[1][index + 1]) - start
    if size != np.uint64(right[1][other_index + 1]) - other_start:
        return False
    position = np.uint64(0)
    while position < size and left[2][start + position] == right[2][other_start + position]:
        position += np.uint64(1)
    return bool(position == size)


@compiled(types.void(BOOLS, _LISTS, _LISTS, _MUTABLE_BOOLS))
def compare_lists(compared: Bools, left: ListBuffers, right: ListBuffers, differ: Bools) -> None:
    """Set `differ[i]` where `compared[i]` and list `i` of the left has not the texts of the right one."""
    for row in range(len(compared)):
        if compared[row]:
            first, other = left[0][row], right[0][row]
            count = left[0][row + 1] - first
            differ[row] = count != right[0][row + 1] - other
            for position in range(count):
                if differ[row]:
                    break
                differ[row] = not _is_same_text(left, first + position, right, other + position)
