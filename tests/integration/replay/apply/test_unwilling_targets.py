"""A target that is lost, read-only, full or altered meanwhile: a clear error, nothing applied, resumed."""

from __future__ import annotations

import pytest

from cdc_replay.errors import (
    CdcReplayError,
    Retry,
    ServerUnavailable,
    SubscriberNotWritable,
    TargetMismatch,
)
from cdc_replay.postgres.connection import Connection, connect
from cdc_replay.replay.apply.session import Applied, open_apply_session
from cdc_replay.subscriber import subscription_lock
from fixtures.postgres import Database
from integration.replay.apply.windows import Changes, Target

MANY = 20_000
TABLE = f"""
    create table t (id int primary key, a int);
    insert into t select n, n from generate_series(1, {MANY}) as n
"""
UNTOUCHED = "select count(*), sum(a) from t"


@pytest.fixture
def target(subscriber: Database) -> Target:
    subscriber.run(TABLE)
    created_target = Target(subscriber.dsn, {"t": ("id", "a")})
    created_target.apply(created_target.window())
    return created_target


def moved(target: Target, rows: int = 3) -> Changes:
    changes = target.window()
    changes.insert("t", MANY + 1, 0)
    for number in range(1, rows):
        changes.update("t", number, 0)
    return changes


def assert_untouched(target: Target) -> None:
    assert target.rows(UNTOUCHED) == [(MANY, MANY * (MANY + 1) // 2)]


def assert_resumes(target: Target, rows: int = 3) -> None:
    target.apply(moved(target, rows))
    assert target.rows("select count(*), count(*) filter (where a = 0) from t") == [(MANY + 1, rows)]
    assert target.rows("select count(*) from pg_class where relname like 'stage%'") == [(0,)]


def test_read_only_target(target: Target, subscriber: Database) -> None:
    subscriber.run(f"alter database {subscriber.name} set default_transaction_read_only = on")
    with (
        connect(subscriber.dsn, purpose="test") as connection,
        subscription_lock.lock(connection, "nsw"),
        pytest.raises(SubscriberNotWritable, match="read-only transaction") as raised,
    ):
        target.apply_locked(moved(target), None)
    assert raised.value.retry is Retry.LATER
    assert_untouched(target)
    with connect(subscriber.cluster.dsn(), purpose="test") as admin:
        admin.execute(f"alter database {subscriber.name} reset default_transaction_read_only".encode())
    assert_resumes(target)


def test_target_without_disk_space(target: Target, subscriber: Database) -> None:
    """What a statement may write to disk is limited; a full disk is an error of the same class."""
    limits = {
        "temp_file_limit": "'64kB'",
        "work_mem": "'64kB'",
        "enable_nestloop": "off",
        "enable_mergejoin": "off",
    }
    for name, value in limits.items():
        subscriber.run(f"alter database {subscriber.name} set {name} = {value}")
    with pytest.raises(SubscriberNotWritable, match="temp_file_limit") as raised:
        target.apply(moved(target, MANY))
    raised.match('table "public"."t"')
    assert_untouched(target)
    for name in limits:
        subscriber.run(f"alter database {subscriber.name} reset {name}")
    assert_resumes(target, MANY)


def test_target_lost_before_the_commit(target: Target, subscriber: Database) -> None:
    def lose(connection: Connection, _applied: Applied) -> None:
        with subscriber.connect() as other:
            other.execute("select pg_terminate_backend(%s, 10000)", (connection.info.backend_pid,))

    with pytest.raises(ServerUnavailable):
        target.apply(moved(target), before_commit=lose)
    assert_untouched(target)
    assert_resumes(target)


@pytest.mark.parametrize(
    ("altered", "back", "words"),
    [
        ("alter table t rename a to b", "alter table t rename b to a", 'column "a"'),
        ("alter table t rename to gone", "alter table gone rename to t", "was renamed"),
        (
            "alter table t alter a type point using point(a, a)",
            "alter table t alter a type int using a[0]",
            "is of type point",
        ),
    ],
)
def test_target_altered_between_staging_and_merge(
    target: Target, subscriber: Database, altered: str, back: str, words: str
) -> None:
    changes = moved(target)
    error = merged_after(target, changes, altered)
    assert isinstance(error, TargetMismatch)
    assert words in str(error)
    assert '"public"."t"' in str(error)
    subscriber.run(back)
    assert_untouched(target)
    assert_resumes(target)


def merged_after(target: Target, changes: Changes, script: str) -> CdcReplayError:
    """The error of the merge, if the script runs once all is staged."""
    with (
        connect(target.dsn, purpose="test") as connection,
        subscription_lock.lock(connection, "nsw"),
        open_apply_session(target.request(changes)) as window,
    ):
        staged = target.stage(changes, window)
        connection.execute("set search_path = public")
        connection.execute(script.encode())
        with pytest.raises(CdcReplayError) as raised:
            window.apply(staged, changes.facts.truncations)
    return raised.value
