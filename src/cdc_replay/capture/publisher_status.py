"""The state of a publisher's slot and of its change log."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import ChangeLogMissing, SlotMissing
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.status import LogRange, PublisherStatus
from cdc_replay.postgres.connection import connect_with_deadline
from cdc_replay.postgres.slot import slot_status

_POSITION: Final = "select pg_current_wal_flush_lsn()::text"


def read_publisher_status(dsn: str, publisher: str, slot: str, seconds: float) -> PublisherStatus:
    """The publisher's position and slot; it may take about `seconds` to answer.

    Raises:
        CdcReplayError, psycopg.Error: if it does not answer.
    """
    with connect_with_deadline(dsn, purpose=f"status {publisher}", seconds=seconds) as connection:
        ((text,),) = connection.execute(_POSITION).fetchall()
        position = Lsn.parse(text)
        try:
            state = slot_status(connection, slot)
        except SlotMissing as missing:
            return PublisherStatus(publisher, slot, "missing", position, error=str(missing))
    return PublisherStatus(
        publisher=publisher,
        slot=slot,
        slot_state=state.wal_status or "unknown",
        position=position,
        retained_wal_bytes=state.retained_wal_bytes,
        safe_wal_size_bytes=state.safe_wal_size_bytes,
    )


def read_log_range(uri: str) -> LogRange:
    """What the change log holds.

    Raises:
        CdcReplayError: if it cannot be read.
    """
    try:
        change_log = ChangeLog.open(uri)
    except ChangeLogMissing:
        return LogRange()
    return LogRange(change_log.start_lsn, change_log.end_lsn, change_log.size_bytes)


def add_log_range(status: PublisherStatus, log: LogRange) -> PublisherStatus:
    """The publisher's status with that of its log."""
    status = replace(status, log_start=log.start, log_end=log.end, log_bytes=log.bytes)
    if status.position is None or log.end is None:
        return status
    return replace(status, behind_bytes=max(0, status.position.value - log.end.value))
