"""Rows of open transactions: in memory up to a limit, then in temporary files.

Any number of streamed transactions can be open, so one memory limit applies to all of them together; the
largest is spilled first, as in the server. The files are unlinked, so a killed process leaves none.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Final

import pyarrow as pa

from cdc_replay.arrow.byte_slices import without_views
from cdc_replay.errors import ChangeLogNotWritable

MEMORY_BYTES: Final = 16 << 20
"""The limit for all open transactions together."""


def limit_memory(spools: Iterable[Spool]) -> None:
    """Write the largest spools to files until at most `MEMORY_BYTES` remain in memory.

    Raises:
        ChangeLogNotWritable: if the temporary folder is full.
    """
    by_size = sorted(spools, key=lambda spool: spool.memory_bytes, reverse=True)
    total_bytes = sum(spool.memory_bytes for spool in by_size)
    for spool in by_size:
        if total_bytes <= MEMORY_BYTES:
            return
        total_bytes -= spool.memory_bytes
        spool.write_out()


class Spool:
    """Batches of `BODY_SCHEMA`, read once in the order in which they were added; messages are copied."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self.memory_bytes = 0
        """Size of the rows in memory."""
        self._file: IO[bytes] | None = None
        self._writer: pa.RecordBatchStreamWriter = None
        self._exit_stack: contextlib.ExitStack | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not self._batches and self._file is None

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows at the end."""
        copied = without_views(batch)
        self._batches.append(copied)
        self.memory_bytes += copied.nbytes

    def write_out(self) -> None:
        """Move the rows in memory to the file.

        Raises:
            ChangeLogNotWritable: if the temporary folder is full.
        """
        try:
            self._write()
        except OSError as error:
            raise _out_of_space(error) from error

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Yield all batches, then close the spool."""
        if self._file is not None:
            self._writer.close()
            self._file.seek(0)
            with pa.ipc.open_stream(self._file) as reader:
                yield from reader
        yield from self._batches
        self.close()

    def close(self) -> None:
        """Discard all rows."""
        self._batches, self.memory_bytes = [], 0
        self._file = None
        if self._exit_stack is not None:
            self._exit_stack.close()
            self._exit_stack = None

    def _write(self) -> None:
        if self._file is None:
            # Created lazily: most transactions are small.
            self._exit_stack = contextlib.ExitStack()
            self._file = self._exit_stack.enter_context(_create_file())
            self._writer = pa.ipc.new_stream(self._file, self._batches[0].schema)
        for batch in self._batches:
            self._writer.write_batch(batch)
        self._batches, self.memory_bytes = [], 0


def _create_file() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="cdc_replay_")


def _out_of_space(error: OSError) -> ChangeLogNotWritable:
    return ChangeLogNotWritable(
        f'temporary folder "{tempfile.gettempdir()}" is too small for a large transaction',
        detail=str(error),
        hint="Free space there, or set TMPDIR to a folder with space for the largest open transaction, then"
        " run the command again. Nothing is lost: the replication slot retains the transaction.",
    )
