"""The rows of a transaction whose end is not known yet: in memory while they are few, else in a file.

The file has no name: nothing is left behind by a process that dies.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO, Final

import pyarrow as pa

from cdc_replay.capture.rows import BODY_SCHEMA

MEMORY_BYTES: Final = 16 << 20
"""What one transaction holds in memory before its rows go to a file."""


class Spool:
    """Batches of `BODY_SCHEMA`, read once in the order in which they were added."""

    def __init__(self) -> None:
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._file: IO[bytes] | None = None
        self._writer: pa.RecordBatchStreamWriter = None
        self._open: contextlib.ExitStack | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing was added."""
        return not self._held and self._file is None

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows at the end."""
        self._held.append(batch)
        self._held_bytes += batch.nbytes
        if self._held_bytes > MEMORY_BYTES:
            self._spill()

    def drain(self) -> Iterator[pa.RecordBatch]:
        """All batches; nothing is held afterwards."""
        if self._file is not None:
            self._writer.close()
            self._file.seek(0)
            with pa.ipc.open_stream(self._file) as reader:
                yield from reader
        yield from self._held
        self.close()

    def close(self) -> None:
        """Give up what is held."""
        self._held, self._held_bytes = [], 0
        self._file = None
        if self._open is not None:
            self._open.close()
            self._open = None

    def _spill(self) -> None:
        if self._file is None:
            # Only now: most transactions are small, and one costs as little as it can.
            self._open = contextlib.ExitStack()
            self._file = self._open.enter_context(_nameless_file())
            self._writer = pa.ipc.new_stream(self._file, BODY_SCHEMA)
        for batch in self._held:
            self._writer.write_batch(batch)
        self._held, self._held_bytes = [], 0


def _nameless_file() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="cdc_replay_")
