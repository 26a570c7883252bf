"""A window that waits for locks of other sessions is retried, and never half-applied."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

import pytest

from cdc_replay.errors import Retry, SubscriberLocked
from cdc_replay.model.subscription import Subscription
from cdc_replay.postgres.connection import Connection
from cdc_replay.replay.apply import lock_retry as locks
from cdc_replay.replay.apply.session import Applied
from fixtures.native import wait_for
from fixtures.postgres import Database
from integration.replay.apply.windows import Changes, Target

TABLES = (
    "create table t (id int primary key, a int); insert into t values (1, 1); create table others (a int)"
)
STAGING = "select count(*) from pg_class where relname like 'stage%'"


class Impatient(Target):
    """A target whose windows wait a fifth of a second for a lock."""

    @property
    def subscription(self) -> Subscription:
        return dataclasses.replace(super().subscription, lock_timeout=0.2)


@pytest.fixture
def target(subscriber: Database) -> Target:
    subscriber.run(f"{TABLES}; insert into others values (0)")
    return Impatient(subscriber.dsn, {"t": ("id", "a")})


def changed(target: Target) -> Changes:
    changes = target.window()
    changes.update("t", 1, 10)
    changes.insert("t", 2, 20)
    return changes


class OnRetry(logging.Handler):
    """Runs a function before each retry of the window."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act
        self.tries: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not self.tries:
            self.act()
        self.tries.append(record.getMessage())


def test_released_lock_only_delays_the_window(target: Target, subscriber: Database) -> None:
    """Staged rows stay, so that only the merge is retried; each retry is one log line."""
    with subscriber.connect() as other:
        other.execute("begin; lock table t in share mode")
        on_retry = OnRetry(lambda: other.execute("rollback"))
        locks.logger.addHandler(on_retry)
        try:
            applied = target.apply(changed(target))
        finally:
            locks.logger.removeHandler(on_retry)
    assert (applied.update, applied.insert) == (1, 1)
    assert target.rows("table t order by id") == [(1, 10), (2, 20)]
    assert len(on_retry.tries) == 1
    assert "try 2 of 5" in on_retry.tries[0]
    assert 'table "public"."t"' in on_retry.tries[0]
    assert target.rows(STAGING) == [(0,)]


@pytest.mark.parametrize(
    "locking_statement", ["lock table t in share mode", "update t set a = 5 where id = 1"]
)
def test_lock_that_is_never_released_ends_in_an_error_with_its_holder(
    target: Target, subscriber: Database, locking_statement: str
) -> None:
    with subscriber.connect() as other:
        other.execute(f"begin; {locking_statement}".encode())
        with pytest.raises(SubscriberLocked) as raised:
            target.apply(changed(target))
        other.execute("rollback")
        error = str(raised.value)
        assert f"server process {other.info.backend_pid} " in error
    for part in ('table "public"."t"', 'application "cdc_replay test"', "idle in transaction", "5 tries"):
        assert part in error
    assert raised.value.retry is Retry.LATER
    assert target.rows("table t") == [(1, 1)]
    assert target.rows(STAGING) == [(0,)]
    target.apply(changed(target))
    assert target.rows("table t order by id") == [(1, 10), (2, 20)]


def test_deadlock_victim_is_applied_at_the_next_try(target: Target, subscriber: Database) -> None:
    """The other session waits for t, and has what the caller's record waits for then."""
    with subscriber.connect() as other, subscriber.connect() as watcher:
        other.execute("set deadlock_timeout = '10min'")
        other.execute("begin; lock table others")

        def wait_and_end() -> None:
            other.execute("lock table t")
            other.execute("rollback")

        waiting = threading.Thread(target=wait_and_end)

        def record(connection: Connection, _applied: Applied) -> None:
            if not waiting.ident:
                waiting.start()
                wait_for(lambda: is_waiting(watcher, other.info.backend_pid), "the other session to wait")
            connection.execute("set local lock_timeout = 0")
            connection.execute("lock table public.others in share mode")

        on_retry = OnRetry(waiting.join)
        locks.logger.addHandler(on_retry)
        try:
            target.apply(changed(target), before_commit=record)
        finally:
            locks.logger.removeHandler(on_retry)
    assert ["deadlock detected" in message for message in on_retry.tries] == [True]
    assert target.rows("table t order by id") == [(1, 10), (2, 20)]


def is_waiting(watcher: Connection, pid: int) -> bool:
    query = "select exists (select from pg_locks where pid = %s and not granted)"
    ((is_waiting,),) = watcher.execute(query, (pid,)).fetchall()
    return bool(is_waiting)


def test_transaction_that_cannot_be_serialized_is_retried(target: Target) -> None:
    """Ours are read committed; what an owner's code calls may be on a server that serializes."""
    calls = []

    def record(connection: Connection, _applied: Applied) -> None:
        calls.append(1)
        if len(calls) == 1:
            connection.execute("do $$ begin raise sqlstate '40001'; end $$")

    target.apply(changed(target), before_commit=record)
    assert len(calls) == 2
    assert target.rows("table t order by id") == [(1, 10), (2, 20)]
