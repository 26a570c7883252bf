"""The event triggers' messages among log rows (R9.10)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.arrow.byte_slices import without_views
from cdc_replay.catalog.ddl_change import CATALOG_PREFIX, strip_code
from cdc_replay.model.lsn import Lsn
from cdc_replay.pgoutput.messages import LogicalMessage, MessageType
from cdc_replay.pgoutput.reader import decode


@dataclass(frozen=True, slots=True)
class CatalogMessage:
    """The message of one DDL command of a committed transaction; `lsn` is its own position."""

    commit_lsn: Lsn
    lsn: Lsn
    xid: int
    content: bytes


def catalog_messages(rows: pa.RecordBatch) -> Iterator[CatalogMessage]:
    """The catalog messages among log rows, in order; foreign messages were dropped (`message_code`)."""
    are_messages = pc.equal(rows["kind"], MessageType.MESSAGE.value)
    if not are_messages.true_count:
        return
    message_rows = without_views(rows.select(["commit_lsn", "lsn", "xid", "message"])).filter(are_messages)
    for row in message_rows.to_pylist():
        message = decode(row["message"])
        if isinstance(message, LogicalMessage) and message.prefix == CATALOG_PREFIX:
            content = strip_code(message.content)
            yield CatalogMessage(Lsn(row["commit_lsn"]), Lsn(row["lsn"]), row["xid"], content)
