"""Which lists of texts differ, row by row, with a compiled loop.

Arrow compares no lists, and to compare them element by element takes four passes for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cdc_replay.arrow.arrays import Bools, is_valid, text_buffers

if TYPE_CHECKING:
    import pyarrow as pa

    from cdc_replay.arrow.list_kernels import ListBuffers


def lists_differ(left: pa.ListArray, right: pa.ListArray) -> Bools:
    """Whether two lists of texts differ, if neither is NULL; NULL elements are equal to each other."""
    differ = np.zeros(len(left), dtype=np.bool_)
    # Not at the top: the driver only plans, and need not load or compile the kernel.
    from cdc_replay.arrow.list_kernels import compare_lists  # noqa: PLC0415

    compare_lists(is_valid(left) & is_valid(right), _buffers(left), _buffers(right), differ)
    return differ


def _buffers(lists: pa.ListArray) -> ListBuffers:
    return lists.offsets.to_numpy(), *text_buffers(lists.values), is_valid(lists.values)
