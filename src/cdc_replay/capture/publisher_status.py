"""The state of a publisher's slot and of its change log."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, TypeVar

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import ChangeLogMissing, SlotMissing, text_of_error
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.status import LogRange, PublisherState, PublisherStatus
from cdc_replay.postgres.answers import Answer
from cdc_replay.postgres.connection import connect_with_deadline
from cdc_replay.postgres.slot import SlotStatus, slot_status

_T = TypeVar("_T")

NEAR_LOST_SHARE: Final = 0.9
"""A slot that retains this share of the WAL that it may retain is near lost."""

_POSITION: Final = "select pg_current_wal_flush_lsn()::text"


def read_publisher_status(
    dsn: str, publisher: str, slot: str, seconds: float, max_retained_wal: int | None = None
) -> PublisherStatus:
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
            return PublisherStatus(
                publisher, slot, "missing", position, error=str(missing), state=PublisherState.NO_SLOT
            )
    return PublisherStatus(
        publisher=publisher,
        slot=slot,
        slot_state=state.wal_status or "unknown",
        position=position,
        retained_wal_bytes=state.retained_wal_bytes,
        safe_wal_size_bytes=state.safe_wal_size_bytes,
        state=slot_state(state, max_retained_wal),
        max_retained_wal_bytes=max_retained_wal,
    )


def slot_state(slot: SlotStatus, max_retained_wal: int | None) -> PublisherState:
    """What the slot can do, by the limits of the server and of the configuration."""
    if slot.is_lost:
        return PublisherState.LOST
    retained = slot.retained_wal_bytes or 0
    limits = [max_retained_wal]
    if slot.safe_wal_size_bytes is not None:
        limits.append(retained + max(0, slot.safe_wal_size_bytes))
    is_near = any(limit is not None and retained > NEAR_LOST_SHARE * limit for limit in limits)
    return PublisherState.NEAR_LOST if is_near or slot.wal_status == "unreserved" else PublisherState.READY


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


def publisher_status(publisher: str, slot: str, server: Answer[_T], log: Answer[_T]) -> PublisherStatus:
    """The status by the present or last answers of the server and of the log."""
    last = server.value if isinstance(server.value, PublisherStatus) else None
    status = add_log_range(
        last or PublisherStatus(publisher, slot, "unknown"),
        log.value if isinstance(log.value, LogRange) else LogRange(),
    )
    if server.error is not None:
        error, seconds_old, state = server.error, server.seconds_old, PublisherState.DOWN
    elif log.error is not None:
        error, seconds_old, state = log.error, log.seconds_old, PublisherState.LOG_UNREADABLE
    else:
        return status
    return replace(status, error=text_of_error(error), seconds_old=seconds_old, state=state)


def add_log_range(status: PublisherStatus, log: LogRange) -> PublisherStatus:
    """The publisher's status with that of its log."""
    status = replace(status, log_start=log.start, log_end=log.end, log_bytes=log.bytes)
    if status.position is None or log.end is None:
        return status
    return replace(status, behind_bytes=max(0, status.position.value - log.end.value))
