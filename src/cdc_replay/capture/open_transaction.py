"""A transaction whose end was not read yet.

Its rows are ranges of the current batch, and are spilled before the next batch. Subtransactions can be rolled
back after they were streamed, so rows are dropped at the end of the transaction only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.byte_slices import with_views
from cdc_replay.capture.message_batch import MessageBatch, MessageRange, RelationVersions
from cdc_replay.capture.spool import Spool


@dataclass(slots=True)
class OpenTransaction:
    """A transaction whose end was not read yet."""

    xid: int
    relations: RelationVersions
    """Of the messages that follow."""
    origin: str | None = None
    runs: list[MessageRange] = field(default_factory=list)
    """Of the current batch; rows of earlier batches are in `spool`."""
    spool: Spool = field(default_factory=Spool)
    aborted: set[int] = field(default_factory=set)
    """Subtransactions that were rolled back."""
    is_prepared: bool = False
    """Ends with PREPARE, not with COMMIT."""
    has_ddl_messages: bool = False
    """It is streamed and has messages of the event triggers."""

    def spill(self, batch: MessageBatch) -> None:
        """Move the rows of the current batch to the spool."""
        if self.runs:
            self.spool.append(batch.body(self.runs))
            self.runs = []

    @property
    def is_plain(self) -> bool:
        """All rows are in the current batch, and none was rolled back."""
        return self.spool.is_empty and not self.aborted

    def bodies(self) -> Iterator[pa.RecordBatch]:
        """The rows that were not rolled back; call `spill` first."""
        aborted = pa.array(sorted(self.aborted), pa.int64())
        for body in self.spool.drain():
            kept = body.filter(pc.invert(pc.is_in(body["subxid"], aborted))) if self.aborted else body
            yield with_views(kept)
