"""Locks of other sessions: a window is tried again, for a while, and the error says who holds them.

The subscriber has readers and writers of its own. A window that waits longer than `lock_timeout` for one
lock, is the victim of a deadlock, or cannot be serialized has changed nothing; what is staged is still there.
So the merge alone is done again, `TRIES` times, with pauses that double and are spread at random: two windows
that have met in a deadlock do not meet again.

Who holds a lock can only be asked while it is waited for. That takes a second session, which is there during
the last try only.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

import psycopg

from cdc_replay.errors import CdcReplayError, SubscriberLocked
from cdc_replay.postgres.connection import Connection, connect

logger = logging.getLogger(__name__)

TRIES: Final = 5
FIRST_PAUSE_SECONDS: Final = 0.25
LOOKS_PER_TIMEOUT: Final = 8
LONGEST_BETWEEN_LOOKS: Final = 1.0

# What a session executes may show values of rows: it is left out.
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
    """Do what `attempt` does on `connection`, again where other sessions have prevented it.

    Raises:
        SubscriberLocked: if they have prevented the last try, too; naming the one that holds the lock.
    """
    for number in range(1, TRIES):
        try:
            return attempt()
        except SubscriberLocked as error:
            pause = FIRST_PAUSE_SECONDS * 2 ** (number - 1) * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
            logger.warning(
                "subscription %s: try %d of %d in %.1f s: %s",
                *(subscription, number + 1, TRIES, pause, error.message),
            )
            time.sleep(pause)
    with _report_lock_holders(connection, dsn, lock_timeout) as holders:
        try:
            return attempt()
        except SubscriberLocked as error:
            raise _final(error, holders.found, lock_timeout) from error


def _final(error: SubscriberLocked, holders: str | None, lock_timeout: float) -> SubscriberLocked:
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
    """Who was last seen to hold what the watched session waits for."""

    found: str | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def watch(self, pid: int, dsn: str, seconds_between: float) -> None:
        """Look until stopped; that nothing can be seen is no reason to fail."""
        with (
            contextlib.suppress(psycopg.Error, CdcReplayError),
            connect(dsn, purpose="apply lock watch") as connection,
        ):
            while not self._stop.wait(seconds_between):
                if rows := connection.execute(_HOLDERS, {"pid": pid}).fetchall():
                    self.found = " ".join(_holder(*row) for row in rows)

    def stop(self) -> None:
        """No look after this one."""
        self._stop.set()


@contextlib.contextmanager
def _report_lock_holders(connection: Connection, dsn: str, lock_timeout: float) -> Iterator[_LockHolderWatch]:
    holders = _LockHolderWatch()
    between = min(LONGEST_BETWEEN_LOOKS, lock_timeout / LOOKS_PER_TIMEOUT or LONGEST_BETWEEN_LOOKS)
    arguments = (connection.info.backend_pid, dsn, between)
    thread = threading.Thread(target=holders.watch, args=arguments, name="apply lock watch", daemon=True)
    thread.start()
    try:
        yield holders
    finally:
        holders.stop()
        thread.join()


def _holder(pid: int, user: str | None, application: str | None, state: str | None, what: str | None) -> str:
    if pid == 0:
        return f"A prepared transaction holds the lock on {what or 'it'}."
    session = (
        f'server process {pid} (user "{user or "?"}", application "{application or ""}", {state or "?"})'
    )
    return f"The lock on {what or 'it'} is held by {session}."
