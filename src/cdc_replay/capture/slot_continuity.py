"""Checks that the slot continues its change log: one history, no gap; and how far to read.

| position of the slot | because                                             | effect                     |
|----------------------|-----------------------------------------------------|----------------------------|
| at the log's end     | the last pull was complete                          | the next pull starts there |
| before the log's end | capture or server crashed before `advance` (R1.30)  | compared, then moved       |
| after the log's end  | another program read it, or it was recreated        | refused: there is a gap    |

Log and server must share one history. A system identifier distinguishes clusters, not copies of a cluster:

| the server is                         | detected by                                                       |
|---------------------------------------|-------------------------------------------------------------------|
| another cluster                       | its system identifier                                             |
| another or a recreated database       | its oid, which does not change when it is renamed                 |
| a promoted standby, a restored backup | a new timeline; it must contain the log's up to the log's end     |
| a replaced primary                    | a timeline that does not descend from the log's                   |
| an older copy, on the same timeline   | WAL that ends before the log, or a slot before the log's end that |
|                                       | sends transactions that the log does not have (`redelivery`)      |
| a copy that was captured elsewhere    | a slot after the log's end                                        |

A copy whose slot is at the log's end continues the log as well as the original does. After that, the
original's slot is before the log's end and sends different transactions.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Final

from cdc_replay.capture.publications import ROOT_PUBLICATIONS
from cdc_replay.capture.redelivery import compare_redelivery
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import ChangeLogMismatch, PublisherNotReady, SlotLost, SlotMissing
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
"""End of the last record, start of the next one, flush position, and `wal_writer_delay`.

After a record that fills its page the server returns the start of the next record, after a page header (24
bytes; 40 for a segment) that does not exist yet: it is not flushed before the next write.
"""

_POLL_SECONDS: Final = 0.01
# The server flushes an asynchronous commit within three times wal_writer_delay.
_DELAYS: Final = 4


def check_continuity(connection: Connection, log: ChangeLog, slot: str) -> SlotStatus:
    """Check that the slot continues the log: the same history, and no gap.

    Raises:
        ChangeLogMismatch: if the log belongs to another cluster, history or slot.
        SlotMissing, SlotLost: if the changes after the log's end are no longer available.
        PublisherNotReady: if the slot belongs to another database or plugin.
    """
    identity = check_header(connection, log, slot)
    try:
        return check_no_gap(connection, log, slot)
    except SlotMissing as missing:
        raise slot_missing(log, slot, identity) from missing


def check_header(connection: Connection, log: ChangeLog, slot: str) -> SystemIdentity:
    """Check that the log belongs to this slot and database, and to a history that the server continues.

    Raises:
        ChangeLogMismatch: listing the differences.
    """
    identity = system_identity(connection)
    header = log.header
    differences = [
        f"{label} {log_value!r}, not {server_value!r}"
        for label, server_value, log_value in (
            ("system identifier", identity.system_identifier, header.system_identifier),
            ("slot", slot, header.slot),
        )
        if server_value != log_value
    ]
    if header.database.oid != identity.database.oid:
        differences.append(f"database {header.database}, not {identity.database}")
    if differences:
        raise ChangeLogMismatch(
            f'change log "{log.uri}" belongs to another publisher',
            detail=f"It was captured from {', '.join(differences)}.",
            hint="Correct `dsn`, `slot` or `change_log` in the configuration. To capture from another"
            " database instead: " + REBUILD_ALL,
            rule="R1.33",
        )
    if identity.timeline != header.timeline:
        _check_timeline(connection, log, identity.timeline)
    _check_wal_end(connection, log)
    return identity


def check_no_gap(connection: Connection, log: ChangeLog, slot: str) -> SlotStatus:
    """Check that the slot is not past the log's end.

    Between a peek and the commit of its changes this proves that the peek began at or before the log's end:
    a slot only moves forward, even if it is dropped and recreated.

    Raises:
        SlotMissing, SlotLost: if the changes after the log's end are no longer available.
        PublisherNotReady: if the slot belongs to another database or plugin.
    """
    status = check_slot(connection, slot)
    if status.confirmed_flush > log.end_lsn:
        raise SlotLost(
            f'replication slot "{slot}" is past the end of its change log',
            detail=f"The slot is at {status.confirmed_flush}, the log ends at {log.end_lsn}:"
            " the changes in between are not in the log and cannot be read again. Another reader has"
            " consumed them: another deployment with the same slot, a copy of this log, or another program.",
            hint="Stop the other reader, or choose another slot if this one is another deployment's. Then: "
            + RESYNCHRONIZE,
            rule="R1.29",
        )
    return status


def slot_missing(log: ChangeLog, slot: str, identity: SystemIdentity) -> SlotMissing:
    """The error for a log whose slot does not exist."""
    promoted = (
        f" The server is on timeline {identity.timeline}, the log on {log.header.timeline}: the promoted"
        " standby, or the restored backup, did not have the slot."
    )
    return SlotMissing(
        f'replication slot "{slot}" of change log "{log.uri}" no longer exists',
        detail=f"The log ends at {log.end_lsn}; a new slot would start later and leave a gap."
        + (promoted if identity.timeline != log.header.timeline else ""),
        hint=RESYNCHRONIZE,
        rule="R1.33",
    )


def _check_timeline(connection: Connection, log: ChangeLog, timeline: int) -> None:
    """Check that the server's timeline descends from the log's, and did not leave it before the log's end."""
    log_timeline = log.header.timeline
    switch_lsn = timeline_history(connection, timeline).branch_lsn(log_timeline)
    if switch_lsn is None:
        raise ChangeLogMismatch(
            f"timeline {timeline} of the publisher does not descend from timeline {log_timeline} of"
            f' change log "{log.uri}"',
            detail="The server is a replaced primary, or a standby of another branch.",
            hint="Point `dsn` at the server that took over. To capture from this server instead: "
            + RESYNCHRONIZE_ALL,
            rule="R1.33",
        )
    if switch_lsn < log.end_lsn:
        lost_count = log.summary(Window(max(switch_lsn, log.start_lsn), log.end_lsn)).transactions
        raise ChangeLogMismatch(
            f'change log "{log.uri}" ends at {log.end_lsn}, timeline {timeline} of the publisher branched off'
            f" timeline {log_timeline} at {switch_lsn}",
            detail=f"The log holds {lost_count} transactions that the publisher never had on this timeline;"
            " subscribers may have applied them.",
            hint=RESYNCHRONIZE_ALL,
            rule="R1.33",
        )


def _check_wal_end(connection: Connection, log: ChangeLog) -> None:
    """Check that WAL is flushed up to the log's end: the log only has flushed changes (R1.21)."""
    _, _, flushed, _ = _wal_positions(connection)
    if flushed < log.end_lsn:
        raise ChangeLogMismatch(
            f'change log "{log.uri}" ends at {log.end_lsn}, the WAL of the publisher at {flushed}',
            detail="The server was restored from an older copy, or it has lost flushed WAL.",
            hint="Point `dsn` at the server this change log was captured from. To capture from this server"
            " instead: " + RESYNCHRONIZE_ALL,
            rule="R1.21",
        )


def align_slot_and_log(connection: Connection, log: ChangeLog, status: SlotStatus) -> None:
    """Move a slot that is before the log's end there, and update the log's header; after `check_continuity`.

    Redelivered transactions must equal those of the log. The slot is not moved while prepared transactions
    are stored: the next peek may need the outcome of one. The header gets the server's timeline and the
    database's current name. Idempotent after a crash.

    Raises:
        ChangeLogMismatch: if the server sends other transactions than the log has.
    """
    if status.confirmed_flush < log.end_lsn:
        compare_redelivery(connection, log, status, move=not _has_prepared_transactions(log))
    identity = system_identity(connection)
    header = dataclasses.replace(log.header, timeline=identity.timeline, database=identity.database)
    if header == log.header:
        return
    if header.timeline != log.header.timeline:
        logger.warning(
            "change log %s continues from timeline %d to %d at %s",
            log.uri, log.header.timeline, header.timeline, log.end_lsn,
        )  # fmt: skip
    log.record_header(header)


def _has_prepared_transactions(log: ChangeLog) -> bool:
    """Whether prepared transactions are stored, the outcome of which the slot may send again.

    If the outcome is in the log already, the process that wrote it died before it removed the stored rows.
    """
    folders = (log.prepared, *map(log.prepared_roots, ROOT_PUBLICATIONS))
    return any(folder.list_keys() for folder in folders)


def reachable_lsn(connection: Connection, to_lsn: Lsn | None) -> Lsn:
    """The position to read up to: `to_lsn` (default: the end of WAL), but at most the flush position.

    The slot functions read flushed WAL only (R1.21). A commit with synchronous_commit = off is visible before
    it is flushed, so this waits for the flush, but at most for the server's own delay: WAL of open
    transactions is not flushed until the next commit.

    Raises:
        PublisherNotReady: if the server's WAL has not reached `to_lsn`.
    """
    target, inserted, flushed, delay_ms = _wal_positions(connection)
    if to_lsn is not None:
        if to_lsn > inserted:
            raise PublisherNotReady(
                f"the publisher's WAL has not reached {to_lsn}",
                detail=f"It is at {inserted}.",
                hint="Give a position that it has reached, such as pg_current_wal_insert_lsn().",
            )
        target = to_lsn
    deadline = time.monotonic() + _DELAYS * delay_ms / 1000
    while flushed < target and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        _, _, flushed, _ = _wal_positions(connection)
    return min(target, flushed)


def _wal_positions(connection: Connection) -> tuple[Lsn, Lsn, Lsn, int]:
    ((*positions, delay_ms),) = connection.execute(WAL_POSITIONS).fetchall()
    last_record_end, inserted, flushed = map(Lsn.parse, positions)
    return last_record_end, inserted, flushed, delay_ms
