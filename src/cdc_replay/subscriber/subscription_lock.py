"""The lock of a subscription: one process at a time changes its rows and its state."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator

import psycopg
from psycopg import errors as pg

from cdc_replay.errors import SubscriptionInUse
from cdc_replay.postgres.advisory_locks import holder_of_key
from cdc_replay.postgres.connection import Connection, translated_errors

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def lock(connection: Connection, subscription: str, *, patience_seconds: int = 0) -> Iterator[None]:
    """Hold the subscription's advisory lock for the duration.

    The lock belongs to the session, so the server releases it when the process ends. Sessions that wait for
    it get it in their order, so one that takes it again and again keeps nobody out.

    Raises:
        SubscriptionInUse: if another session holds it for `patience_seconds`.
    """
    key = advisory_key("subscription", subscription)
    if not _acquire(connection, key, subscription, patience_seconds):
        raise SubscriptionInUse(
            f'another process is working on subscription "{subscription}"',
            detail=holder_of_key(connection, key),
            hint="Wait until it has finished; runs of one subscription never overlap.",
        )
    try:
        yield
    finally:
        # If the connection is lost or in a failed transaction, the end of the session releases the lock.
        with contextlib.suppress(psycopg.Error):
            connection.execute("select pg_advisory_unlock(%s)", (key,))


def _acquire(connection: Connection, key: int, subscription: str, patience_seconds: int) -> bool:
    row = connection.execute("select pg_try_advisory_lock(%s)", (key,)).fetchone()
    if row is None or row[0] or not patience_seconds:
        return row is not None and bool(row[0])
    logger.info("subscription %s is busy, waiting: %s", subscription, holder_of_key(connection, key))
    with connection.transaction(), contextlib.suppress(pg.LockNotAvailable, pg.DeadlockDetected):
        connection.execute("select set_config('lock_timeout', %s, true)", (f"{patience_seconds}s",))
        with connection.transaction():
            connection.execute("select pg_advisory_lock(%s)", (key,))
            return True
    return False


@contextlib.contextmanager
def release(connection: Connection, subscription: str) -> Iterator[None]:
    """Within `lock`: release the lock; on exit, wait to acquire it again."""
    key = advisory_key("subscription", subscription)
    connection.execute("select pg_advisory_unlock(%s)", (key,))
    yield
    with translated_errors(f'cannot lock subscription "{subscription}" again'):
        connection.execute("select pg_advisory_lock(%s)", (key,))


def stable_hash(subscription: str) -> int:
    """A signed 64-bit hash of the name, the same in every process and release."""
    return advisory_key("subscription", subscription)


def advisory_key(purpose: str, name: str) -> int:
    """The key of the advisory lock for `purpose` and `name`."""
    digest = hashlib.sha256(f"cdc_replay {purpose} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def lock_holder(connection: Connection, subscription: str) -> str | None:
    """A sentence that names the session which holds the lock; None if it is free."""
    return holder_of_key(connection, advisory_key("subscription", subscription))
