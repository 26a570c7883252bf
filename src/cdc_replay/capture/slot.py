"""The slot beside its log: one reader at a time, the same history, no gap, and how far to read.

| the slot is            | because                                            | what happens                 |
|------------------------|----------------------------------------------------|------------------------------|
| at the log's end       | the last pull was complete                         | the next pull starts there   |
| behind the log's end   | a crash before `advance`, or of the server (R1.30) | it is moved to the log's end |
| ahead of the log's end | somebody else has read it, or made it anew         | refused: there is a gap      |
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import ChangeLogMismatch, SlotActive, SlotLost
from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.replication import (
    RESYNCHRONIZE,
    SlotStatus,
    advance_slot,
    check_slot,
    system_identity,
)

LOCK_CLASS: Final = 0x63647265
"""First key of the advisory lock that a capture holds; the second is a hash of the slot's name."""

WAL_POSITIONS: Final = """
    select pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn()::text,
           (select setting::int from pg_settings where name = 'wal_writer_delay')
"""

_POLL_SECONDS: Final = 0.01
# The server flushes an asynchronous commit within three times wal_writer_delay.
_DELAYS: Final = 4


@contextlib.contextmanager
def only_reader(connection: Connection, slot: str) -> Iterator[None]:
    """Hold the slot's advisory lock, so that two captures never pull at once.

    Raises:
        SlotActive: if another session holds it.
    """
    keys = (LOCK_CLASS, slot)
    ((locked,),) = connection.execute("select pg_try_advisory_lock(%s, hashtext(%s))", keys).fetchall()
    if not locked:
        raise SlotActive(
            f'another capture reads replication slot "{slot}"',
            hint="Let it end, then run the command again; it starts where the other one stopped.",
        )
    try:
        yield
    finally:
        # A connection that broke has given up its locks, and has an error of its own to tell about.
        if not connection.closed and not connection.broken:
            connection.execute("select pg_advisory_unlock(%s, hashtext(%s))", keys)


def check_continuity(connection: Connection, log: ChangeLog, slot: str) -> SlotStatus:
    """Check that the slot continues the log: same cluster and timeline, and nothing between the two.

    Raises:
        ChangeLogMismatch: if the log is of another cluster, timeline or slot.
        SlotMissing, SlotLost: if the changes behind the log's end cannot be had any more.
        PublisherNotReady: if the slot is of another database or plugin.
    """
    check_header(connection, log, slot)
    status = check_slot(connection, slot)
    if status.confirmed_flush > log.end_lsn:
        raise SlotLost(
            f'replication slot "{slot}" is past the end of its change log',
            detail=f"The slot is at {status.confirmed_flush}, the log ends at {log.end_lsn}:"
            " the changes in between are not in the log and cannot be read again.",
            hint=RESYNCHRONIZE,
            rule="R1.29",
        )
    return status


def check_header(connection: Connection, log: ChangeLog, slot: str) -> None:
    """Check that the log is of this cluster, its timeline, and this slot.

    Raises:
        ChangeLogMismatch: listing all that differs.
    """
    identity = system_identity(connection)
    header = log.header
    differences = [
        f"{what} {theirs!r}, not {ours!r}"
        for what, ours, theirs in (
            ("system identifier", identity.system_identifier, header.system_identifier),
            ("timeline", identity.timeline, header.timeline),
            ("slot", slot, header.slot),
        )
        if ours != theirs
    ]
    if differences:
        raise ChangeLogMismatch(
            f'change log "{log.uri}" is not of this publisher',
            detail=f"It is of {', '.join(differences)}.",
            hint="Correct `dsn`, `slot` or `change_log` in the configuration. If the server was replaced or"
            " restored: move the change log away. " + RESYNCHRONIZE,
            rule="R1.33",
        )


def catch_up(connection: Connection, log: ChangeLog, status: SlotStatus) -> None:
    """Move a slot that is behind its log to the log's end: what is before it is durable there."""
    if status.confirmed_flush < log.end_lsn:
        advance_slot(connection, status.name, log.end_lsn)


def reachable(connection: Connection, to_lsn: Lsn | None) -> Lsn:
    """The position to read up to: `to_lsn`, by default where the server writes now, as far as it is flushed.

    The slot functions see flushed WAL only (R1.21). A commit with synchronous_commit = off is visible
    before it is flushed, so this waits for the flush, but no longer than the server itself may delay it:
    WAL of open transactions is not flushed until somebody commits.
    """
    wanted, flushed, delay_ms = _wal_positions(connection)
    if to_lsn is not None:
        wanted = to_lsn
    deadline = time.monotonic() + _DELAYS * delay_ms / 1000
    while flushed < wanted and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        _, flushed, _ = _wal_positions(connection)
    return min(wanted, flushed)


def _wal_positions(connection: Connection) -> tuple[Lsn, Lsn, int]:
    ((inserted, flushed, delay_ms),) = connection.execute(WAL_POSITIONS).fetchall()
    return Lsn.parse(inserted), Lsn.parse(flushed), delay_ms
