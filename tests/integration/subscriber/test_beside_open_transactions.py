"""A slot's snapshot waits for the publisher's open transactions (R1.35); replay continues meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.replay import replay
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.teardown import teardown
from cdc_replay.commands.validate import validate
from cdc_replay.config import Config
from cdc_replay.errors import SubscriptionInUse
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection
from fixtures.native import wait_for
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLES = "create table t (id int primary key); create table more (id int primary key)"
EXPORTING = "select from pg_replication_slots where temporary and database = current_database()"

_T = QualifiedName("public", "t")


@pytest.mark.parametrize(
    "command",
    [
        lambda config: validate(config, "s"),
        lambda config: snapshot(config, "s", tables=[_T]),
        lambda config: refresh(config, "s"),
        lambda config: refresh(config, "s", reconcile=True),
    ],
    ids=["validate", "snapshot", "refresh", "reconcile"],
)
def test_replay_runs_while_a_command_waits_for_a_transaction(
    twin: Twin, command: Callable[[Config], object]
) -> None:
    twin.publisher.run(f"{TABLES}; create publication p for table t; insert into t values (1)")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    twin.publisher.run("alter publication p add table more; insert into more values (1)")

    with ThreadPoolExecutor(1) as pool, twin.publisher.connect() as idle:
        idle.execute("begin; insert into t values (2)")
        waiting = pool.submit(command, twin.config)
        wait_for(lambda: waiting.done() or bool(twin.publisher.rows(EXPORTING)), "the command to export")
        twin.publish("insert into t values (3)")
        capture(twin.config, "pub")
        (replayed,) = replay(twin.config, ["s"])
        assert replayed.error is None
        assert twin.pairs["s"].ours.rows("table t order by id") == [(1,), (3,)]
        assert not waiting.done()
        idle.execute("commit")
        waiting.result()

    twin.sync_ours()
    assert twin.pairs["s"].ours.rows("table t order by id") == [(1,), (2,), (3,)]
    assert validate(twin.config, "s").success


@pytest.fixture
def waiting_for_commit(twin: Twin) -> Iterator[Connection]:
    """Subscription `s` is synced, and a transaction of the publisher is open."""
    twin.publisher.run(f"{TABLES}; create publication p for table t")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    twin.publisher.run("alter publication p add table more; insert into t values (1)")
    with twin.publisher.connect() as idle:
        idle.execute("begin; insert into t values (2)")
        yield idle


@pytest.mark.parametrize("is_last", [True, False])
def test_a_validation_that_waits_says_that_its_subscription_was_removed(
    twin: Twin, waiting_for_commit: Connection, is_last: bool
) -> None:
    """The last one of a database takes the schema with it."""
    if not is_last:
        twin.pairs["s"].ours.run("""
            insert into cdc_replay.subscription
                (name, publisher_system_identifier, publications, publisher_database_oid,
                publisher_database_name) values ('other', '1', '{p}', 1, 'other')
        """)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(validate, twin.config, "s")
        wait_for(lambda: waiting.done() or bool(twin.publisher.rows(EXPORTING)), "the command to export")
        assert teardown(twin.config, "s").removed
        waiting_for_commit.execute("commit")
        with pytest.raises(SubscriptionInUse, match="has removed the state"):
            waiting.result()


@pytest.mark.parametrize("reconcile", [False, True])
def test_teardown_beside_a_refresh_that_waits_is_refused(
    twin: Twin, waiting_for_commit: Connection, reconcile: bool
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(refresh, twin.config, "s", reconcile=reconcile)
        wait_for(lambda: waiting.done() or bool(twin.publisher.rows(EXPORTING)), "the command to export")
        with pytest.raises(SubscriptionInUse, match="cdc_replay refresh s"):
            teardown(twin.config, "s")
        waiting_for_commit.execute("commit")
        waiting.result()
    twin.sync_ours()
    assert twin.pairs["s"].ours.rows("table t order by id") == [(1,), (2,)]
