"""A replay that goes on for a while: what is committed meanwhile arrives, and its result tells all of it."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from cdc_replay.commands.replay_and_follow import replay_and_follow
from cdc_replay.commands.status import subscription_result
from cdc_replay.model.results import ReplayResult
from fixtures.native import wait_for
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

T = "create table t (id int primary key, a int)"


@pytest.fixture
def followed(twin: Twin) -> Twin:
    twin.publisher.run(
        f"{T}; alter table t replica identity full; create publication p for table t where (a > 10)"
    )
    for name in ("s", "other"):
        twin.subscribe(name, "p", tables=T, native=False)
    twin.sync_ours("s", "other")
    return twin


def test_what_is_committed_meanwhile_is_applied_and_in_the_result(followed: Twin) -> None:
    twin = followed
    with ThreadPoolExecutor(1) as threads:
        running: Future[tuple[ReplayResult, ...]] = threads.submit(
            replay_and_follow, twin.config, ("s", "other"), seconds=8.0
        )
        twin.publish("insert into t values (1, 11), (2, 2)")
        twin.wait_for_ids("s", 1)
        twin.publish("update t set a = 12 where id = 2")
        twin.wait_for_ids("other", 1, 2)
        twin.publish("update t set a = 1 where id = 1")
        twin.wait_for_ids("s", 2)
        results = running.result(timeout=300)

    assert [result.subscription for result in results] == ["s", "other"]
    for result in results:
        assert (result.updates_to_insert, result.updates_to_delete, result.filtered_out) == (1, 1, 1)
        recorded = subscription_result(twin.config, result.subscription)
        assert recorded["applied"] == result.applied
        assert recorded["from_lsn"] == str(result.from_lsn)


def test_it_ends_early_where_a_subscription_cannot_follow(followed: Twin) -> None:
    twin = followed
    twin.pairs["s"].ours.run("insert into t values (3, 0)")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(replay_and_follow, twin.config, ("s", "other"), seconds=600.0)
        twin.publish("insert into t values (3, 33)")
        results = {result.subscription: result for result in running.result(timeout=300)}
    assert results["other"].error is None
    assert "duplicate key" in (results["s"].error or "") or "insert_exists" in (results["s"].error or "")


def test_it_ends_early_where_the_slot_is_lost(followed: Twin, caplog: pytest.LogCaptureFixture) -> None:
    twin = followed
    caplog.set_level(logging.WARNING)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(replay_and_follow, twin.config, ("s",), seconds=600.0)
        twin.publish("insert into t values (1, 11)")
        twin.wait_for_ids("s", 1)
        slot = twin.config.publisher("pub").slot
        wait_for(
            lambda: (
                twin.publisher.rows(f"select not active from pg_replication_slots where slot_name = '{slot}'")
                == [(True,)]
            ),
            "an idle slot",
            60,
        )
        twin.publisher.run(f"select pg_drop_replication_slot('{slot}')")
        twin.publish("insert into t values (2, 22)")
        [result] = running.result(timeout=300)
    assert result.error is None
    assert "is not followed any more" in caplog.text
