"""`sync --follow`: what is committed arrives, while it runs and only then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cdc_replay.commands.follow import follow
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.validate import validate
from cdc_replay.errors import InvalidConfiguration, SlotMissing
from cdc_replay.model.results import SyncResult
from fixtures.native import wait_for
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

T = "create table t (id int primary key, a int)"


@contextlib.contextmanager
def following(twin: Twin, *names: str) -> Iterator[list[SyncResult]]:
    """`follow` in a thread of its own; its results, once the context has exited."""
    stop, results = threading.Event(), list[SyncResult]()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(follow, twin.config, names, stop)
        try:
            yield results
        finally:
            stop.set()
        results += running.result(timeout=300)


def test_rows_arrive_as_they_are_committed_until_it_is_stopped(twin: Twin) -> None:
    twin.publisher.run(
        f"{T}; alter table t replica identity full; create publication p for table t where (a > 10);"
        " insert into t values (1, 11)"
    )
    twin.subscribe("s", "p", tables=T, native=False)

    with following(twin, "s") as results:
        twin.wait_for_ids("s", 1)
        twin.publish("insert into t values (2, 12), (3, 3);\nupdate t set a = 13 where id = 3")
        twin.wait_for_ids("s", 1, 2, 3)
        twin.publish("update t set a = 1 where id = 1")
        twin.wait_for_ids("s", 2, 3)
    twin.publish("insert into t values (4, 14)")

    [result] = results
    assert result.snapshot.rows == 1
    assert (result.replay.updates_to_insert, result.replay.updates_to_delete) == (1, 1)
    twin.wait_for_ids("s", 2, 3)


def test_subscription_that_fails_stops_no_other_and_is_retried(twin: Twin) -> None:
    twin.publisher.run(f"{T}; create publication p for table t")
    for name in ("stuck", "good"):
        twin.subscribe(name, "p", tables=T, native=False)

    with following(twin, "stuck", "good"):
        twin.publish("insert into t values (1, 1)")
        twin.wait_for_ids("stuck", 1)
        twin.pairs["stuck"].ours.run("insert into t values (2, 0)")
        twin.publish("insert into t values (2, 2)")
        twin.publish("insert into t values (3, 3)")
        twin.wait_for_ids("good", 1, 2, 3)
        twin.pairs["stuck"].ours.run("delete from t where id = 2")
        twin.wait_for_ids("stuck", 1, 2, 3)


def test_other_commands_take_their_turn_while_it_runs(twin: Twin) -> None:
    twin.publisher.run(f"{T}; create publication p for table t")
    twin.subscribe("s", "p", tables=T, native=False)
    busy = threading.Event()

    def write() -> None:
        number = 0
        with twin.publisher.connect() as connection:
            while not busy.is_set():
                connection.execute("insert into t values (%s, 1)", (number := number + 1,))
                busy.wait(0.01)

    with following(twin, "s"), ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        try:
            wait_for(lambda: bool(twin.pairs["s"].ours.rows("table t")), "the first row")
            assert validate(twin.config, "s").error is None
            assert refresh(twin.config, "s").subscription == "s"
        finally:
            busy.set()
        writing.result(timeout=300)


def test_error_that_no_retry_mends_is_raised(twin: Twin) -> None:
    twin.publisher.run(f"{T}; create publication p for table t")
    twin.subscribe("s", "p", tables=T, native=False)
    twin.sync_ours("s")
    twin.publisher.run(f"select pg_drop_replication_slot('{twin.slot}'); insert into t values (1, 1)")

    with pytest.raises(SlotMissing):
        follow(twin.config, ["s"], threading.Event())
    with pytest.raises(InvalidConfiguration):
        follow(twin.config, ["s", "no_such"], threading.Event())
