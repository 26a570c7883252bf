r"""Authenticates the event triggers' logical messages by their code, and drops all others.

Any role may call `pg_logical_emit_message`, with any prefix. So a message of the event triggers
(`trigger_functions`) begins with a line that no other program can write:

    ORDINAL CODE                 12 9f86d081884c7d65…
    content                      {"format": 1, …}

    CODE = sha256(secret || sha256(secret || "PREFIX\nXID\nORDINAL\ncontent")), in hexadecimal

| part    | is                                                        | so that a message           |
|---------|-----------------------------------------------------------|-----------------------------|
| secret  | readable by its owner and the capture role only           | cannot be forged            |
| XID     | the top-level transaction of the message                  | is invalid in any other one |
| ORDINAL | greater than that of the transaction's previous message   | is accepted once            |

A streamed transaction that is sent from its beginning again, as in the second piece of a pull, has its
messages again: those of before were dropped with the rest of it.

All other messages are dropped before they reach the log: silently, or with a warning if they have our prefix.
The server truncates messages with another prefix or above a size limit (`postgres.peek`), so that they cannot
fill our memory.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cdc_replay.capture.message_batch import MessageBatch, kind_mask
from cdc_replay.catalog.ddl_change import CODE_LINE
from cdc_replay.errors import InvalidMessage
from cdc_replay.pgoutput.messages import LogicalMessage, MessageType
from cdc_replay.pgoutput.reader import decode
from cdc_replay.postgres.peek import OUR_PREFIXES

_PREFIX_OFFSET: Final = 1 + 1 + 8
"""After kind, flags and LSN (R1.1)."""
_MESSAGE: Final = ord(MessageType.MESSAGE.value)
_STREAM_START: Final = ord(MessageType.STREAM_START.value)
_BEGINS: Final = kind_mask(
    frozenset({MessageType.BEGIN, MessageType.BEGIN_PREPARE, MessageType.STREAM_START})
)
_FIRST_BLOCK: Final = slice(5, 6)
"""The byte of a Stream start that is 1 in the first block of a transaction (R1.1)."""


def message_code(secret: bytes, prefix: str, xid: int, ordinal: int, content: bytes) -> str:
    """The code of a message, as the trigger function computes it."""
    signed = f"{prefix}\n{xid}\n{ordinal}\n".encode() + content
    return hashlib.sha256(secret + hashlib.sha256(secret + signed).digest()).hexdigest()


@dataclass(slots=True)
class MessageFilter:
    """Drops foreign messages from the peeks of a pull; all if there is no `secret` (no event triggers)."""

    secret: bytes | None
    refused: collections.Counter[int] = field(default_factory=collections.Counter)
    """The number of dropped messages with our prefix, by transaction."""
    _last_ordinals: dict[int, int] = field(default_factory=dict)

    def drop_foreign(self, batch: MessageBatch) -> MessageBatch:
        """The batch without foreign messages."""
        if self._last_ordinals:
            self._forget_restarted(batch)
        messages = np.flatnonzero(batch.kinds == _MESSAGE)
        if not len(messages):
            return batch
        is_kept: npt.NDArray[np.bool_] = np.ones(len(batch.kinds), dtype=np.bool_)
        for position in messages.tolist():
            is_kept[position] = self._accepts(batch.message(position), int(batch.xid[position]))
        return batch if is_kept.all() else batch.filter(is_kept)

    def _forget_restarted(self, batch: MessageBatch) -> None:
        """Forget the messages of transactions that are sent from their beginning again, streamed or not."""
        begins = _BEGINS[batch.kinds] & np.isin(batch.xid, list(self._last_ordinals))
        for position in np.flatnonzero(begins).tolist():
            if batch.kinds[position] != _STREAM_START or batch.message(position)[_FIRST_BLOCK] == b"\1":
                self._last_ordinals.pop(int(batch.xid[position]), None)

    def _accepts(self, data: bytes, xid: int) -> bool:
        if not data.startswith(OUR_PREFIXES, _PREFIX_OFFSET):
            return False
        if self._is_authentic(data, xid):
            return True
        self.refused[xid] += 1
        return False

    def _is_authentic(self, data: bytes, xid: int) -> bool:
        try:
            message = decode(data)
        except InvalidMessage:
            return False  # truncated by the server
        if self.secret is None or not isinstance(message, LogicalMessage) or not message.is_transactional:
            return False
        line = CODE_LINE.match(message.content)
        if line is None:
            return False
        ordinal, code = int(line[1]), line[2].decode()
        expected = message_code(self.secret, message.prefix, xid, ordinal, message.content[line.end() :])
        if not hmac.compare_digest(code, expected) or ordinal <= self._last_ordinals.get(xid, 0):
            return False
        self._last_ordinals[xid] = ordinal
        return True
