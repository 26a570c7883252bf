"""The lock of a slot: one process at a time reads it.

Its key is in `cdc_replay_capture.lock_key` (`postgres.advisory_locks`), beside the functions of the event
triggers. Without them, for a role without the right to it, and on a standby, which cannot write, the lock has
fixed keys: then anybody can hold it, and captures end with an error that names the session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import psycopg

from cdc_replay.capture.ddl.event_triggers import EVENT_TRIGGERS, may_write_lock_keys
from cdc_replay.capture.ownership import SCHEMA, check_ownership
from cdc_replay.errors import SlotActive
from cdc_replay.postgres.advisory_locks import FixedLock, KeyedLock, SessionLock, acquire
from cdc_replay.postgres.connection import Connection, translated_errors

LOCK_CLASS: Final = 0x63647265
"""First of the fixed keys; the second is a hash of the slot's name."""

PATIENCE_SECONDS: Final = 5


@contextlib.contextmanager
def only_reader(connection: Connection, slot: str) -> Iterator[None]:
    """Hold the slot's lock, so that two captures never pull at once.

    After a capture was killed, its session keeps the lock until the server notices.

    Raises:
        SlotActive: if another session keeps it for `PATIENCE_SECONDS`.
        PublisherNotReady: if somebody else controls them.
    """
    session_lock = slot_lock(connection, slot)
    with translated_errors(f'cannot lock replication slot "{slot}"'):
        if not acquire(session_lock, PATIENCE_SECONDS):
            raise SlotActive(
                f'another capture reads replication slot "{slot}"',
                detail=session_lock.holder(),
                hint="Wait until it ends, then run the command again; it continues from there. A session that"
                " is no capture can be ended with pg_terminate_backend.",
            )
    try:
        yield
    finally:
        # A terminated session has released its locks; do not replace its own error.
        with contextlib.suppress(psycopg.OperationalError):
            session_lock.release()


def slot_lock(connection: Connection, slot: str) -> SessionLock:
    """The slot's lock, for a session that does not hold it."""
    if may_write_lock_keys(connection, slot):
        # Before anything of the schema is used.
        check_ownership(connection, EVENT_TRIGGERS)
        return KeyedLock(connection, SCHEMA, slot)
    ((key,),) = connection.execute("select pg_catalog.hashtext(%s)", (slot,))
    return FixedLock(connection, LOCK_CLASS, key)
