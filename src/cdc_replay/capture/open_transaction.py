"""A transaction between its first and its last message.

Its rows are ranges of the chunk at hand, which cost nothing, until the chunk goes; then they are spilled.
Which of them count is known at its end only: a subtransaction may be rolled back after it was streamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.capture.message_batch import MessageBatch, MessageRange, RelationVersions
from cdc_replay.capture.spool import Spool


@dataclass(slots=True)
class OpenTransaction:
    """A transaction between its first and its last message."""

    xid: int
    relations: RelationVersions
    """In force for what comes next."""
    origin: str | None = None
    runs: list[MessageRange] = field(default_factory=list)
    """Of the chunk at hand; what earlier chunks held is in `spool`."""
    spool: Spool = field(default_factory=Spool)
    aborted: set[int] = field(default_factory=set)
    """Subtransactions whose rows do not count."""
    is_prepared: bool = False
    """Ends with P, not with C."""
    tells_of_ddl: bool = False
    """It is streamed, and has messages of the publisher's event triggers."""

    def spill(self, chunk: MessageBatch) -> None:
        """Take the rows of a chunk that is about to go."""
        if self.runs:
            self.spool.append(chunk.body(self.runs))
            self.runs = []

    @property
    def is_plain(self) -> bool:
        """All rows are in the chunk at hand, and all of them count."""
        return self.spool.is_empty and not self.aborted

    def bodies(self) -> Iterator[pa.RecordBatch]:
        """The rows that were not rolled back; all of them must have been spilled."""
        aborted = pa.array(sorted(self.aborted), pa.int64())
        for body in self.spool.drain():
            yield body.filter(pc.invert(pc.is_in(body["subxid"], aborted))) if self.aborted else body
