"""Rows that a window inserts and deletes, where their keys are integers: they need not be staged.

Such a row has no net change, but a subscriber's row at its key is a conflict (R8.5), so the target has to be
checked. The keys are usually new, greater than every key of the target, which is known only at the merge. So
tasks send these keys to the driver, a byte or two each, and the driver stages those that are not greater than
the target's maximum (`replay.apply.merge`).

For one subscription that gains nothing. Eight that let the same rows through take 15 % longer if each stages
all of these keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.arrays import Int64s, booleans, int_array, is_valid
from cdc_replay.model.frames import NetKind
from cdc_replay.subscriber.target_tables import Operator

if TYPE_CHECKING:
    from cdc_replay.replay.apply.stage_table import StageTable

_INTEGERS: Final = frozenset({"smallint", "integer", "bigint"})
_EQUAL: Final = Operator("pg_catalog", "=")
_LESS: Final = Operator("pg_catalog", "<")
_CODEC: Final = "zstd"


@dataclass(frozen=True, slots=True)
class TransientKeys:
    """Keys of rows that a window inserts and deletes, as tasks send them.

    `steps` are the compressed differences of the `count` keys in ascending order.
    """

    count: int
    steps: bytes

    @classmethod
    def encode(cls, keys: Int64s) -> Self:
        """Encode the keys, which may be in any order."""
        steps = np.diff(np.sort(keys), prepend=np.int64(0))
        return cls(len(keys), pa.compress(steps.tobytes(), codec=_CODEC, asbytes=True))

    @property
    def keys(self) -> Int64s:
        """The keys, ascending."""
        size = self.count * np.dtype(np.int64).itemsize
        steps = pa.decompress(self.steps, decompressed_size=size, codec=_CODEC)
        keys: Int64s = np.cumsum(np.frombuffer(steps, dtype=np.int64))
        return keys


def tracks_integer_keys(table: StageTable) -> bool:
    """Whether the target's key is one integer column, and its index compares it as an integer."""
    if not table.has_own_key or len(table.keys) != 1:
        return False
    [key] = table.keys
    return key.base_type_sql in _INTEGERS and (key.equality, key.less) == (_EQUAL, _LESS)


def split_transient_keys(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Int64s]:
    """The net changes (NET, of one target) to stage, and the keys of transient rows that need not be staged.

    Transient rows with a conflict, or with a missing-row conflict to count, are staged.
    """
    is_transient = booleans(pc.equal(rows["kind"], NetKind.TRANSIENT.value))
    if not is_transient.any():
        return rows, np.zeros(0, np.int64)
    # NULL is not a key, and matches no row.
    key = pc.list_element(rows["base_key"], 0)
    is_transient &= is_valid(key) & ~is_valid(rows["conflicts"])
    for name in ("update_missing", "delete_missing"):
        is_transient &= int_array(rows[name]) == 0
    try:
        keys = int_array(pc.cast(key.filter(pa.array(is_transient)), pa.int64()))
    except pa.ArrowInvalid:
        # The publisher's column has another type: Arrow may not parse its text as an integer.
        return rows, np.zeros(0, np.int64)
    return rows.filter(pa.array(~is_transient)), keys
