"""The lock of a subscription: one process at a time changes its rows and its state.

Its key is in `cdc_replay.lock_key` (`postgres.advisory_locks`). A database without our schema, where there is
nothing to change, and a standby, where nothing can be changed, have a lock with a fixed key.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Iterator
from typing import Final

import psycopg

from cdc_replay.errors import SubscriptionInUse
from cdc_replay.postgres.advisory_locks import FixedLock, KeyedLock, SessionLock, acquire, advisory_key
from cdc_replay.postgres.connection import DROPPED_MEANWHILE, Connection, translated_errors
from cdc_replay.subscriber import state_schema

logger = logging.getLogger(__name__)

_IS_STANDBY: Final = "select pg_catalog.pg_is_in_recovery()"

_ACQUIRED: Final[weakref.WeakKeyDictionary[Connection, dict[str, SessionLock]]] = weakref.WeakKeyDictionary()
"""The locks that are held and `release` can release, by subscription; they refer to their connection."""


@contextlib.contextmanager
def lock(connection: Connection, subscription: str, *, patience_seconds: int = 0) -> Iterator[None]:
    """Hold the subscription's lock for the duration; the state of an earlier release is upgraded before.

    The lock belongs to the session, so the server releases it when the process ends. Sessions that wait for
    it get it in their order, so one that takes it again and again keeps nobody out.

    Raises:
        SubscriptionInUse: if another session holds it for `patience_seconds`.
        MissingPrivilege: if the role may not upgrade the state.
    """
    session_lock = _lock_of(connection, subscription, upgrade=True)
    with translated_errors(f'cannot lock subscription "{subscription}"'):
        if not _acquire(session_lock, subscription, patience_seconds):
            raise SubscriptionInUse(
                f'another process is working on subscription "{subscription}"',
                detail=session_lock.holder(),
                hint="Wait until it has finished; runs of one subscription never overlap.",
            )
    _ACQUIRED.setdefault(connection, {})[subscription] = session_lock
    try:
        yield
    finally:
        del _ACQUIRED[connection][subscription]
        if not _ACQUIRED[connection]:
            del _ACQUIRED[connection]
        # If the connection is lost or in a failed transaction, the end of the session releases the lock.
        with contextlib.suppress(psycopg.Error):
            session_lock.release()


def _acquire(session_lock: SessionLock, subscription: str, patience_seconds: float) -> bool:
    try:
        if session_lock.try_acquire():
            return True
        if not patience_seconds:
            return False
        logger.info("subscription %s is busy, waiting: %s", subscription, session_lock.holder())
        return acquire(session_lock, patience_seconds)
    except DROPPED_MEANWHILE as error:
        raise state_removed(subscription) from error


def state_removed(subscription: str) -> SubscriptionInUse:
    """The error of a process that has waited, and finds that a `teardown` came first."""
    return SubscriptionInUse(
        f'another process has removed the state of subscription "{subscription}"',
        hint="Run the command again, if it should work on a new subscription.",
    )


@contextlib.contextmanager
def release(connection: Connection, subscription: str) -> Iterator[None]:
    """Within `lock`: release the lock; on exit, wait to acquire it again.

    Raises:
        SubscriptionInUse: if there is no lock any more, since the state was removed.
    """
    session_lock = _ACQUIRED[connection][subscription]
    session_lock.release()
    yield
    with translated_errors(f'cannot lock subscription "{subscription}" again'):
        _acquire(session_lock, subscription, math.inf)


def stable_hash(subscription: str) -> int:
    """A signed 64-bit hash of the name, the same in every process and release."""
    return advisory_key("subscription", subscription)


def copy_lock(subscription: str) -> str:
    """The name of a lock beside the subscription's own: that of the process which copies tables."""
    return f"{subscription} (snapshot)"


def lock_holder(connection: Connection, subscription: str) -> str | None:
    """A sentence that names the session which holds the lock; None if it is free."""
    return _lock_of(connection, subscription).holder()


def _lock_of(connection: Connection, subscription: str, *, upgrade: bool = False) -> SessionLock:
    ((is_standby,),) = connection.execute(_IS_STANDBY)
    if not is_standby:
        if upgrade:
            state_schema.upgrade(connection)
        if state_schema.is_complete(connection):
            return KeyedLock(connection, state_schema.SCHEMA, subscription)
    return FixedLock(connection, stable_hash(subscription))
