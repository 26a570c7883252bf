"""The compiled loops of the columnar decoder.

Two passes over the row changes (I, U, D) of a batch. `locate_tuples` checks every message completely against
its own end, and returns the positions of its tuples and the size of their texts. `copy_values` fills arrays
of exactly that size, without checks: it reads only bytes that the first pass has checked.

Compiled code does not check array bounds. Every read of the first pass is preceded by a comparison with
`end`; the tests run it over mutated messages with numba's bounds checks.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np
from numba import types

from cdc_replay.arrow.arrays import Bytes, Int32s, Int64s
from cdc_replay.arrow.jit import BYTES, INT32S, INT64S, MUTABLE_BYTES, MUTABLE_INT32S, compiled, inlined

_TABLE: Final = types.Array(types.int64, 2, "C", readonly=True)
_MUTABLE_TABLE: Final = types.Array(types.int64, 2, "C")


class Fault(enum.IntEnum):
    """The faults of a message."""

    NOTHING = 0
    ENDS_EARLY = 1
    BYTES_LEFT = 2
    OTHER_TYPE = 3
    OTHER_RELATION = 4
    UNKNOWN_TUPLE = 5
    NEGATIVE_COUNT = 6
    OTHER_COUNT = 7
    UNKNOWN_KIND = 8
    BINARY_VALUE = 9
    NEGATIVE_LENGTH = 10


# Constants of the loops: compiled code cannot call ord().
_INSERT: Final = 0x49
_DELETE: Final = 0x44
_KEY: Final = 0x4B
_FULL: Final = 0x4F
_NEW: Final = 0x4E
_NULL: Final = 0x6E
_UNCHANGED: Final = 0x75
_TEXT: Final = 0x74
_BINARY: Final = 0x62

_HEADER: Final = 5  # message type and relation
_COUNT: Final = 2  # number of columns
_LENGTH: Final = 4  # of a value that is sent

HEADER_BYTES: Final = 3
"""From a tuple's kind to its first column: the kind and the number of columns."""


@inlined
def _uint32(data: Bytes, at: int) -> int:
    value = 0
    for index in range(at, at + 4):
        value = value << 8 | data[index]
    return value


@inlined
def _int32(data: Bytes, at: int) -> int:
    value = _uint32(data, at)
    return value - (1 << 32) if value >= 1 << 31 else value


@inlined
def _int16(data: Bytes, at: int) -> int:
    value = 0
    for index in range(at, at + 2):
        value = value << 8 | data[index]
    return value - (1 << 16) if value >= 1 << 15 else value


@inlined
def _header(data: Bytes, begin: int, end: int, kind: int, relation_id: int) -> tuple[int, int]:
    """Fault and its position, or the position after message type and relation."""
    if begin == end:
        return Fault.ENDS_EARLY.value, begin
    if data[begin] != kind:
        return Fault.OTHER_TYPE.value, begin
    if end - begin < _HEADER:
        return Fault.ENDS_EARLY.value, begin + 1
    if _uint32(data, begin + 1) != relation_id:
        return Fault.OTHER_RELATION.value, begin + 1
    return Fault.NOTHING.value, begin + _HEADER


@inlined
def _value(data: Bytes, at: int, end: int) -> tuple[int, int, int]:
    """Fault and its position, or the position after one column; and the size of its text."""
    if at >= end:
        return Fault.ENDS_EARLY.value, at, 0
    kind = data[at]
    if kind in (_NULL, _UNCHANGED):
        return Fault.NOTHING.value, at + 1, 0
    if kind != _TEXT:
        return (Fault.BINARY_VALUE.value if kind == _BINARY else Fault.UNKNOWN_KIND.value), at, 0
    return _text(data, at + 1, end)


@inlined
def _text(data: Bytes, at: int, end: int) -> tuple[int, int, int]:
    """As `_value`, for length and bytes of a value."""
    if end - at < _LENGTH:
        return Fault.ENDS_EARLY.value, at, 0
    length = _int32(data, at)
    if length < 0:
        return Fault.NEGATIVE_LENGTH.value, at, 0
    if length > end - (at + _LENGTH):
        return Fault.ENDS_EARLY.value, at + _LENGTH, 0
    return Fault.NOTHING.value, at + _LENGTH + length, length


@inlined
def _tuple(data: Bytes, at: int, end: int, columns: int) -> tuple[int, int, int]:
    """Fault and its position, or the position after the TupleData at `at`; and the size of its text."""
    if end - at < _COUNT:
        return Fault.ENDS_EARLY.value, at, 0
    count = _int16(data, at)
    if count != columns:
        return (Fault.NEGATIVE_COUNT.value if count < 0 else Fault.OTHER_COUNT.value), at, 0
    position = at + _COUNT
    text_bytes = 0
    for _ in range(columns):
        fault, position, length = _value(data, position, end)
        if fault != 0:
            return fault, position, 0
        text_bytes += length
    return Fault.NOTHING.value, position, text_bytes


@inlined
def _old_tuple(data: Bytes, at: int, end: int, kind: int, columns: int) -> tuple[int, int, int, int]:
    """As `_tuple`, for a K or O and its tuple; then the position of K or O, 0 if there is none."""
    if at >= end:
        return Fault.ENDS_EARLY.value, at, 0, 0
    tuple_kind = data[at]
    if tuple_kind not in (_KEY, _FULL):
        required = kind == _DELETE or tuple_kind != _NEW
        return (Fault.UNKNOWN_TUPLE.value if required else Fault.NOTHING.value), at, 0, 0
    fault, position, text_bytes = _tuple(data, at + 1, end, columns)
    return fault, position, text_bytes, at


@inlined
def _new_tuple(data: Bytes, at: int, end: int, columns: int) -> tuple[int, int, int]:
    """As `_tuple`, for an N and its tuple."""
    if at >= end:
        return Fault.ENDS_EARLY.value, at, 0
    if data[at] != _NEW:
        return Fault.UNKNOWN_TUPLE.value, at, 0
    return _tuple(data, at + 1, end, columns)


@inlined
def _locate(data: Bytes, begin: int, end: int, expected: Int64s, starts: Int64s) -> tuple[int, int, int, int]:
    """Fault, its position, text sizes of the old and new tuple; writes their positions to `starts`."""
    kind = expected[0]
    fault, position = _header(data, begin, end, kind, expected[1])
    old_bytes = new_bytes = 0
    if fault == 0 and kind != _INSERT:
        fault, position, old_bytes, starts[0] = _old_tuple(data, position, end, kind, expected[2])
    if fault == 0 and kind != _DELETE:
        starts[1] = position
        fault, position, new_bytes = _new_tuple(data, position, end, expected[2])
    if fault == 0 and position != end:
        fault = Fault.BYTES_LEFT.value
    return fault, position, old_bytes, new_bytes


@compiled(types.UniTuple(types.int64, 5)(BYTES, INT32S, INT64S, _TABLE, _MUTABLE_TABLE))
def locate_tuples(
    data: Bytes, offsets: Int32s, rows: Int64s, expected: Int64s, starts: Int64s
) -> tuple[int, int, int, int, int]:
    """Check the messages in `rows` and locate their tuples.

    `data[offsets[row]:offsets[row + 1]]` is a message. `expected` has a line per message: its type (I, U or
    D), relation, number of columns. `starts`, filled with 0 by the caller, receives a line per message: the
    positions in `data` of the old tuple's kind (K, O) and of the new one's (N), 0 for none.

    Returns the first `Fault`, its index in `rows` and its offset in that message; and the text sizes of all
    old and all new tuples.
    """
    old_bytes = new_bytes = 0
    for index in range(len(rows)):
        begin = offsets[rows[index]]
        end = offsets[rows[index] + 1]
        fault, position, old, new = _locate(data, begin, end, expected[index], starts[index])
        if fault != 0:
            return fault, index, position - begin, 0, 0
        old_bytes += old
        new_bytes += new
    return 0, 0, 0, old_bytes, new_bytes


@inlined
def _copy(data: Bytes, at: int, length: int, values: Bytes, to: int) -> None:
    # Unsigned: a signed index may count from the end, as in Python; checking for that at each byte halves
    # the decoder's speed.
    source, target = np.uint64(at), np.uint64(to)
    for index in range(np.uint64(length)):
        values[target + index] = data[source + index]


@compiled(types.void(BYTES, INT64S, INT32S, MUTABLE_BYTES, MUTABLE_INT32S, MUTABLE_BYTES))
def copy_values(
    data: Bytes, starts: Int64s, columns: Int32s, kinds: Bytes, value_offsets: Int32s, values: Bytes
) -> None:
    """Copy the columns of located tuples into Arrow buffers.

    `starts` are the positions of tuple kinds, 0 for none; `row` has the columns `columns[row]` to
    `columns[row + 1]`. Each column's kind is written to `kinds`, and the end of its value in `values` to
    `value_offsets` (one longer, the first is 0).
    """
    written_bytes = 0
    for row in range(len(starts)):
        position = starts[row] + HEADER_BYTES
        for column in range(columns[row], columns[row + 1]):
            kind = data[position]
            kinds[column] = kind
            position += 1
            if kind == _TEXT:
                length = _int32(data, position)
                position += _LENGTH
                _copy(data, position, length, values, written_bytes)
                written_bytes += length
                position += length
            value_offsets[column + 1] = written_bytes
