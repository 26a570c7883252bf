"""The slot beside its log: one reader at a time, the same history, no gap, and how far to read.

| the slot is            | because                                            | what happens              |
|------------------------|----------------------------------------------------|---------------------------|
| at the log's end       | the last pull was complete                         | the next one starts there |
| behind the log's end   | a crash before `advance`, or of the server (R1.30) | it is compared, and moved |
| ahead of the log's end | somebody else has read it, or made it anew         | refused: there is a gap   |

The log and the server must have one history. A system identifier tells clusters apart, not copies of one:

| the server is                         | which shows in                                                    |
|---------------------------------------|-------------------------------------------------------------------|
| another cluster                       | its system identifier                                             |
| another database, or one made anew    | its oid, which stays when it is renamed                           |
| a promoted standby, a restored backup | a new timeline; it must have the log's up to the log's end        |
| a primary that was replaced           | a timeline that does not come from the log's                      |
| an older copy, on the same timeline   | WAL that ends before the log, or a slot that is behind and sends  |
|                                       | transactions that the log does not hold (`resent`)                |
| a copy that somebody captured         | a slot that is ahead of the log                                   |

A copy whose slot is at the log's end continues the log as well as the original does. After it has, the
original's slot is behind, and what it sends differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import Final

import psycopg

from cdc_replay.capture.publications import ROOT_PUBLICATIONS
from cdc_replay.capture.redelivery import compare_redelivery
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import ChangeLogMismatch, PublisherNotReady, SlotActive, SlotLost, SlotMissing
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.slot import (
    REBUILD_ALL,
    RESYNCHRONIZE,
    RESYNCHRONIZE_ALL,
    SlotStatus,
    SystemIdentity,
    check_slot,
    system_identity,
)
from cdc_replay.postgres.timeline import timeline_history

logger = logging.getLogger(__name__)

LOCK_CLASS: Final = 0x63647265
"""First key of the advisory lock that a capture holds; the second is a hash of the slot's name."""

WAL_POSITIONS: Final = """
    select (inserted - case
               when (inserted - '0/0') % segment_bytes = 40 then 40
               when (inserted - '0/0') % page_bytes = 24 then 24
               else 0
           end)::text,
           inserted::text,
           pg_current_wal_flush_lsn()::text,
           delay_ms
    from pg_current_wal_insert_lsn() as inserted,
         (select max(setting::int) filter (where name = 'wal_segment_size') as segment_bytes,
                 max(setting::int) filter (where name = 'wal_block_size') as page_bytes,
                 max(setting::int) filter (where name = 'wal_writer_delay') as delay_ms
          from pg_settings) as server
"""
"""Where the last record ends, where the next one begins, how far WAL is flushed, and `wal_writer_delay`.

Behind a record that fills its page the server tells where the next one will begin, after the header of a page
(24 bytes; of a segment, 40) that is not there yet: it would not be flushed before somebody writes.
"""

PATIENCE_SECONDS: Final = 5

_TRY_LOCK: Final = "select pg_try_advisory_lock(%s, hashtext(%s))"
_POLL_SECONDS: Final = 0.01
# The server flushes an asynchronous commit within three times wal_writer_delay.
_DELAYS: Final = 4


@contextlib.contextmanager
def only_reader(connection: Connection, slot: str) -> Iterator[None]:
    """Hold the slot's advisory lock, so that two captures never pull at once.

    The session of a capture that was killed has it until the server notices.

    Raises:
        SlotActive: if another session holds it for `PATIENCE_SECONDS`.
    """
    keys = (LOCK_CLASS, slot)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not connection.execute(_TRY_LOCK, keys).fetchall()[0][0]:
        if time.monotonic() > deadline:
            raise SlotActive(
                f'another capture reads replication slot "{slot}"',
                hint="Let it end, then run the command again; it starts where the other one stopped.",
            )
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        # A session that has ended has given up its locks, and there is an error of its own to tell about.
        with contextlib.suppress(psycopg.OperationalError):
            connection.execute("select pg_advisory_unlock(%s, hashtext(%s))", keys)


def check_continuity(connection: Connection, log: ChangeLog, slot: str) -> SlotStatus:
    """Check that the slot continues the log: one history, and nothing between the two.

    Raises:
        ChangeLogMismatch: if the log is of another cluster, history or slot.
        SlotMissing, SlotLost: if the changes behind the log's end cannot be had any more.
        PublisherNotReady: if the slot is of another database or plugin.
    """
    identity = check_header(connection, log, slot)
    try:
        return check_no_gap(connection, log, slot)
    except SlotMissing as missing:
        raise slot_missing(log, slot, identity) from missing


def check_header(connection: Connection, log: ChangeLog, slot: str) -> SystemIdentity:
    """Check that the log is of this slot, this database, and of a history that the server goes on with.

    Raises:
        ChangeLogMismatch: saying what differs.
    """
    identity = system_identity(connection)
    header = log.header
    differences = [
        f"{what} {theirs!r}, not {ours!r}"
        for what, ours, theirs in (
            ("system identifier", identity.system_identifier, header.system_identifier),
            ("slot", slot, header.slot),
        )
        if ours != theirs
    ]
    if header.database is not None and header.database.oid != identity.database.oid:
        differences.append(f"database {header.database}, not {identity.database}")
    if differences:
        raise ChangeLogMismatch(
            f'change log "{log.uri}" is not of this publisher',
            detail=f"It is of {', '.join(differences)}.",
            hint="Correct `dsn`, `slot` or `change_log` in the configuration. To go on with another"
            " database: " + REBUILD_ALL,
            rule="R1.33",
        )
    if identity.timeline != header.timeline:
        _check_timeline(connection, log, identity.timeline)
    _check_wal_end(connection, log)
    return identity


def check_no_gap(connection: Connection, log: ChangeLog, slot: str) -> SlotStatus:
    """Check that the slot is not past the log's end.

    After a peek, and before its changes are committed to the log, this proves that the peek began at the
    log's end or before: a slot only ever moves forward, also where it was dropped and made anew.

    Raises:
        SlotMissing, SlotLost: if the changes behind the log's end cannot be had any more.
        PublisherNotReady: if the slot is of another database or plugin.
    """
    status = check_slot(connection, slot)
    if status.confirmed_flush > log.end_lsn:
        raise SlotLost(
            f'replication slot "{slot}" is past the end of its change log',
            detail=f"The slot is at {status.confirmed_flush}, the log ends at {log.end_lsn}:"
            " the changes in between are not in the log and cannot be read again. Somebody else has read"
            " them: another deployment with the same slot, a copy of this log, or another program.",
            hint="Let nobody else read the slot; if it is another deployment's, choose another one. Then: "
            + RESYNCHRONIZE,
            rule="R1.29",
        )
    return status


def slot_missing(log: ChangeLog, slot: str, identity: SystemIdentity) -> SlotMissing:
    """The error for a log whose slot is gone."""
    promoted = (
        f" The server is on timeline {identity.timeline}, the log on {log.header.timeline}: the standby that"
        " was promoted, or the backup that was restored, did not have the slot."
    )
    return SlotMissing(
        f'replication slot "{slot}" of change log "{log.uri}" does not exist any more',
        detail=f"The log ends at {log.end_lsn}; a new slot would start later and leave a gap."
        + (promoted if identity.timeline != log.header.timeline else ""),
        hint=RESYNCHRONIZE,
        rule="R1.33",
    )


def _check_timeline(connection: Connection, log: ChangeLog, timeline: int) -> None:
    """Check that the log's timeline leads to the server's, and was not left before the log's end."""
    theirs = log.header.timeline
    left = timeline_history(connection, timeline).branch_lsn(theirs)
    if left is None:
        raise ChangeLogMismatch(
            f'change log "{log.uri}" is of timeline {theirs}, from which timeline {timeline} of the publisher'
            " does not come",
            detail="It is a primary that was replaced, or a standby of another branch.",
            hint="Let `dsn` lead to the server that took over. To go on with this one: " + RESYNCHRONIZE_ALL,
            rule="R1.33",
        )
    if left < log.end_lsn:
        lost = log.summary(Window(max(left, log.start_lsn), log.end_lsn)).transactions
        raise ChangeLogMismatch(
            f'change log "{log.uri}" goes up to {log.end_lsn}, timeline {timeline} of the publisher left'
            f" timeline {theirs} at {left}",
            detail=f"The log holds {lost} transactions that the publisher never had on this timeline;"
            " subscribers may have applied them.",
            hint=RESYNCHRONIZE_ALL,
            rule="R1.33",
        )


def _check_wal_end(connection: Connection, log: ChangeLog) -> None:
    """The log holds nothing that was not flushed (R1.21): a server that ends before it is not the same."""
    _, _, flushed, _ = _wal_positions(connection)
    if flushed < log.end_lsn:
        raise ChangeLogMismatch(
            f'change log "{log.uri}" goes up to {log.end_lsn}, the WAL of the publisher only to {flushed}',
            detail="The server was restored from an older copy, or it has lost WAL that was flushed.",
            hint="Let `dsn` lead to the server that the log is of. To go on with this one: "
            + RESYNCHRONIZE_ALL,
            rule="R1.21",
        )


def align_slot_and_log(connection: Connection, log: ChangeLog, status: SlotStatus) -> None:
    """Bring slot and log together, after `check_continuity`.

    What a slot that is behind the log's end sends again must be what the log holds; then the slot is moved
    there, unless prepared transactions wait: the next peek may need the outcome of one. A log of a timeline
    that the server has left goes on with the server's, one of a database that was renamed with its name. A
    crash in between repeats all this, which changes nothing.

    Raises:
        ChangeLogMismatch: if the server sends other transactions than the log holds.
    """
    if status.confirmed_flush < log.end_lsn:
        compare_redelivery(connection, log, status, move=not _waits(log))
    identity = system_identity(connection)
    header = dataclasses.replace(log.header, timeline=identity.timeline, database=identity.database)
    if header == log.header:
        return
    if header.timeline != log.header.timeline:
        logger.warning(
            "change log %s goes on from timeline %d to %d at %s",
            log.uri, log.header.timeline, header.timeline, log.end_lsn,
        )  # fmt: skip
    log.record_header(header)


def _waits(log: ChangeLog) -> bool:
    """Whether prepared transactions wait: a slot behind its log may send the outcome of one again.

    It is in the log already, but the process that wrote it died before it removed what had waited.
    """
    folders = (log.prepared, *map(log.prepared_roots, ROOT_PUBLICATIONS))
    return any(folder.list_keys() for folder in folders)


def reachable_lsn(connection: Connection, to_lsn: Lsn | None) -> Lsn:
    """The position to read up to: `to_lsn`, by default where the server writes now, as far as it is flushed.

    The slot functions see flushed WAL only (R1.21). A commit with synchronous_commit = off is visible
    before it is flushed, so this waits for the flush, but no longer than the server itself may delay it:
    WAL of open transactions is not flushed until somebody commits.

    Raises:
        PublisherNotReady: if the server has not written as far as `to_lsn`.
    """
    wanted, inserted, flushed, delay_ms = _wal_positions(connection)
    if to_lsn is not None:
        if to_lsn > inserted:
            raise PublisherNotReady(
                f"the publisher has not written as far as {to_lsn}",
                detail=f"It is at {inserted}.",
                hint="Give a position that it has reached, such as that of pg_current_wal_insert_lsn().",
            )
        wanted = to_lsn
    deadline = time.monotonic() + _DELAYS * delay_ms / 1000
    while flushed < wanted and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        _, _, flushed, _ = _wal_positions(connection)
    return min(wanted, flushed)


def _wal_positions(connection: Connection) -> tuple[Lsn, Lsn, Lsn, int]:
    ((*positions, delay_ms),) = connection.execute(WAL_POSITIONS).fetchall()
    ended, inserted, flushed = map(Lsn.parse, positions)
    return ended, inserted, flushed, delay_ms
