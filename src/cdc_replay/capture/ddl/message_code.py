r"""Which logical messages of the stream are of our event triggers: those that carry their code.

Any role may call `pg_logical_emit_message`, with any prefix. So a message of the event triggers
(`trigger_functions`) begins with a line that nobody else can write:

    ORDINAL CODE                 12 9f86d081884c7d65…
    content                      {"format": 1, …}

    CODE = sha256(secret || sha256(secret || "PREFIX\nXID\nORDINAL\ncontent")), in hexadecimal

| part    | is                                                            | so that a message           |
|---------|---------------------------------------------------------------|-----------------------------|
| secret  | what its owner and the capture role can read, and nobody else | cannot be written by others |
| XID     | the top-level transaction that the message is in              | counts in no other one      |
| ORDINAL | greater than that of the message before it in the transaction | counts once                 |

Everything else is dropped before it reaches the log: messages of other programs in silence, those that have
our prefix and not the code with a warning. The server cuts off what is dropped for its prefix or its size
(`postgres.peek`), so that nobody can fill our memory.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cdc_replay.capture.message_batch import MessageBatch
from cdc_replay.catalog.ddl_change import CODE_LINE
from cdc_replay.errors import InvalidMessage
from cdc_replay.pgoutput.messages import LogicalMessage, MessageType
from cdc_replay.pgoutput.reader import decode
from cdc_replay.postgres.peek import OUR_PREFIXES

_PREFIX_OFFSET: Final = 1 + 1 + 8
"""Of kind, flags and LSN (R1.1)."""
_MESSAGE: Final = ord(MessageType.MESSAGE.value)


def code_of(secret: bytes, prefix: str, xid: int, ordinal: int, content: bytes) -> str:
    """The code of a message, as the server computes it."""
    signed = f"{prefix}\n{xid}\n{ordinal}\n".encode() + content
    return hashlib.sha256(secret + hashlib.sha256(secret + signed).digest()).hexdigest()


@dataclass(slots=True)
class MessageFilter:
    """Takes what is not of our event triggers out of one peek.

    Without a `secret`, because the event triggers are not installed, no message is of them.
    """

    secret: bytes | None
    refused: collections.Counter[int] = field(default_factory=collections.Counter)
    """How many messages with our prefix had not its code, by the xid of their transaction."""
    _last_ordinals: dict[int, int] = field(default_factory=dict)

    def drop_foreign(self, batch: MessageBatch) -> MessageBatch:
        """The chunk without messages of others."""
        messages = np.flatnonzero(batch.kinds == _MESSAGE)
        if not len(messages):
            return batch
        is_kept: npt.NDArray[np.bool_] = np.ones(len(batch.kinds), dtype=np.bool_)
        for position in messages.tolist():
            is_kept[position] = self._accepts(batch.message(position), int(batch.xid[position]))
        return batch if is_kept.all() else batch.filter(is_kept)

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
            return False  # the server has cut it off
        if self.secret is None or not isinstance(message, LogicalMessage) or not message.is_transactional:
            return False
        line = CODE_LINE.match(message.content)
        if line is None:
            return False
        ordinal, code = int(line[1]), line[2].decode()
        expected = code_of(self.secret, message.prefix, xid, ordinal, message.content[line.end() :])
        if not hmac.compare_digest(code, expected) or ordinal <= self._last_ordinals.get(xid, 0):
            return False
        self._last_ordinals[xid] = ordinal
        return True
