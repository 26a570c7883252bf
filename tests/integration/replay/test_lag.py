"""Which subscriptions lag the log, since when and why, and for which of them a replay is due."""

from __future__ import annotations

import os
import re
import signal
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from cdc_replay.commands.setup import setup
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.status import ServerAnswers, status, status_of
from cdc_replay.config import Timeouts
from cdc_replay.errors import Retry
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.status import SubscriptionStatus
from cdc_replay.model.table_state import Copying, Pending
from cdc_replay.monitoring.due_replays import due_replays
from cdc_replay.postgres.connection import connect_with_deadline
from cdc_replay.replay import lag
from cdc_replay.subscriber import subscription_lock, subscription_tables
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLES = "create table t (id int primary key, a int); create table u (id int primary key, a int)"


def subscribe(twin: Twin, *names: str, **options: object) -> None:
    """Subscriptions that have all that the publisher has."""
    twin.publisher.run(f"{TABLES}; create publication p for table t, u")
    for name in names:
        twin.subscribe(name, "p", tables=TABLES, native=False, **options)
    twin.sync_ours()


def read_status(twin: Twin, name: str = "s") -> SubscriptionStatus:
    (subscription_status,) = (
        subscription
        for subscription in status(twin.config).subscriptions
        if subscription.subscription == name
    )
    return subscription_status


def due(twin: Twin) -> list[str]:
    return list(due_replays(twin.config, "pub", twin.pairs))


def test_subscription_lags_since_the_oldest_transaction_that_it_lacks(twin: Twin) -> None:
    subscribe(twin, "s")
    assert (read_status(twin).behind_since, read_status(twin).behind_reason, due(twin)) == (None, None, [])

    [(before,)] = twin.publisher.rows("select now()")
    twin.publish("insert into t values (1, 1)")
    [(after,)] = twin.publisher.rows("select now()")
    twin.publish("insert into u values (1, 1)")
    assert (read_status(twin).behind_since, due(twin)) == (None, [])  # the log has nothing that it lacks
    capture(twin.config, "pub")

    lagging_status = read_status(twin)
    since = datetime.fromisoformat(lagging_status.behind_since or "")
    assert before - timedelta(seconds=1) <= since <= after  # in whole seconds
    assert (lagging_status.behind_reason or "").startswith("no replay since ")
    assert (lagging_status.last_replay or "").startswith("succeeded at ")
    assert lagging_status.lag_seconds == pytest.approx((datetime.now(UTC) - since).total_seconds(), abs=5)
    assert due(twin) == ["s"]

    replay(twin.config, ["s"])
    assert (read_status(twin).behind_since, read_status(twin).behind_reason, due(twin)) == (None, None, [])


def test_log_positions_without_a_transaction_are_not_lag(twin: Twin) -> None:
    """R9.13: a message outside of transactions, and the WAL of tables that are not captured."""
    twin.publisher.run("create table other (id int)")
    subscribe(twin, "s")
    twin.publisher.run("insert into other values (1)")
    twin.publisher.run("select pg_logical_emit_message(false, 'test', 'nothing')")
    capture(twin.config, "pub")
    assert due(twin) == []
    assert read_status(twin).behind_reason is None


def test_subscriber_is_due_once_it_is_reachable_again(twin: Twin) -> None:
    """The failures meanwhile have left no record, and the last record is a success."""
    subscribe(twin, "s", "other")
    database = twin.pairs["s"].ours.name
    twin.pairs["other"].ours.run(f"alter database {database} allow_connections false")
    twin.publish("insert into t values (1, 1)")
    capture(twin.config, "pub")
    results = {result.subscription: result for result in replay(twin.config, ["s", "other"])}
    assert results["s"].retry is Retry.LATER
    assert results["other"].error is None
    unreachable_status = read_status(twin)
    assert (unreachable_status.behind_reason or "").startswith(
        "the subscriber does not answer: cannot connect"
    )
    assert unreachable_status.error is not None
    assert (read_status(twin, "other").error, read_status(twin, "other").behind_reason) == (None, None)
    assert due(twin) == []

    twin.pairs["other"].ours.run(f"alter database {database} allow_connections true")

    back = read_status(twin)
    assert back.behind_since is not None
    assert (back.behind_reason or "").startswith("no replay since ")
    assert due(twin) == ["s"]
    replay(twin.config, ["s"])
    assert read_status(twin).behind_reason is None


def test_tables_that_wait_for_a_snapshot_are_named_and_no_replay_is_due(twin: Twin) -> None:
    twin.publisher.run(f"{TABLES}; create publication p for table t, u")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    assert read_status(twin).behind_reason == "waits for its first snapshot"
    assert due(twin) == []
    snapshot(twin.config, "s")
    capture(twin.config, "pub")
    assert read_status(twin).behind_reason is None

    with twin.pairs["s"].ours.connect() as connection:
        subscription_tables.set_table_state(connection, "s", QualifiedName("public", "u"), Pending())
    assert read_status(twin).behind_reason == "public.u: waiting for its snapshot"
    assert (read_status(twin).behind_since, due(twin)) == (None, [])


def test_a_table_whose_copy_has_ended_early_is_a_problem_until_a_process_copies_it(twin: Twin) -> None:
    subscribe(twin, "s")
    with twin.pairs["s"].ours.connect() as connection:
        subscription_tables.set_table_state(connection, "s", QualifiedName("public", "u"), Copying(Lsn(1)))
        (problem,) = status(twin.config).problems
        for name in (subscription_lock.copy_lock("s"), "s"):
            with subscription_lock.lock(connection, name):
                assert status(twin.config).problems == ()

    assert problem.message == "no process copies what waits for its copy: public.u"
    assert "`cdc-replay snapshot s`" in problem.remedy


def test_changes_captured_during_a_copy_are_due_before_the_first_replay(twin: Twin) -> None:
    twin.publisher.run(f"{TABLES}; create publication p for table t, u")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    snapshot(twin.config, "s")
    twin.publish("insert into t values (1, 1)")
    capture(twin.config, "pub")
    assert read_status(twin).behind_reason == "no replay has run yet"
    assert due(twin) == ["s"]


def test_transient_failure_is_reported_and_due(twin: Twin) -> None:
    subscribe(twin, "s", lock_timeout=1)
    twin.publish("insert into t values (1, 1)")
    capture(twin.config, "pub")
    with twin.pairs["s"].ours.connect() as other, other.transaction():
        other.execute("lock table t")
        (failed,) = replay(twin.config, ["s"])
        assert failed.retry is Retry.LATER
        lagging_status = read_status(twin)
        assert (lagging_status.last_replay or "").startswith("failed: ")
        assert "the last replay failed at " in (lagging_status.behind_reason or "")
        assert (failed.error or "-") in (lagging_status.behind_reason or "")
        assert due(twin) == ["s"]


def test_parked_subscription_is_due_after_a_while(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """R8.5: not at once, because only a repair or a skip can end that."""
    subscribe(twin, "s")
    twin.pairs["s"].ours.run("insert into t values (1, 0)")
    twin.publish("insert into t values (1, 1)")
    capture(twin.config, "pub")
    replay(twin.config, ["s"])
    lagging_status = read_status(twin)
    assert lagging_status.behind_since is not None
    assert (lagging_status.behind_reason or "").startswith("parked at ")
    assert due(twin) == []

    monkeypatch.setattr(lag, "PATIENCE", timedelta(0))
    assert due(twin) == ["s"]


def test_replay_that_ended_in_the_future_is_due(twin: Twin) -> None:
    """The subscriber's clock was a year ahead, and was set back."""
    subscribe(twin, "s")
    ours = twin.pairs["s"].ours
    ours.run("insert into t values (1, 0)")
    twin.publish("insert into t values (1, 1)")
    capture(twin.config, "pub")
    replay(twin.config, ["s"])
    assert due(twin) == []

    ours.run("update cdc_replay.result set finished = finished + interval '1 minute'")
    assert due(twin) == []  # clocks differ a little
    ours.run("update cdc_replay.result set finished = finished + interval '1 year'")
    assert due(twin) == ["s"]
    ours.run("delete from t")
    replay(twin.config, ["s"])
    assert (ours.rows("table t"), read_status(twin).behind_reason) == ([(1, 1)], None)


def test_lag_is_never_negative(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our clock is slower than that of the publisher, whose commit times these are."""
    subscribe(twin, "s")
    twin.publish("insert into t values (1, 1)")
    capture(twin.config, "pub")
    monkeypatch.setattr("cdc_replay.replay.subscription_status.time.time", lambda: 0.0)
    assert read_status(twin).lag_seconds == 0
    assert read_status(twin).behind_since is not None


def test_parked_table_is_reported_and_no_replay_is_due(twin: Twin) -> None:
    subscribe(twin, "s", on_failure="table")
    twin.pairs["s"].ours.run("insert into t values (1, 0)")
    twin.publish("insert into t values (1, 1);\ninsert into u values (1, 1)")
    capture(twin.config, "pub")
    replay(twin.config, ["s"])
    lagging_status = read_status(twin)
    assert lagging_status.lag_seconds == 0
    assert lagging_status.behind_since is not None
    assert (lagging_status.behind_reason or "").startswith("public.t: parked at ")
    assert due(twin) == []


def test_replay_is_not_due_if_it_could_not_write_or_would_wait(twin: Twin) -> None:
    subscribe(twin, "s")
    twin.publish("insert into t values (1, 1)")
    capture(twin.config, "pub")
    ours = twin.pairs["s"].ours
    with ours.connect() as other, subscription_lock.lock(other, "s"):
        assert (read_status(twin).behind_reason or "").startswith(
            "a process is at work: It is server process "
        )
        assert due(twin) == []
    ours.run(f"alter database {ours.name} set default_transaction_read_only = on")
    assert read_status(twin).behind_reason == "the subscriber is read-only"
    assert due(twin) == []


def test_servers_that_never_answer_do_not_block_status(twin: Twin) -> None:
    """One accepts connections and never answers, another blocks queries of its state by a lock."""
    subscribe(twin, "s", "silent", "locked")
    with socket.create_server(("127.0.0.1", 0)) as silent, twin.pairs["locked"].ours.connect() as other:
        port = silent.getsockname()[1]
        twin.change("silent", dsn=f"postgresql://postgres@127.0.0.1:{port}/none?connect_timeout=600")
        with other.transaction():
            other.execute("lock table cdc_replay.subscription_table")
            impatient = replace(twin.config, timeouts=Timeouts(answer=timedelta(seconds=2)))
            statuses = {
                subscription.subscription: subscription for subscription in status(impatient).subscriptions
            }
            assert list(due_replays(impatient, "pub", twin.pairs)) == []
    assert (statuses["s"].error, statuses["s"].behind_reason) == (None, None)
    for name in ("silent", "locked"):
        assert re.search("timeout|no answer within 2 s", statuses[name].error or "")
        assert (statuses[name].behind_reason or "").startswith("the subscriber does not answer: ")


def test_last_answer_of_a_subscriber_stays_visible_with_its_age(twin: Twin) -> None:
    subscribe(twin, "s")
    twin.publish("insert into t values (1, 1)")
    with ServerAnswers(60) as answers:
        before = status_of(twin.config, answers, ["pub"], ["s"])
        twin.change("s", dsn="postgresql://postgres@127.0.0.1:1/none")
        after = status_of(twin.config, answers, ["pub"], ["s"])
    (then,), (now,) = before.subscriptions, after.subscriptions
    assert (then.error, then.seconds_old) == (None, None)
    assert now.applied_lsn == then.applied_lsn is not None
    assert (now.seconds_old or 0) > 0
    assert "127.0.0.1" in (now.error or "")
    assert [(table.table, table.state) for table in after.tables] == [
        (table.table, table.state) for table in before.tables
    ]
    assert all(table.seconds_old for table in after.tables)
    assert after.publishers[0].seconds_old is None


def test_server_that_stops_within_a_session_is_abandoned(twin: Twin) -> None:
    """It ignores its own timeouts, and its host still acknowledges what we send."""
    subscribe(twin, "s")
    dsn = twin.config.dsn_of(twin.config.subscription("s"))
    with connect_with_deadline(dsn, purpose="test", seconds=0.5) as connection:
        backend = connection.info.backend_pid
        os.kill(backend, signal.SIGSTOP)
        try:
            with pytest.raises(psycopg.OperationalError):
                connection.execute("select 1")
        finally:
            os.kill(backend, signal.SIGCONT)


def test_missing_and_unreadable_logs_are_reported(twin: Twin) -> None:
    """The log says nothing; the subscriber's tables are as old as they are."""
    subscribe(twin, "s")
    twin.publish("insert into t values (1, 1)")
    capture(twin.config, "pub")
    setup(twin.config, "pub")
    for segment in (twin.change_log / "changes").glob("*.parquet"):
        segment.write_bytes(b"")
    assert "is damaged or missing" in (read_status(twin).error or "")
    assert due(twin) == []
