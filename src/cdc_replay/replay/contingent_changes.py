"""Changes that may have to be folded again, on their way from `compact` to `apply`.

The net changes of a contingent lineage (`replay.compact.fold_reference`) hold only if the subscriber has the
rows that it starts from. So a batch of such net changes carries the changes themselves, in the metadata of
its schema: staging keeps them, and other code need not know of them.

Apply looks up the rows, and has the changes folded again through a `Refold`.
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
# Parallelism comes from tasks.
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


@dataclass(frozen=True, slots=True)
class Refolded:
    """Net changes (NET) and known conflicts of refolded changes.

    `conflict_keys` has the key of the first conflict of each kind and lineage.
    """

    net: pa.RecordBatch
    conflicts: Mapping[ConflictKind, int]
    conflict_keys: Sequence[tuple[ConflictKind, Key]]


class Contingent(Protocol):
    """Changes of contingent lineages of one target."""

    @property
    def keys(self) -> Sequence[Key]:
        """The keys of the changes; without a key of the target, once per row."""
        ...

    def fold_again(self, rows: Mapping[Key, int], same: Mapping[Key, Key]) -> Refolded:
        """Their net changes, given the target's number of rows per key.

        `same` maps keys to the ones that `rows` has for them.
        """
        ...


class Refold(Protocol):
    """Folds changes (`fold_frames.INPUT`) of a target's contingent lineages again."""

    def __call__(self, changes: pa.RecordBatch, *, policy: ConflictPolicy, is_keyed: bool) -> Contingent:
        """The changes, ready to be folded; those of one lineage are adjacent."""
        ...


def dump_batch(batch: pa.RecordBatch) -> pa.Buffer:
    """The batch in Arrow's IPC format, compressed."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_COMPRESSED) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def load_batch(batch: pa.Buffer) -> pa.RecordBatch:
    """Inverse of `dump_batch`."""
    return pa.ipc.open_stream(batch).read_next_batch()


def with_changes(net: pa.RecordBatch, changes: Iterable[pa.Buffer]) -> pa.RecordBatch:
    """Net changes of contingent lineages, with the dumped `changes` that they come from, in order."""
    return net.replace_schema_metadata({_CHANGES: b" ".join(base64.b64encode(buffer) for buffer in changes)})


def changes_text(net: pa.RecordBatch) -> str | None:
    """The changes of these net changes, as a text; None if they are not contingent."""
    text = (net.schema.metadata or {}).get(_CHANGES)
    return None if text is None else text.decode("ascii")


def parse_changes(text: str) -> pa.RecordBatch:
    """The changes in such a text."""
    return pa.concat_batches(
        [load_batch(pa.py_buffer(base64.b64decode(encoded))) for encoded in text.split(" ")]
    )
