"""Vectorised path for runs of plain transactions, without a Python loop over them.

    B data* C B data* C B data* C …        a run
    B R data* C, B O data* C, S …, b …     not part of a run: handled by the loop of `transactions`

A transaction belongs to a run only if it lies completely in the batch and its Begin and Commit are
well-formed. So all errors are raised by the loop; both paths produce the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc_replay.arrow.arrays import big_endian
from cdc_replay.capture.message_batch import (
    Ints,
    MessageBatch,
    RelationVersions,
    TransactionStamps,
    expand_ranges,
)
from cdc_replay.pgoutput.messages import MessageType
from cdc_replay.pgoutput.reader import POSTGRES_EPOCH_MICROSECONDS

MIN_TRANSACTIONS: Final = 8
"""Shorter runs are faster in the loop."""

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
_MAX_TIME_BYTE: Final = 0x7F
"""First byte of times that may overflow when converted to the epoch of 1970 (the year 289,000)."""
_COMMIT_TIME: Final = 1 + 1 + 8 + 8


class TransactionRun(NamedTuple):
    """Consecutive transactions of a batch: positions of their first and last messages, and their stamps."""

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
        """The position after the last message."""
        return int(self.ends[-1]) + 1

    @property
    def counts(self) -> Ints:
        """The number of data messages of each transaction."""
        return self.ends - self.begins - 1

    def after(self, lsn: int) -> TransactionRun:
        """The transactions that end after `lsn`."""
        new = self.end_lsn > lsn
        return TransactionRun(*(column[new] for column in self))

    def body(self, batch: MessageBatch, relations: RelationVersions) -> pa.RecordBatch:
        """The messages of all transactions, as `MessageBatch.body`."""
        message_positions = expand_ranges(self.begins + 1, self.ends)
        return batch.rows(message_positions, [(relations, len(message_positions))])

    def stamps(self) -> TransactionStamps:
        """The stamps of the transactions."""
        return TransactionStamps(
            pa.array(self.end_lsn),
            pa.array(self.commit_time),
            pa.array(self.xid),
            pa.nulls(len(self.xid), pa.string()),
        )


def split_runs(batch: MessageBatch) -> Iterator[int | TransactionRun]:
    """The runs of a batch, and the positions of control messages outside of runs, in order."""
    controls = batch.control_positions()
    pairs = _find_pairs(batch, controls)
    next_control = 0
    for begin, end in _run_ranges(controls, pairs):
        yield from controls[next_control:begin].tolist()
        yield _read_run(batch, controls[begin:end:_PAIR], controls[begin + 1 : end : _PAIR])
        next_control = end
    yield from controls[next_control:].tolist()


def _find_pairs(batch: MessageBatch, controls: Ints) -> Ints:
    """Indexes of the well-formed Begins that are directly followed by a well-formed Commit."""
    content, starts, lengths = batch.data.content, batch.data.starts[controls], batch.data.lengths[controls]
    kinds = batch.kinds[controls]
    begins = (kinds == _BEGIN) & (lengths == _BEGIN_BYTES)
    begins[begins] = content[starts[begins] + _BEGIN_TIME] != _MAX_TIME_BYTE
    commits = (kinds == _COMMIT) & (lengths == _COMMIT_BYTES)
    commits[commits] = _is_plain_commit(content, starts[commits])
    return np.flatnonzero(begins[:-1] & commits[1:])


def _is_plain_commit(content: npt.NDArray[np.uint8], commits: Ints) -> npt.NDArray[np.bool_]:
    """Whether each Commit has no flags, and an end LSN and time in range; the loop rejects the others."""
    is_plain: npt.NDArray[np.bool_] = (
        (content[commits + _FLAGS] == 0)
        & (content[commits + _END_LSN] < _SIGN_BIT)
        & (content[commits + _COMMIT_TIME] != _MAX_TIME_BYTE)
    )
    return is_plain


def _run_ranges(controls: Ints, pairs: Ints) -> Iterator[tuple[int, int]]:
    """The ranges of control messages that are runs: each Commit is directly followed by the next Begin."""
    if len(pairs) == 0:
        return
    next_pair = pairs[:-1] + _PAIR
    follows = (pairs[1:] == next_pair) & (controls[pairs[1:]] == controls[next_pair - 1] + 1)
    for begins in np.split(pairs, np.flatnonzero(~follows) + 1):
        if len(begins) >= MIN_TRANSACTIONS:
            yield int(begins[0]), int(begins[-1]) + _PAIR


def _read_run(batch: MessageBatch, begins: Ints, ends: Ints) -> TransactionRun:
    content, commits = batch.data.content, batch.data.starts[ends]
    return TransactionRun(
        begins,
        ends,
        end_lsn=big_endian(content, commits + _END_LSN, 8),
        commit_time=big_endian(content, commits + _COMMIT_TIME, 8) + POSTGRES_EPOCH_MICROSECONDS,
        xid=big_endian(content, batch.data.starts[begins] + _XID, 4),
    )
