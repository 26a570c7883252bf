"""The number of a key, compiled: changes of one key find each other by it.

Different keys may get one number : what is grouped by it is kept apart by the keys
themselves. Equal keys always do, on every machine, which Python's own hash does not promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numba import types

from cdc_replay.arrow.arrays import (
    Bools,
    Bytes,
    Int32s,
    Int64s,
    UInt64s,
    is_valid,
    offsets_from_lengths,
    text_buffers,
)
from cdc_replay.arrow.jit import compiled

if TYPE_CHECKING:
    import pyarrow as pa

_OFFSET: Final = np.uint64(0xCBF29CE484222325)
_PRIME: Final = np.uint64(0x100000001B3)
_NULL: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFT: Final = np.uint64(33)
_MIX_1: Final = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2: Final = np.uint64(0xC4CEB9FE1A85EC53)

_BYTES: Final = types.Array(types.uint8, 1, "C", readonly=True)
_INT32S: Final = types.Array(types.int32, 1, "C", readonly=True)
_INT64S: Final = types.Array(types.int64, 1, "C", readonly=True)
_BOOLS: Final = types.Array(types.boolean, 1, "C", readonly=True)
_MUTABLE: Final = types.Array(types.uint64, 1, "C")


def key_numbers(targets: Int64s, keys: pa.ListArray) -> Int64s:
    """The number of each (target, key); keys are lists of texts, in which NULL is unlike any text."""
    elements = keys.flatten()
    widths = keys.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets, data = text_buffers(elements)
    found = np.empty(len(targets), dtype=np.uint64)
    _hash(
        np.ascontiguousarray(targets), offsets_from_lengths(widths), offsets, data, is_valid(elements), found
    )
    return found.view(np.int64)


@compiled(types.void(_INT64S, _INT32S, _INT32S, _BYTES, _BOOLS, _MUTABLE))
def _hash(targets: Int64s, lists: Int32s, offsets: Int32s, data: Bytes, valid: Bools, found: UInt64s) -> None:
    for row in range(len(targets)):
        number = (_OFFSET ^ np.uint64(targets[row])) * _PRIME
        for element in range(lists[row], lists[row + 1]):
            if valid[element]:
                for at in range(offsets[element], offsets[element + 1]):
                    number = (number ^ np.uint64(data[at])) * _PRIME
                number = (number ^ np.uint64(offsets[element + 1] - offsets[element])) * _PRIME
            else:
                number = (number ^ _NULL) * _PRIME
        number = (number ^ (number >> _SHIFT)) * _MIX_1
        number = (number ^ (number >> _SHIFT)) * _MIX_2
        found[row] = number ^ (number >> _SHIFT)
