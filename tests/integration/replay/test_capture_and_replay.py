"""Capture and replay side by side, in many windows, and several subscriptions in one job."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from cdc_replay.errors import CdcReplayError
from cdc_replay.replay import window_plan as plan
from cdc_replay.replay.window_job import RoutingGroup, StagedGroup, WindowJob
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key, a int, b text)"
TRAFFIC = ";\n".join(
    f"insert into t select i, i, 'x' from generate_series({first}, {first + 4}) i;\n"
    f"update t set a = a + 1 where id % 3 = 0;\n"
    f"update t set id = -id where id % 7 = 0 and id > 0;\n"
    f"delete from t where id % 5 = 0"
    for first in range(1, 60, 5)
)


def test_captured_changes_are_applied_while_the_capture_runs(
    twin: Twin, caplog: pytest.LogCaptureFixture
) -> None:
    """One result over several windows, the sum of what they are."""
    twin.options["max_changes_per_pull"] = 8
    twin.publisher.run(f"{TABLE}; create publication p for table t where (a % 2 = 0)")
    twin.publisher.run("alter table t replica identity full")
    twin.subscribe("s", "p", tables=TABLE)
    twin.sync()
    start = twin.sync_ours()[0].to_lsn
    twin.publish(TRAFFIC)

    with caplog.at_level(logging.INFO, logger="cdc_replay.replay.pipeline"):
        (result,) = twin.sync_ours()

    assert result.replay.error is None
    assert result.capture.pulls > 10
    windows = [record for record in caplog.records if "changes read" in record.getMessage()]
    assert len(windows) > 1
    assert start is not None
    assert (result.replay.from_lsn, result.replay.to_lsn) == (start, result.to_lsn)
    assert result.replay.changes_read == result.capture.messages
    assert result.replay.transactions == result.capture.transactions
    twin.sync()
    assert twin.rows("s", "t")


def test_failed_capture_leaves_its_changes_applied(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is that of the capture; the next run continues where the log ends."""
    twin.options["max_changes_per_pull"] = 2
    twin.publisher.run(f"{TABLE}; create publication p for table t")
    twin.subscribe("s", "p", tables=TABLE)
    twin.sync()
    twin.publish(";\n".join(f"insert into t values ({row_id}, 0, '')" for row_id in range(1, 9)))
    monkeypatch.setenv("CDC_REPLAY_FAILPOINT", "capture.after_segment@4=error")

    with pytest.raises((CdcReplayError, RuntimeError)):
        twin.sync_ours()

    applied = [row[0] for row in twin.pairs["s"].ours.rows("table t order by id")]
    assert applied == list(range(1, len(applied) + 1))
    assert len(applied) < 8
    monkeypatch.delenv("CDC_REPLAY_FAILPOINT")
    twin.sync()
    assert len(twin.rows("s", "t")) == 8


def test_failed_subscription_is_left_out_of_later_windows(twin: Twin) -> None:
    """The other one reaches the end, and the error names what blocks the first."""
    twin.options["max_changes_per_pull"] = 2
    twin.publisher.run(f"{TABLE}; create publication p for table t")
    twin.subscribe("good", "p", tables=TABLE)
    twin.subscribe("bad", "p", tables=TABLE, native=False)
    twin.sync("good")
    twin.sync_ours("bad")
    twin.pairs["bad"].ours.run("insert into t values (3, 0, 'in the way')")
    twin.publish(";\n".join(f"insert into t values ({row_id}, 0, '')" for row_id in range(1, 9)))

    good, bad = twin.sync_ours("good", "bad")

    assert good.replay.error is None
    assert "(id)=(3)" in (bad.replay.error or "")
    assert twin.pairs["bad"].ours.rows("select id, b from t where id > 2") == [(3, "in the way")]
    twin.sync("good")
    assert len(twin.rows("good", "t")) == 8


def test_long_window_is_several_transactions_of_the_subscriber(
    twin: Twin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plan, "ROWS_PER_WINDOW", 20)
    twin.options["max_changes_per_pull"] = 10
    twin.publisher.run(f"{TABLE}; create publication p for table t where (a % 2 = 0)")
    twin.publisher.run("alter table t replica identity full")
    twin.subscribe("s", "p", tables=TABLE)
    twin.sync()
    twin.publish(TRAFFIC)
    captured = capture(twin.config, "pub")

    with caplog.at_level(logging.INFO, logger="cdc_replay.replay.pipeline"):
        (result,) = replay(twin.config, ["s"])

    assert result.error is None
    assert (result.changes_read, result.to_lsn) == (captured.messages, captured.to_lsn)
    windows = [record for record in caplog.records if "changes read" in record.getMessage()]
    assert len(windows) > captured.messages // 40
    twin.sync()
    assert twin.rows("s", "t")


def test_subscriptions_with_equal_routes_share_a_routing_group(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job for all of them; row filters, policies and origins stay their own."""
    twin.publisher.run(f"{TABLE}; alter table t replica identity full")
    twin.publisher.run("create publication p for table t where (a % 2 = 0)")
    twin.publisher.run("create publication q for table t where (upper(b) like 'X%')")
    for name, publication in {"one": "p", "two": "p", "three": "q"}.items():
        twin.subscribe(name, publication, tables=TABLE)
    twin.subscribe("four", "p", tables=TABLE, native=False, on_conflict="overwrite")
    twin.sync("one", "two", "three")
    twin.sync_ours("four")
    twin.publish(TRAFFIC)
    capture(twin.config, "pub")
    seen: list[list[int]] = []
    staged = WindowJob.stage

    def watched(flow: WindowJob, lanes: Sequence[RoutingGroup]) -> tuple[StagedGroup, ...]:
        seen.append(sorted(len(lane.stagers) for lane in lanes))
        return staged(flow, lanes)

    monkeypatch.setattr(WindowJob, "stage", watched)

    results = replay(twin.config, ["one", "two", "three", "four"])

    assert [result.error for result in results] == [None] * 4
    assert seen == [[1, 1, 2]]
    twin.sync("one", "two", "three")
    assert twin.rows("one", "t") == twin.rows("two", "t") != twin.rows("three", "t")
    assert sorted(twin.pairs["four"].ours.rows("table t")) == sorted(twin.pairs["one"].ours.rows("table t"))
