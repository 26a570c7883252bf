"""The messages of the publisher's event triggers among the rows of the log (R9.10, R9.13)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.catalog.delta import CATALOG_PREFIX
from cdc_replay.model.lsn import Lsn
from cdc_replay.pgoutput.messages import LogicalMessage, MessageType
from cdc_replay.pgoutput.reader import decode

_OURS: Final = b"cdc_replay."
"""How the prefixes of all messages of the event triggers begin."""
_PREFIX: Final = 1 + 1 + 8
"""Behind kind, flags and LSN."""


@dataclass(frozen=True, slots=True)
class CatalogMessage:
    """What one command of a committed transaction changed; `lsn` is where the message was written."""

    commit_lsn: Lsn
    lsn: Lsn
    xid: int
    content: bytes


def catalog_messages(rows: pa.RecordBatch) -> Iterator[CatalogMessage]:
    """Those among rows of the log, in order; a message outside of its transaction says nothing."""
    are_messages = pc.equal(rows["kind"], MessageType.MESSAGE.value)
    if not are_messages.true_count:
        return
    found = rows.select(["commit_lsn", "lsn", "xid", "message"]).filter(are_messages)
    for row in found.to_pylist():
        message = decode(row["message"]) if is_of_triggers(row["message"]) else None
        if (
            isinstance(message, LogicalMessage)
            and message.is_transactional
            and message.prefix == CATALOG_PREFIX
        ):
            yield CatalogMessage(Lsn(row["commit_lsn"]), Lsn(row["lsn"]), row["xid"], message.content)


def is_of_triggers(message: bytes) -> bool:
    """Whether a logical message has the prefix of the event triggers."""
    return message.startswith(_OURS, _PREFIX)
