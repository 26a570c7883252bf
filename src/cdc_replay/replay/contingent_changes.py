"""Changes that may have to be folded once more, on their way from `compact` to `apply`.

What a contingent lineage (`replay.compact.fold_reference`) comes to is right as long as the subscriber has
the rows that it starts from. So a batch of net changes of such lineages carries the changes themselves, in
the metadata of its schema: whoever stages it keeps them, and whoever else has the batch need not know of
them.

Apply looks which rows there are, and has the changes folded once more by who knows how (`Refold`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import pyarrow as pa

from cdc_replay.model.frames import ConflictKind
from cdc_replay.model.subscription import ConflictPolicy

Key: TypeAlias = tuple[str | None, ...]
"""The identity of a row, as NET has it."""

_CHANGES: Final = b"cdc_replay.changes"
# Tasks are what runs side by side.
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


@dataclass(frozen=True, slots=True)
class Refolded:
    """What changes come to, as batches of NET have it, and the conflicts that are known of them.

    `conflict_keys` has the key of the first conflict of each kind and lineage.
    """

    net: pa.RecordBatch
    conflicts: Mapping[ConflictKind, int]
    conflict_keys: Sequence[tuple[ConflictKind, Key]]


class Contingent(Protocol):
    """Changes of contingent lineages of one target."""

    @property
    def keys(self) -> Sequence[Key]:
        """The keys that they name; of a target without a key, once for each row."""
        ...

    def refolded(self, rows: Mapping[Key, int], same: Mapping[Key, Key]) -> Refolded:
        """What they come to where the target has so many rows of each of these keys, and none of others.

        `same` says of keys which others they are the same as, and `rows` is by those.
        """
        ...


class Refold(Protocol):
    """How changes (`replay.compact.fold.INPUT`) of contingent lineages of a target are folded once more."""

    def __call__(self, changes: pa.RecordBatch, *, policy: ConflictPolicy, is_keyed: bool) -> Contingent:
        """The changes, ready for it; those of one lineage are together."""
        ...


def dumped(batch: pa.RecordBatch) -> pa.Buffer:
    """The batch in Arrow's own form, compressed."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_COMPRESSED) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def loaded(batch: pa.Buffer) -> pa.RecordBatch:
    """The batch that was dumped."""
    return pa.ipc.open_stream(batch).read_next_batch()


def with_changes(net: pa.RecordBatch, changes: Iterable[pa.Buffer]) -> pa.RecordBatch:
    """Net changes of contingent lineages with the `changes` that they come from, dumped, in order."""
    return net.replace_schema_metadata({_CHANGES: b" ".join(base64.b64encode(each) for each in changes)})


def changes_text(net: pa.RecordBatch) -> str | None:
    """The changes of these net changes, as a text; None where they are not of contingent lineages."""
    text = (net.schema.metadata or {}).get(_CHANGES)
    return None if text is None else text.decode("ascii")


def changes_of(text: str) -> pa.RecordBatch:
    """The changes that such a text has."""
    return pa.concat_batches([loaded(pa.py_buffer(base64.b64decode(each))) for each in text.split(" ")])
