"""Confirm to the slot how far its changes are durable elsewhere.

| how                                          | what the server does                                        |
|----------------------------------------------|-------------------------------------------------------------|
| `pg_replication_slot_advance`                | reads all WAL from the slot's restart_lsn up to there again |
| a status update, as from a native subscriber | stores the position                                         |

So if much WAL lies in between, a walsender is opened, sent a status update, and closed before it has read
much. It starts after the position, so that no change is sent. If there can be no walsender (max_wal_senders,
a pooler in between), the function is used.
"""

from __future__ import annotations

import logging
import struct
import time
from typing import Final

import psycopg
from psycopg import pq, sql

from cdc_replay.errors import CdcReplayError
from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.postgres.peek import identifier_list
from cdc_replay.postgres.slot import advance_slot, check_slot, slot_errors

logger = logging.getLogger(__name__)

MUCH_WAL_BYTES: Final = 16 << 20
"""The server reads about this much in the time of one connection attempt."""

# The grammar of replication commands accepts upper case only.
_START: Final = sql.SQL(
    'START_REPLICATION SLOT {slot} LOGICAL {lsn} ("proto_version" \'1\', "publication_names" {names})'
)
_STATUS_UPDATE: Final = struct.Struct("!cqqqqb")
_SECONDS_TO_2000: Final = 946_684_800
_WAIT: Final = 0
_COPY_DONE: Final = -1


def send_slot_feedback(connection: Connection, dsn: str, slot: str, upto: Lsn, *, publication: str) -> None:
    """Confirm to the slot that everything before `upto` is durable elsewhere (R1.29).

    A walsender requires a publication; none of its changes are sent.

    Raises:
        SlotMissing, SlotActive, SlotLost: as for `peek`.
    """
    status = check_slot(connection, slot)
    unread = upto.value - (status.restart_lsn or upto).value
    # The function refuses to move a slot back; until PostgreSQL 17 a status update would not.
    if unread >= MUCH_WAL_BYTES and status.confirmed_flush <= upto:
        try:
            _update_status(dsn, slot, upto, publication)
        except (CdcReplayError, psycopg.Error) as error:
            logger.debug("status update of slot %s failed, advancing it by the function: %s", slot, error)
        else:
            return
    advance_slot(connection, slot, upto)


def _update_status(dsn: str, slot: str, upto: Lsn, publication: str) -> None:
    start = _START.format(
        slot=sql.Identifier(slot),
        lsn=sql.SQL(str(upto)),
        names=sql.Literal(identifier_list([publication])),
    )
    action = f'cannot confirm replication slot "{slot}"'
    with slot_errors(action), connect(dsn, purpose="confirm", replication=True) as walsender:
        # psycopg has no COPY in both directions.
        libpq = walsender.pgconn
        libpq.nonblocking = 0
        _expect(libpq.exec_(start.as_bytes(walsender)), pq.ExecStatus.COPY_BOTH)
        now = int((time.time() - _SECONDS_TO_2000) * 1_000_000)
        libpq.put_copy_data(_STATUS_UPDATE.pack(b"r", upto.value, upto.value, upto.value, now, 0))
        libpq.put_copy_end()
        while libpq.get_copy_data(_WAIT)[0] != _COPY_DONE:
            continue
        while (result := libpq.get_result()) is not None:
            _expect(result, pq.ExecStatus.COMMAND_OK, pq.ExecStatus.COPY_IN)


def _expect(result: pq.abc.PGresult, *statuses: pq.ExecStatus) -> None:
    if result.status not in statuses:
        raise psycopg.errors.error_from_result(result, encoding="utf-8")
