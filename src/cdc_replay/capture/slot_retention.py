"""The limit of the WAL that a slot may retain: beyond it the slot is dropped, to protect the server's disk.

The best remedy is to capture, so the limit is checked after a capture:

| the capture | the slot still retains more because          | effect                               |
|-------------|----------------------------------------------|--------------------------------------|
| failed      | the changes are not captured                 | it is dropped; the error says so     |
| succeeded   | the server has not yet logged which          | one more capture, after the server   |
|             | transactions are running (R1.31)             | has logged them                      |
| succeeded   | a transaction is open or prepared            | it is dropped; the error names it    |

A slot is only dropped if it is certainly ours and nobody reads it: not while another capture runs, and not if
the log belongs to another server or slot. After a drop everything must be copied again, so set the limit far
above what a long transaction or an outage of capture may need.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cdc_replay.capture.publications import owned_by
from cdc_replay.capture.slot_lock import only_reader
from cdc_replay.errors import CdcReplayError, SlotDroppedOverLimit
from cdc_replay.model.size import size_in_words
from cdc_replay.postgres.connection import Connection, connect, translated_errors
from cdc_replay.postgres.open_transactions import log_running_transactions, oldest_transaction
from cdc_replay.postgres.slot import RESYNCHRONIZE, SlotStatus, drop_slot, slot_exists, slot_status

logger = logging.getLogger(__name__)

# The background writer logs the running transactions every 15 seconds if there was new WAL.
RUNNING_TRANSACTIONS_SECONDS: Final = 16


@dataclass(frozen=True, slots=True)
class RetainedWalLimit:
    """The limit of the WAL that a publisher's slot may retain."""

    publisher: str
    dsn: str
    slot: str
    limit_bytes: int

    def __repr__(self) -> str:
        # Without the DSN, which may hold a password.
        return f"RetainedWalLimit(publisher={self.publisher!r}, limit_bytes={self.limit_bytes})"


def enforce_after_failure(limit: RetainedWalLimit, failure: CdcReplayError) -> None:
    """Drop the slot if it retains more than the limit; otherwise the caller handles `failure`.

    Raises:
        SlotDroppedOverLimit: if it was dropped.
    """
    try:
        _enforce(limit, lambda _connection, _status: f"The capture failed: {failure.message}.")
    except SlotDroppedOverLimit as dropped:
        raise dropped from failure
    except CdcReplayError as error:
        logger.warning("cannot check the WAL retained by slot %s: %s", limit.slot, error)


def enforce_after_capture(limit: RetainedWalLimit, capture_again: Callable[[], object]) -> None:
    """Drop the slot if it retains more than the limit although everything was captured.

    Before, the server logs the running transactions, and `capture_again` reads that record: only then can the
    slot release the WAL of finished transactions.

    Raises:
        SlotDroppedOverLimit: if it was dropped.
    """
    with connect(limit.dsn, purpose=f"retention {limit.publisher}") as connection:
        if not _is_exceeded(slot_status(connection, limit.slot), limit):
            return
        began = time.monotonic()
        logger.warning(
            "slot %s retains more than %s although everything was captured; capturing once more",
            limit.slot, size_in_words(limit.limit_bytes),
        )  # fmt: skip
        if not log_running_transactions(connection):
            time.sleep(RUNNING_TRANSACTIONS_SECONDS)
    capture_again()
    _enforce(limit, functools.partial(_name_oldest_transaction, began=began))


def _name_oldest_transaction(connection: Connection, status: SlotStatus, *, began: float) -> str | None:
    """Name the transaction that holds restart_lsn back; None if all open ones began after `began`."""
    oldest = oldest_transaction(connection)
    if oldest is None or (oldest.seconds is not None and oldest.seconds < time.monotonic() - began):
        return None
    return f"Everything up to {status.confirmed_flush} is in the log, but {oldest} is not over."


def _enforce(limit: RetainedWalLimit, explain: Callable[[Connection, SlotStatus], str | None]) -> None:
    with (
        translated_errors(f'cannot drop replication slot "{limit.slot}"'),
        connect(limit.dsn, purpose=f"retention {limit.publisher}") as connection,
        only_reader(connection, limit.slot),
    ):
        if not slot_exists(connection, limit.slot) or not owned_by(connection, limit.slot):
            return
        status = slot_status(connection, limit.slot)
        if not _is_exceeded(status, limit) or (reason := explain(connection, status)) is None:
            return
        if drop_slot(connection, limit.slot):
            raise _dropped_error(limit, status, reason)


def _is_exceeded(status: SlotStatus, limit: RetainedWalLimit) -> bool:
    return status.retained_wal_bytes is not None and status.retained_wal_bytes > limit.limit_bytes


def _dropped_error(limit: RetainedWalLimit, status: SlotStatus, reason: str) -> SlotDroppedOverLimit:
    retained = size_in_words(status.retained_wal_bytes or 0)
    return SlotDroppedOverLimit(
        f'replication slot "{limit.slot}" retained {retained} of WAL and was dropped',
        detail=f"`max_retained_wal` of publisher {limit.publisher} is {size_in_words(limit.limit_bytes)}."
        f" {reason} The slot was at {status.confirmed_flush} and retained WAL since {status.restart_lsn}.",
        hint="Resolve that first. " + RESYNCHRONIZE,
        rule="R1.31",
    )
