"""Binary values as slices of one buffer, and Arrow arrays that refer to it.

A capture handles each message's bytes several times: takes it out of its row, drops the messages around it,
joins batches to row groups. With slices these are arithmetic on positions; Arrow's views (`binary_view`) keep
the bytes where they are until a row group is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import Bools, Bytes, Int32s, Int64s, elements_at

VIEWS: Final = pa.binary_view()

# A view has 16 bytes: length, the first four bytes of the value, number of the buffer, offset in it. A value
# of up to twelve bytes is in the view itself, after the length, padded with zeros.
_VIEW_INTS: Final = 4
_LENGTH, _PREFIX, _OFFSET = 0, 1, 3
_INLINED_BYTES: Final = 12
_MOST_UNUSED: Final = 2
"""Views refer to a buffer of at most so many times their bytes; of a larger one they get a copy."""


@dataclass(frozen=True, slots=True)
class ByteSlices:
    """Values: number `i` is `content[starts[i]:starts[i] + lengths[i]]`."""

    content: Bytes
    starts: Int64s
    lengths: Int64s

    @classmethod
    def from_values(cls, values: Sequence[bytes]) -> Self:
        """Of values, which are copied."""
        lengths = np.array([len(value) for value in values], dtype=np.int64)
        return cls(np.frombuffer(b"".join(values), dtype=np.uint8), np.cumsum(lengths) - lengths, lengths)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: Int64s | Bools) -> ByteSlices: ...
    def __getitem__(self, index: int | Int64s | Bools) -> bytes | ByteSlices:
        """One value, or several by their numbers or a mask."""
        if isinstance(index, np.ndarray):
            return ByteSlices(self.content, self.starts[index], self.lengths[index])
        start = self.starts[index]
        return self.content[start : start + self.lengths[index]].tobytes()

    def first_bytes(self) -> Bytes:
        """The first byte of each value; none may be empty."""
        return self.content[self.starts]

    def views(self) -> pa.Array:
        """The values as an array of type `VIEWS`; they keep at most twice their bytes in memory."""
        views = np.zeros((len(self), _VIEW_INTS), dtype=np.int32)
        views[:, _LENGTH] = self.lengths
        is_inlined = self.lengths <= _INLINED_BYTES
        referring = ~is_inlined
        views[referring, _PREFIX] = elements_at(self.content, self.starts[referring], np.dtype(np.int32))
        views[referring, _OFFSET] = self.starts[referring]
        if is_inlined.any():
            views[is_inlined, _PREFIX:] = _padded(self[is_inlined])
        array = pa.Array.from_buffers(
            VIEWS, len(self), [None, pa.py_buffer(views), pa.py_buffer(self.content)]
        )
        if self.content.nbytes > _MOST_UNUSED * int(self.lengths.sum()):
            return pc.cast(pc.cast(array, pa.binary()), VIEWS)
        return array


def view_bytes(array: pa.Array) -> int:
    """The total length of the values of an array of type `VIEWS` without NULL."""
    views = np.frombuffer(array.buffers()[1], dtype=np.int32).reshape(-1, _VIEW_INTS)
    return int(views[array.offset : array.offset + len(array), _LENGTH].sum(dtype=np.int64))


def with_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with `VIEWS` in place of binary columns; nothing is copied."""
    return _with_types(batch, pa.binary(), VIEWS)


def without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with copies of its views, since few of Arrow's functions accept these."""
    return _with_types(batch, VIEWS, pa.binary())


def _with_types(batch: pa.RecordBatch, replaced: pa.DataType, by: pa.DataType) -> pa.RecordBatch:
    fields = [field.with_type(by) if field.type == replaced else field for field in batch.schema]
    return batch.cast(pa.schema(fields))


def _padded(values: ByteSlices) -> Int32s:
    """Short values, each padded with zeros to twelve bytes, as three integers."""
    within = np.arange(_INLINED_BYTES)
    is_inside = within < values.lengths[:, np.newaxis]
    padded = np.zeros(is_inside.shape, dtype=np.uint8)
    padded[is_inside] = values.content[(values.starts[:, np.newaxis] + within)[is_inside]]
    return padded.view(np.int32)
