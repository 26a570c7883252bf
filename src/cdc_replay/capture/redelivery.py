"""Compares redelivered transactions, which a slot before its log's end sends again, with those of the log.

A slot is before its log's end if a capture was killed before it moved the slot, or if the server crashed
before a checkpoint (R1.30). It is so too on an older copy of the server whose history has diverged: there the
same positions hold other transactions, which must not be skipped. So before the slot is moved to the log's
end, the transactions sent up to there must equal the log's in commit LSN, xid and commit time.

| only the server has it | the history differs, unless it is a K without changes (R9.9), or |
|                        | has only foreign messages, which the log drops (`message_code`)  |
| only the log has it    | the history differs, unless a root peek shows it: TRUNCATE of a  |
|                        | partitioned table without partitions (R2.14)                     |

The slot is moved in steps of a limited number of messages, to bound the server's memory as in a pull.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from cdc_replay.capture.message_batch import kind_mask
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
class _Redelivery:
    """Redelivered commits; `upto` is the end of the last transaction, or the log's end if all were sent."""

    upto: Lsn
    commits: dict[CommittedTransaction, bool]
    """Whether the transaction certainly has changes."""


def compare_redelivery(connection: Connection, log: ChangeLog, status: SlotStatus, *, move: bool) -> None:
    """Compare the transactions that the slot sends up to the log's end with the log, and `move` it there.

    Raises:
        ChangeLogMismatch: naming a transaction that only one of the two has.
        SlotMissing, SlotActive, SlotLost: as for `peek`.
    """
    options = PeekOptions(status.name, tuple(CAPTURE_PUBLICATIONS.values()), two_phase=status.two_phase)
    after = status.confirmed_flush
    while after < log.end_lsn:
        redelivery = _peek_again(connection, options, log.end_lsn, MESSAGES_PER_STEP if move else None)
        read_root_commits = functools.partial(_root_commits, connection, status, redelivery.upto)
        _compare(log, status.name, Window(after, redelivery.upto), redelivery, read_root_commits)
        after = advance_slot(connection, status.name, redelivery.upto) if move else redelivery.upto


def _peek_again(connection: Connection, options: PeekOptions, log_end: Lsn, bound: int | None) -> _Redelivery:
    messages, last_end = 0, log_end
    commits: dict[CommittedTransaction, bool] = {}
    has_changes = False
    with contextlib.closing(peek(connection, options, upto_lsn=log_end, upto_nchanges=bound)) as batches:
        for raw in batches:
            messages += len(raw.lsn)
            for position, kind in _decisive_messages(raw):
                if kind in _CHANGES:
                    has_changes = True
                    continue
                last_end = Lsn(int(raw.lsn[position]))
                if (commit := _commit(raw, position)) is not None:
                    commits[commit] = has_changes and kind is Kind.COMMIT
                has_changes = False
    is_complete = bound is None or messages < bound
    return _Redelivery(log_end if is_complete else min(last_end, log_end), commits)


def _decisive_messages(raw: RawMessages) -> Iterator[tuple[int, Kind]]:
    """Index and kind of the ends of transactions (R1.22) and of the first change of each run."""
    kinds = raw.data.first_bytes()
    are_changes = _ARE_CHANGES[kinds]
    begins_run = are_changes.copy()
    begins_run[1:] &= ~are_changes[:-1]
    for position in np.flatnonzero(begins_run | _ARE_ENDS[kinds]).tolist():
        yield position, Kind(chr(kinds[position]))


def _commit(raw: RawMessages, position: int) -> CommittedTransaction | None:
    match decode(raw.data[position]):
        case Commit(commit_time=time) | CommitPrepared(commit_time=time):
            return CommittedTransaction(Lsn(int(raw.lsn[position])), time, int(raw.xid[position]))
        case _:
            return None


def _root_commits(connection: Connection, status: SlotStatus, upto: Lsn) -> frozenset[CommittedTransaction]:
    return frozenset(
        commit
        for name in ROOT_PUBLICATIONS
        for commit in _peek_again(
            connection, PeekOptions(status.name, (name,), two_phase=status.two_phase), upto, None
        ).commits
    )


def _compare(
    log: ChangeLog,
    slot: str,
    window: Window,
    redelivery: _Redelivery,
    read_root_commits: Callable[[], frozenset[CommittedTransaction]],
) -> None:
    # Pruned transactions cannot be compared.
    window = Window(min(max(window.after, log.start_lsn), window.upto), window.upto)
    logged_commits = set(log.commits(window))
    sent_commits = {commit for commit in redelivery.commits if commit.commit_lsn in window}
    if unsent_commits := logged_commits - sent_commits:
        unsent_commits -= read_root_commits()
    differences = [
        *(
            f"only the server has {_describe(commit)}"
            for commit in sent_commits - logged_commits
            if redelivery.commits[commit]
        ),
        *(f"only the log has {_describe(commit)}" for commit in unsent_commits),
    ]
    if differences:
        raise ChangeLogMismatch(
            f'replication slot "{slot}" sends other transactions than change log "{log.uri}" holds',
            detail=f"After {window.after}, up to {window.upto}, {len(differences)} differ, such as:"
            f" {min(differences)}. The server is another copy of the log's, or it was restored.",
            hint="Point `dsn` at the server this change log was captured from. To capture from this server"
            " instead: " + RESYNCHRONIZE_ALL,
            rule="R1.30",
        )


def _describe(commit: CommittedTransaction) -> str:
    return f"transaction {commit.xid}, which commits at {commit.commit_lsn}"
