"""Hashes of keys, compiled: changes of one key are grouped by its hash.

Equal keys have equal hashes on every machine, which Python's own hash does not promise. Different keys may
share a hash, so groups are separated by the keys themselves.
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
from cdc_replay.arrow.jit import BOOLS, BYTES, INT32S, INT64S, compiled

if TYPE_CHECKING:
    import pyarrow as pa

_OFFSET: Final = np.uint64(0xCBF29CE484222325)
_PRIME: Final = np.uint64(0x100000001B3)
_NULL: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFT: Final = np.uint64(33)
_MIX_1: Final = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2: Final = np.uint64(0xC4CEB9FE1A85EC53)

_MUTABLE: Final = types.Array(types.uint64, 1, "C")


def hash_keys(targets: Int64s, keys: pa.ListArray) -> Int64s:
    """The hash of each (target, key); keys are lists of texts, in which NULL differs from any text."""
    elements = keys.flatten()
    widths = keys.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets, data = text_buffers(elements)
    hashes = np.empty(len(targets), dtype=np.uint64)
    _hash(
        np.ascontiguousarray(targets), offsets_from_lengths(widths), offsets, data, is_valid(elements), hashes
    )
    return hashes.view(np.int64)


@compiled(types.void(INT64S, INT32S, INT32S, BYTES, BOOLS, _MUTABLE))
def _hash(
    targets: Int64s, lists: Int32s, offsets: Int32s, data: Bytes, valid: Bools, hashes: UInt64s
) -> None:
    for row in range(len(targets)):
        key_hash = (_OFFSET ^ np.uint64(targets[row])) * _PRIME
        for element in range(lists[row], lists[row + 1]):
            if valid[element]:
                for position in range(offsets[element], offsets[element + 1]):
                    key_hash = (key_hash ^ np.uint64(data[position])) * _PRIME
                key_hash = (key_hash ^ np.uint64(offsets[element + 1] - offsets[element])) * _PRIME
            else:
                key_hash = (key_hash ^ _NULL) * _PRIME
        key_hash = (key_hash ^ (key_hash >> _SHIFT)) * _MIX_1
        key_hash = (key_hash ^ (key_hash >> _SHIFT)) * _MIX_2
        hashes[row] = key_hash ^ (key_hash >> _SHIFT)
