"""What a slot that is behind its log sends again, compared with what the log holds.

A slot falls behind its log when a capture is killed before it moves the slot, and when the server crashes
before a checkpoint (R1.30). It also is behind on an older copy of the server, which went another way since:
there the same positions hold other transactions, and to skip them would lose them. So before the slot is
moved to the log's end, the transactions that it sends up to there must be those of the log, by commit LSN,
xid and commit time.

| only the server has it | another history; but a K may stand for no change at all (R9.9),  |
|                        | and messages of others are not kept (`message_code`)            |
| only the log has it    | another history; but TRUNCATE of a partitioned table without    |
|                        | partitions is shown by a root publication alone (R2.14)         |

Where the slot is moved, it is in steps of a bounded number of messages, so that the server holds no more than
for a pull.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from cdc_replay.capture.message_batch import buffers, kind_mask
from cdc_replay.capture.publications import ROOT_PUBLICATIONS
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.queries import CommittedTransaction
from cdc_replay.errors import ChangeLogMismatch
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.pgoutput.messages import Commit, CommitPrepared
from cdc_replay.pgoutput.messages import MessageType as Kind
from cdc_replay.pgoutput.reader import decode
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.peek import PeekOptions, RawMessages, peek
from cdc_replay.postgres.slot import RESYNCHRONIZE_ALL, SlotStatus, advance_slot
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS

MESSAGES_PER_STEP: Final = 1_000_000

_CHANGES: Final = frozenset({Kind.INSERT, Kind.UPDATE, Kind.DELETE, Kind.TRUNCATE})
_ARE_CHANGES: Final = kind_mask(_CHANGES)
_ARE_ENDS: Final = kind_mask(
    frozenset({Kind.COMMIT, Kind.PREPARE, Kind.COMMIT_PREPARED, Kind.ROLLBACK_PREPARED})
)


@dataclass(frozen=True, slots=True)
class _Sent:
    """What the server sent: `upto` is the end of the last transaction, or the log's end if that was all."""

    upto: Lsn
    commits: dict[CommittedTransaction, bool]
    """Whether the transaction has changes for sure."""


def compare_redelivery(connection: Connection, log: ChangeLog, status: SlotStatus, *, move: bool) -> None:
    """Compare what a slot that is behind its log sends up to the log's end, and `move` it there.

    Raises:
        ChangeLogMismatch: naming a transaction that only one of them has.
        SlotMissing, SlotActive, SlotLost: as for `peek`.
    """
    options = PeekOptions(status.name, tuple(CAPTURE_PUBLICATIONS.values()), two_phase=status.two_phase)
    after = status.confirmed_flush
    while after < log.end_lsn:
        sent = _send_again(connection, options, log.end_lsn, MESSAGES_PER_STEP if move else None)
        of_roots = functools.partial(_sent_of_roots, connection, status, sent.upto)
        _compare(log, status.name, Window(after, sent.upto), sent, of_roots)
        after = advance_slot(connection, status.name, sent.upto) if move else sent.upto


def _send_again(connection: Connection, options: PeekOptions, log_end: Lsn, bound: int | None) -> _Sent:
    messages, last = 0, log_end
    commits: dict[CommittedTransaction, bool] = {}
    has_changes = False
    with contextlib.closing(peek(connection, options, upto_lsn=log_end, upto_nchanges=bound)) as batches:
        for raw in batches:
            messages += len(raw.lsn)
            for position, kind in _telling(raw):
                if kind in _CHANGES:
                    has_changes = True
                    continue
                last = Lsn(int(raw.lsn[position]))
                if (commit := _commit(raw, position)) is not None:
                    commits[commit] = has_changes and kind is Kind.COMMIT
                has_changes = False
    is_complete = bound is None or messages < bound
    return _Sent(log_end if is_complete else min(last, log_end), commits)


def _telling(raw: RawMessages) -> Iterator[tuple[int, Kind]]:
    """The ends of transactions (R1.22), and the first of each run of changes, with their positions."""
    content, offsets = buffers(raw.data)
    kinds = content[offsets[:-1]]
    are_changes = _ARE_CHANGES[kinds]
    begins_run = are_changes.copy()
    begins_run[1:] &= ~are_changes[:-1]
    for position in np.flatnonzero(begins_run | _ARE_ENDS[kinds]).tolist():
        yield position, Kind(chr(kinds[position]))


def _commit(raw: RawMessages, position: int) -> CommittedTransaction | None:
    """The commit that the end of a transaction is, if it is one."""
    match decode(raw.data[position].as_py()):
        case Commit(commit_time=time) | CommitPrepared(commit_time=time):
            return CommittedTransaction(Lsn(int(raw.lsn[position])), time, int(raw.xid[position]))
        case _:
            return None


def _sent_of_roots(connection: Connection, status: SlotStatus, upto: Lsn) -> frozenset[CommittedTransaction]:
    """The transactions in which partitioned tables were truncated."""
    return frozenset(
        commit
        for name in ROOT_PUBLICATIONS
        for commit in _send_again(
            connection, PeekOptions(status.name, (name,), two_phase=status.two_phase), upto, None
        ).commits
    )


def _compare(
    log: ChangeLog,
    slot: str,
    window: Window,
    sent: _Sent,
    sent_of_roots: Callable[[], frozenset[CommittedTransaction]],
) -> None:
    # What has been pruned since cannot be compared.
    window = Window(min(max(window.after, log.start_lsn), window.upto), window.upto)
    held = set(log.commits(window))
    sent_here = {one for one in sent.commits if one.commit_lsn in window}
    if not_sent := held - sent_here:
        not_sent -= sent_of_roots()
    differences = [
        *(f"only the server has {_named(one)}" for one in sent_here - held if sent.commits[one]),
        *(f"only the log has {_named(one)}" for one in not_sent),
    ]
    if differences:
        raise ChangeLogMismatch(
            f'replication slot "{slot}" sends other transactions than change log "{log.uri}" holds',
            detail=f"Behind {window.after}, up to {window.upto}, {len(differences)} differ, such as:"
            f" {min(differences)}. The server is another copy of the log's, or it was restored.",
            hint="Let `dsn` lead to the server that the log is of. To go on with this one: "
            + RESYNCHRONIZE_ALL,
            rule="R1.30",
        )


def _named(one: CommittedTransaction) -> str:
    return f"transaction {one.xid}, which commits at {one.commit_lsn}"
