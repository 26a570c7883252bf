"""The limit of what a slot may retain: past it the slot is dropped, because the server's disk comes first.

The best remedy is to capture, so this comes after a capture, whether it failed or not:

| the capture    | and the slot retains more than the limit because  | then                                |
|----------------|---------------------------------------------------|-------------------------------------|
| failed         | nobody has the changes yet                        | it is dropped; the error says so    |
| came to its end| the server has not said yet what is over (R1.31)  | one more capture, after it has      |
| came to its end| a transaction is open, or prepared                | it is dropped; the error names that |

A slot is only dropped if it is ours beyond doubt, and if nobody reads it: not if another capture is at work,
and not if the log is of another server or slot. A dropped slot means that everything is copied anew, so the
limit is to be far above what a long transaction or an outage of capture may need.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cdc_replay.capture.publications import owned_by
from cdc_replay.capture.slot_continuity import only_reader
from cdc_replay.errors import CdcReplayError, SlotDroppedOverLimit
from cdc_replay.model.size import size_in_words
from cdc_replay.postgres.connection import Connection, connect, translated_errors
from cdc_replay.postgres.open_transactions import log_running_transactions, oldest_transaction
from cdc_replay.postgres.slot import RESYNCHRONIZE, SlotStatus, drop_slot, slot_exists, slot_status

logger = logging.getLogger(__name__)

# The background writer logs which transactions run every 15 seconds, if anything was written since.
RUNNING_TRANSACTIONS_SECONDS: Final = 16


@dataclass(frozen=True, slots=True)
class RetainedWalLimit:
    """How much WAL a publisher's slot may retain."""

    publisher: str
    dsn: str
    slot: str
    limit_bytes: int

    def __repr__(self) -> str:
        # Without the DSN, which may hold a password.
        return f"RetainedWalLimit(publisher={self.publisher!r}, limit_bytes={self.limit_bytes})"


def enforce_after_failure(limit: RetainedWalLimit, failure: CdcReplayError) -> None:
    """Drop the slot if it retains more than the limit; what `failure` was about stays the caller's.

    Raises:
        SlotGivenUp: if it was dropped.
    """
    try:
        _enforce(limit, lambda _connection, _status: f"The capture failed: {failure.message}.")
    except SlotDroppedOverLimit as given_up:
        raise given_up from failure
    except CdcReplayError as error:
        logger.warning("the WAL that slot %s retains is not known, or it is in use: %s", limit.slot, error)


def enforce_after_capture(limit: RetainedWalLimit, capture_again: Callable[[], object]) -> None:
    """Drop the slot if it retains more than the limit although everything is in the log.

    Before that the server logs which transactions still run, and `capture_again` reads it: only then may the
    slot let go of those that are over.

    Raises:
        SlotGivenUp: if it was dropped.
    """
    with connect(limit.dsn, purpose=f"retention {limit.publisher}") as connection:
        if not _is_exceeded(slot_status(connection, limit.slot), limit):
            return
        began = time.monotonic()
        logger.warning(
            "slot %s retains more than %s with everything captured; capturing once more",
            limit.slot, size_in_words(limit.limit_bytes),
        )  # fmt: skip
        if not log_running_transactions(connection):
            time.sleep(RUNNING_TRANSACTIONS_SECONDS)
    capture_again()
    _enforce(limit, functools.partial(_what_holds, began=began))


def _what_holds(connection: Connection, status: SlotStatus, *, began: float) -> str | None:
    """The transaction that keeps restart_lsn back; None if there is none, or only one that began since."""
    oldest = oldest_transaction(connection)
    if oldest is None or (oldest.seconds is not None and oldest.seconds < time.monotonic() - began):
        return None
    return f"Everything up to {status.confirmed_flush} is in the log, but {oldest} is not over."


def _enforce(limit: RetainedWalLimit, why: Callable[[Connection, SlotStatus], str | None]) -> None:
    with (
        translated_errors(f'cannot drop replication slot "{limit.slot}"'),
        connect(limit.dsn, purpose=f"retention {limit.publisher}") as connection,
        only_reader(connection, limit.slot),
    ):
        if not slot_exists(connection, limit.slot) or not owned_by(connection, limit.slot):
            return
        status = slot_status(connection, limit.slot)
        if not _is_exceeded(status, limit) or (because := why(connection, status)) is None:
            return
        if drop_slot(connection, limit.slot):
            raise _given_up(limit, status, because)


def _is_exceeded(status: SlotStatus, limit: RetainedWalLimit) -> bool:
    return status.retained_wal_bytes is not None and status.retained_wal_bytes > limit.limit_bytes


def _given_up(limit: RetainedWalLimit, status: SlotStatus, because: str) -> SlotDroppedOverLimit:
    retained = size_in_words(status.retained_wal_bytes or 0)
    return SlotDroppedOverLimit(
        f'replication slot "{limit.slot}" retained {retained} of WAL and was dropped',
        detail=f"`max_retained_wal` of publisher {limit.publisher} is {size_in_words(limit.limit_bytes)}."
        f" {because} The slot was at {status.confirmed_flush} and retained WAL since {status.restart_lsn}.",
        hint="Deal with that first. " + RESYNCHRONIZE,
        rule="R1.31",
    )
