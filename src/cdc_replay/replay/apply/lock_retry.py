"""Locks of other sessions: the merge of a window is retried, and the error names who holds the lock.

The subscriber has readers and writers of its own. A transaction that waits longer than `lock_timeout` for a
lock, is the victim of a deadlock, or cannot be serialized has changed nothing, and the staged rows are still
there. So the merge alone is retried, `TRIES` times, with pauses that double and have a random factor: two
windows that deadlocked do not meet again.

Lock holders are visible only while a session waits for the lock. A second session looks for them, during the
last try only.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import psycopg

from cdc_replay.beside import beside
from cdc_replay.errors import CdcReplayError, SubscriberLocked
from cdc_replay.postgres.connection import Connection, connect

logger = logging.getLogger(__name__)

TRIES: Final = 5
FIRST_PAUSE_SECONDS: Final = 0.25
POLLS_PER_TIMEOUT: Final = 8
MAX_POLL_SECONDS: Final = 1.0

# Without the sessions' queries, which may contain row values.
_HOLDERS: Final = """
    select blocker.pid, activity.usename, activity.application_name, activity.state,
        (select coalesce(pg_describe_object('pg_class'::regclass, locked.relation, 0), 'a row')
         from pg_locks as locked where locked.pid = %(pid)s and not locked.granted limit 1)
    from unnest(pg_blocking_pids(%(pid)s)) as blocker (pid)
    left join pg_stat_activity as activity using (pid)
"""

_T = TypeVar("_T")


def retry_on_lock(
    attempt: Callable[[], _T], connection: Connection, *, subscription: str, dsn: str, lock_timeout: float
) -> _T:
    """Call `attempt`, which works on `connection`; retry it while other sessions' locks prevent it.

    Raises:
        SubscriberLocked: if the last try fails too; names the session that holds the lock.
    """
    for attempt_number in range(1, TRIES):
        try:
            return attempt()
        except SubscriberLocked as error:
            pause = FIRST_PAUSE_SECONDS * 2 ** (attempt_number - 1) * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
            logger.warning(
                "subscription %s: try %d of %d in %.1f s: %s",
                *(subscription, attempt_number + 1, TRIES, pause, error.message),
            )
            time.sleep(pause)
    with _report_lock_holders(connection, dsn, lock_timeout) as holders:
        try:
            return attempt()
        except SubscriberLocked as error:
            raise _final_error(error, holders.holders, lock_timeout) from error


def _final_error(error: SubscriberLocked, holders: str | None, lock_timeout: float) -> SubscriberLocked:
    waited = f"{TRIES} tries, each waiting up to {lock_timeout:g} s for a lock." if lock_timeout else None
    parts = (error.detail, holders, waited)
    return SubscriberLocked(
        error.message,
        detail=" ".join(part for part in parts if part) or None,
        hint="Nothing of the window is applied. End the other session, or raise `lock_timeout`;"
        " the next run applies the window.",
        rule=error.rule,
        table=error.table,
    )


@dataclass(slots=True)
class _LockHolderWatch:
    """Describes the sessions that hold the lock for which the watched session waits, as last seen."""

    holders: str | None = None

    def watch(self, pid: int, dsn: str, seconds_between: float, ended: threading.Event) -> None:
        """Poll until `ended`; a failure to see the holders is not an error."""
        with (
            contextlib.suppress(psycopg.Error, CdcReplayError),
            connect(dsn, purpose="apply lock watch") as connection,
        ):
            while not ended.wait(seconds_between):
                if rows := connection.execute(_HOLDERS, {"pid": pid}).fetchall():
                    self.holders = " ".join(_describe_holder(*row) for row in rows)


@contextlib.contextmanager
def _report_lock_holders(connection: Connection, dsn: str, lock_timeout: float) -> Iterator[_LockHolderWatch]:
    holders = _LockHolderWatch()
    poll_seconds = min(MAX_POLL_SECONDS, lock_timeout / POLLS_PER_TIMEOUT or MAX_POLL_SECONDS)
    pid = connection.info.backend_pid
    with beside(lambda ended: holders.watch(pid, dsn, poll_seconds, ended)):
        yield holders


def _describe_holder(
    pid: int, user: str | None, application: str | None, state: str | None, locked: str | None
) -> str:
    if pid == 0:
        return f"A prepared transaction holds the lock on {locked or 'it'}."
    session = (
        f'server process {pid} (user "{user or "?"}", application "{application or ""}", {state or "?"})'
    )
    return f"The lock on {locked or 'it'} is held by {session}."
