"""A window is staged while the previous one is merged; the result is as if they ran in sequence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from cdc_replay.replay import window_plan as plan
from cdc_replay.replay.apply.session import Applied, ApplySession
from cdc_replay.replay.window_job import RoutingGroup, StagedGroup, WindowJob
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key, a int)"
WAIT_SECONDS = 120


@dataclass
class Watched:
    """Records the order of staging and merging; a merge waits until this many windows are staged."""

    staged_before_merge: Callable[[int], int]
    events: list[str] = field(default_factory=list)
    _staged: int = 0
    _merged: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stage, apply = WindowJob.stage, ApplySession.apply

        def staged(flow: WindowJob, lanes: Sequence[RoutingGroup]) -> tuple[StagedGroup, ...]:
            result = stage(flow, lanes)
            with self._changed:
                self._staged += 1
                self.events.append(f"staged {self._staged}")
                self._changed.notify_all()
            return result

        def applied(window: ApplySession, *given: Any, **named: Any) -> Applied:
            with self._changed:
                self._merged += 1
                index, expected = self._merged, self.staged_before_merge(self._merged)
                assert self._changed.wait_for(lambda: self._staged >= expected, WAIT_SECONDS)
            result = apply(window, *given, **named)
            with self._changed:
                self.events.append(f"merged {index}")
            return result

        monkeypatch.setattr(WindowJob, "stage", staged)
        monkeypatch.setattr(ApplySession, "apply", applied)


@pytest.fixture
def windows_of_four(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> Twin:
    """A subscription `s`, equal to native; about four messages are a window."""
    monkeypatch.setattr(plan, "ROWS_PER_WINDOW", 4)
    twin.options["max_changes_per_pull"] = 4
    twin.publisher.run(f"{TABLE}; create publication p for table t")
    twin.subscribe("s", "p", tables=TABLE)
    twin.sync()
    return twin


def _insert(first: int, last: int) -> str:
    return ";\n".join(f"insert into t values ({row_id}, {row_id})" for row_id in range(first, last + 1))


def test_window_is_staged_while_the_previous_one_is_merged(
    windows_of_four: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second window changes rows that the first inserts."""
    twin = windows_of_four
    twin.publish(f"{_insert(1, 4)}; update t set a = 0 where id < 3; delete from t where id = 3")
    twin.publish(f"{_insert(5, 9)}; {_insert(3, 3)}; update t set id = -id where id = 4")
    capture(twin.config, "pub")
    last = 3
    watched = Watched(lambda index: min(index + 1, last))
    watched.patch(monkeypatch)

    (result,) = replay(twin.config, ["s"])

    assert result.error is None
    assert watched.events[:3] == ["staged 1", "staged 2", "merged 1"]
    assert watched.events[-1] == f"merged {len(watched.events) // 2}"
    twin.sync()
    assert len(twin.rows("s", "t")) == 9
    assert _staging_tables(twin) == 0


def test_staged_rows_are_dropped_if_the_previous_window_is_refused(
    windows_of_four: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The subscription is parked before the transaction that is refused, as without the second window."""
    twin = windows_of_four
    twin.pairs["s"].ours.run("insert into t values (2, -2)")
    twin.publish(_insert(1, 8))
    capture(twin.config, "pub")
    watched = Watched(lambda index: 2 if index == 1 else 0)
    watched.patch(monkeypatch)

    (result,) = replay(twin.config, ["s"])

    assert "key (id)=(2)" in (result.error or "")
    assert watched.events[:2] == ["staged 1", "staged 2"]
    assert twin.pairs["s"].ours.rows("table t order by id") == [(1, 1), (2, -2)]
    assert _staging_tables(twin) == 0
    twin.pairs["s"].ours.run("delete from t where id = 2")
    assert replay(twin.config, ["s"])[0].error is None
    twin.sync()
    assert len(twin.rows("s", "t")) == 8


def test_no_window_is_opened_during_the_merge_of_a_truncate(
    windows_of_four: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = windows_of_four
    twin.publish(f"{_insert(1, 2)}; truncate t; {_insert(3, 9)}")
    capture(twin.config, "pub")
    watched = Watched(lambda index: index)
    watched.patch(monkeypatch)

    (result,) = replay(twin.config, ["s"])

    assert result.error is None
    assert watched.events[:2] == ["staged 1", "merged 1"]
    twin.sync()
    assert len(twin.rows("s", "t")) == 7


def test_one_subscription_stops_while_the_other_continues(windows_of_four: Twin) -> None:
    """Both are staged together; only one has a blocking row."""
    twin = windows_of_four
    twin.subscribe("bad", "p", tables=TABLE, native=False)
    twin.sync_ours("bad")
    twin.pairs["bad"].ours.run("insert into t values (6, -6)")
    twin.publish(_insert(1, 12))
    capture(twin.config, "pub")

    good, bad = replay(twin.config, ["s", "bad"])

    assert good.error is None
    assert "key (id)=(6)" in (bad.error or "")
    assert [row[0] for row in twin.pairs["bad"].ours.rows("table t order by id")] == [1, 2, 3, 4, 5, 6]
    assert twin.pairs["bad"].ours.rows("select a from t where id = 6") == [(-6,)]
    twin.sync("s")
    assert len(twin.rows("s", "t")) == 12


def _staging_tables(twin: Twin) -> int:
    ((count,),) = twin.pairs["s"].ours.rows("select count(*)::int from pg_class where relname like 'stage_%'")
    return int(count)
