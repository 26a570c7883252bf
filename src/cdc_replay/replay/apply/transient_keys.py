"""Rows that came and went within a window, where their keys are integers: they need not be staged.

Nothing of them is left, but a row that stands at such a key is a conflict (R8.5), so the target has to be
looked at. Keys that come and go are usually new ones, greater than all that the target has; that is known
only when the window is merged. So tasks keep these keys and hand them to the driver, a byte or two each. It
stages those that are not greater than the greatest of the target (`replay.apply.merge`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import Int64s, booleans, int_array, is_valid
from cdc_replay.model.frames import NetKind
from cdc_replay.subscriber.tables import Operator

if TYPE_CHECKING:
    from cdc_replay.replay.apply.stage_table import StageTable

_INTEGERS: Final = frozenset({"smallint", "integer", "bigint"})
_EQUAL: Final = Operator("pg_catalog", "=")
_LESS: Final = Operator("pg_catalog", "<")
_CODEC: Final = "zstd"


@dataclass(frozen=True, slots=True)
class TransientKeys:
    """Keys of rows that came and went, as tasks send them: `count` of them, compressed steps between them."""

    count: int
    steps: bytes

    @classmethod
    def of(cls, keys: Int64s) -> Self:
        """These keys, in any order."""
        steps = np.diff(np.sort(keys), prepend=np.int64(0))
        return cls(len(keys), pa.compress(steps.tobytes(), codec=_CODEC, asbytes=True))

    @property
    def keys(self) -> Int64s:
        """The keys, ascending."""
        size = self.count * np.dtype(np.int64).itemsize
        steps = pa.decompress(self.steps, decompressed_size=size, codec=_CODEC)
        keys: Int64s = np.cumsum(np.frombuffer(steps, dtype=np.int64))
        return keys


def are_counted(table: StageTable) -> bool:
    """Whether the keys of the target are integers, which its index takes for what they are."""
    if not table.has_own_key or len(table.keys) != 1:
        return False
    [key] = table.keys
    return key.base_type_sql in _INTEGERS and (key.equality, key.less) == (_EQUAL, _LESS)


def split_transient_keys(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Int64s]:
    """The net changes (NET, of one target) that are to be staged, and the keys of the others.

    What has to be told of a row besides, that an earlier change of it has missed it, takes a staged one.
    """
    is_gone = booleans(pc.equal(rows["kind"], NetKind.NOTHING.value))
    if not is_gone.any():
        return rows, np.zeros(0, np.int64)
    # A NULL is no key, and finds no row.
    key = pc.list_element(rows["base_key"], 0)
    is_gone &= is_valid(key) & ~is_valid(rows["conflicts"])
    for name in ("update_missing", "delete_missing"):
        is_gone &= int_array(rows[name]) == 0
    try:
        keys = int_array(pc.cast(key.filter(pa.array(is_gone)), pa.int64()))
    except pa.ArrowInvalid:
        # The publisher's type is another one: its texts may be integers that Arrow does not read.
        return rows, np.zeros(0, np.int64)
    return rows.filter(pa.array(~is_gone)), keys
