"""Every stage reports to the caller of its command."""

from __future__ import annotations

from typing import NoReturn

import pytest

from cdc_replay.commands.backfill import backfill
from cdc_replay.commands.capture import capture
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.replay import replay
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.sync import sync
from cdc_replay.commands.validate import validate
from cdc_replay.commands.verify_log import verify_log
from cdc_replay.model.progress import Progress
from fixtures.twin import Twin

pytestmark = pytest.mark.spark


class Reports(list[Progress]):
    """What was reported; as a display, it cannot be sent to an executor."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("reports stay in the driver")


def test_progress_of_every_command(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdc_replay.spark.progress.WATCH_SECONDS", 0.01)
    reported = Reports()

    def kinds() -> set[tuple[str, str]]:
        """What was reported since, after a check that nothing exceeds its total."""
        assert all(report.total is None or 0 <= report.done <= report.total for report in reported)
        found = {(report.action, report.of) for report in reported if not report.of.startswith("window")}
        reported.clear()
        return found

    report = reported.append
    twin.publisher.run("create table t (id int primary key, a int); create publication p for table t")
    twin.publisher.run("insert into t values (1, 1)")
    twin.subscribe("s", "p", tables="create table t (id int primary key, a int)", native=False)
    sync(twin.config, ["s"], report=report)
    assert kinds() >= {("copy", "public.t"), ("capture", "pub")}
    begin = twin.position()
    twin.publisher.run("insert into t select n, n from generate_series(2, 2000) as n")
    capture(twin.config, "pub", report=report)
    assert kinds() == {("capture", "pub")}
    (replayed,) = replay(twin.config, ["s"], report=report)
    assert any(progress.action == "read" and progress.total for progress in reported)
    assert kinds() == {("replay", "s"), ("merge", "s")}
    backfill(twin.config, "s", str(begin), str(replayed.to_lsn), report=report)
    assert ("backfill", "s") in kinds()
    verify_log(twin.config, "pub", report=report)
    assert kinds() == {("verify", "pub")}
    snapshot(twin.config, "s", tables=[], report=report)
    assert kinds() == set()
    refresh(twin.config, "s", reconcile=True, report=report)
    assert kinds() == {("compare", "s"), ("merge", "s")}
    validate(twin.config, "s", report=report)
    assert kinds() >= {("compare", "s")}
