"""The rows of transactions whose end is not known yet: in memory while they are few, else in files.

Any number of streamed transactions can be open at once, so what bounds memory is one limit for all of them;
the largest go to their files first, as in the server. The files have no names: nothing is left behind by a
process that dies.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Final

import pyarrow as pa

from cdc_replay.capture.message_batch import BODY_SCHEMA
from cdc_replay.errors import ChangeLogNotWritable

MEMORY_BYTES: Final = 16 << 20
"""What all unfinished transactions together hold in memory."""


def limit_memory(spools: Iterable[Spool]) -> None:
    """Let the largest write their rows to files until all together hold no more than `MEMORY_BYTES`.

    Raises:
        ChangeLogNotWritable: if there is no room for them in the temporary folder.
    """
    by_size = sorted(spools, key=lambda spool: spool.held_bytes, reverse=True)
    total_bytes = sum(spool.held_bytes for spool in by_size)
    for spool in by_size:
        if total_bytes <= MEMORY_BYTES:
            return
        total_bytes -= spool.held_bytes
        spool.write_out()


class Spool:
    """Batches of `BODY_SCHEMA`, read once in the order in which they were added."""

    def __init__(self) -> None:
        self._held: list[pa.RecordBatch] = []
        self.held_bytes = 0
        """What is in memory."""
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
        self.held_bytes += batch.nbytes

    def write_out(self) -> None:
        """Move what is in memory to the file.

        Raises:
            ChangeLogNotWritable: if there is no room for it in the temporary folder.
        """
        try:
            self._write()
        except OSError as error:
            raise _no_room(error) from error

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
        self._held, self.held_bytes = [], 0
        self._file = None
        if self._open is not None:
            self._open.close()
            self._open = None

    def _write(self) -> None:
        if self._file is None:
            # Only now: most transactions are small, and one costs as little as it can.
            self._open = contextlib.ExitStack()
            self._file = self._open.enter_context(_nameless_file())
            self._writer = pa.ipc.new_stream(self._file, BODY_SCHEMA)
        for batch in self._held:
            self._writer.write_batch(batch)
        self._held, self.held_bytes = [], 0


def _nameless_file() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="cdc_replay_")


def _no_room(error: OSError) -> ChangeLogNotWritable:
    return ChangeLogNotWritable(
        f'temporary folder "{tempfile.gettempdir()}" cannot take a large transaction',
        detail=str(error),
        hint="Make room there, or set TMPDIR to a folder that has room for the largest open transaction, then"
        " run the command again. Nothing is lost: the replication slot still has it.",
    )
