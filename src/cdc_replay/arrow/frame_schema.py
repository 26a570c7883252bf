"""The columns of frames in Arrow's types."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from cdc_replay.model.frames import Frame

_TYPES: Final = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
    "array<string>": pa.list_(pa.string()),
    "array<int>": pa.list_(pa.int32()),
}


def arrow_schema(frame: Frame) -> pa.Schema:
    """The frame's columns in Arrow's types."""
    return pa.schema([(name, _TYPES[kind]) for name, kind in frame.columns])
