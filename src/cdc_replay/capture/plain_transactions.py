"""Ordinary transactions, many at once: where small ones follow each other, no Python runs for each of them.

    B data* C B data* C B data* C …        a stretch
    B R data* C, B O data* C, S …, b …     not of one: the loop of `transactions` takes them one by one

A transaction is of a stretch only if it lies in the chunk as a whole and its first and its last message are
exactly what pgoutput sends. So whatever is wrong is found, and named, by the loop; both give the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc_replay.capture.message_batch import (
    Ints,
    MessageBatch,
    RelationVersions,
    TransactionStamps,
    big_endian,
    buffers,
    positions,
)
from cdc_replay.pgoutput.messages import MessageType
from cdc_replay.pgoutput.reader import POSTGRES_EPOCH_MICROSECONDS

SHORTEST: Final = 8
"""Fewer transactions than this are quicker one by one."""

_PAIR: Final = 2
_BEGIN: Final = ord(MessageType.BEGIN.value)
_COMMIT: Final = ord(MessageType.COMMIT.value)
# Kind, LSN, time, xid; and kind, flags, LSN, end LSN, time: section 1B of the rules.
_BEGIN_BYTES: Final = 1 + 8 + 8 + 4
_BEGIN_TIME: Final = 1 + 8
_XID: Final = 1 + 8 + 8
_COMMIT_BYTES: Final = 1 + 1 + 8 + 8 + 8
_FLAGS: Final = 1
_END_LSN: Final = 1 + 1 + 8
_SIGN_BIT: Final = 0x80
_LAST_YEARS: Final = 0x7F
"""How times start that may be too large when they are counted from 1970: the year is 289,000 then."""
_COMMIT_TIME: Final = 1 + 1 + 8 + 8


class TransactionRun(NamedTuple):
    """Consecutive transactions of a chunk: where they begin and end in it, and what their ends say."""

    begins: Ints
    ends: Ints
    end_lsn: Ints
    commit_time: Ints
    xid: Ints

    @property
    def start(self) -> int:
        """The position of the first message."""
        return int(self.begins[0])

    @property
    def stop(self) -> int:
        """The position behind the last message."""
        return int(self.ends[-1]) + 1

    @property
    def counts(self) -> Ints:
        """How many messages each transaction has, without its first and its last."""
        return self.ends - self.begins - 1

    def after(self, lsn: int) -> TransactionRun:
        """The transactions that end behind `lsn`."""
        new = self.end_lsn > lsn
        return TransactionRun(*(column[new] for column in self))

    def body(self, chunk: MessageBatch, relations: RelationVersions) -> pa.RecordBatch:
        """The messages of all transactions, as `MessageBatch.body`."""
        places = positions(self.begins + 1, self.ends)
        return chunk.rows(places, [(relations, len(places))])

    def stamps(self) -> TransactionStamps:
        """What the transactions add to their rows."""
        return TransactionStamps(
            pa.array(self.end_lsn),
            pa.array(self.commit_time),
            pa.array(self.xid),
            pa.nulls(len(self.xid), pa.string()),
        )


def parts(chunk: MessageBatch) -> Iterator[int | TransactionRun]:
    """The stretches of a chunk, and the positions of the control messages that are in none, in order."""
    controls = chunk.controls()
    firsts = _firsts(chunk, controls)
    done = 0
    for begin, end in _joined(controls, firsts):
        yield from controls[done:begin].tolist()
        yield _stretch(chunk, controls[begin:end:_PAIR], controls[begin + 1 : end : _PAIR])
        done = end
    yield from controls[done:].tolist()


def _firsts(chunk: MessageBatch, controls: Ints) -> Ints:
    """Which of the control messages are a well-formed B that a well-formed C follows."""
    content, offsets = buffers(chunk.data)
    starts, lengths = offsets[controls], offsets[controls + 1] - offsets[controls]
    kinds = chunk.kinds[controls]
    begins = (kinds == _BEGIN) & (lengths == _BEGIN_BYTES)
    begins[begins] = content[starts[begins] + _BEGIN_TIME] != _LAST_YEARS
    commits = (kinds == _COMMIT) & (lengths == _COMMIT_BYTES)
    commits[commits] = _is_known(content, starts[commits])
    return np.flatnonzero(begins[:-1] & commits[1:])


def _is_known(content: npt.NDArray[np.uint8], commits: Ints) -> npt.NDArray[np.bool_]:
    """Which C have no flags, and an end LSN and a time that signed numbers hold: the loop refuses others."""
    known: npt.NDArray[np.bool_] = (
        (content[commits + _FLAGS] == 0)
        & (content[commits + _END_LSN] < _SIGN_BIT)
        & (content[commits + _COMMIT_TIME] != _LAST_YEARS)
    )
    return known


def _joined(controls: Ints, firsts: Ints) -> Iterator[tuple[int, int]]:
    """The ranges of control messages that are stretches: each C is directly followed by the next B."""
    if len(firsts) == 0:
        return
    following = firsts[:-1] + _PAIR
    follows = (firsts[1:] == following) & (controls[firsts[1:]] == controls[following - 1] + 1)
    for begins in np.split(firsts, np.flatnonzero(~follows) + 1):
        if len(begins) >= SHORTEST:
            yield int(begins[0]), int(begins[-1]) + _PAIR


def _stretch(chunk: MessageBatch, begins: Ints, ends: Ints) -> TransactionRun:
    content, offsets = buffers(chunk.data)
    commits = offsets[ends]
    return TransactionRun(
        begins,
        ends,
        end_lsn=big_endian(content, commits + _END_LSN, 8),
        commit_time=big_endian(content, commits + _COMMIT_TIME, 8) + POSTGRES_EPOCH_MICROSECONDS,
        xid=big_endian(content, offsets[begins] + _XID, 4),
    )
