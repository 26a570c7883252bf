"""Progress as log lines every ten seconds, and as a display of 80 columns."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

from rich.console import Console

from cdc_replay.model.progress import Progress, Unit
from cdc_replay.terminal.progress import LiveReport, ProgressLog, show_progress

if TYPE_CHECKING:
    import pytest


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_item_is_logged_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cdc_replay")
    clock = Clock()
    report = ProgressLog(clock)
    for second in range(26):
        clock.now = float(second)
        report(Progress("copy", "public.t", second << 20, 100 << 20, rows=second))
        if second > 9:
            report(Progress("replay", "nsw", second, 100))
    assert caplog.messages == [
        "copy public.t: 10 rows, 10 MB of 100 MB, 1024 kB/s, 90 s left",
        "copy public.t: 20 rows, 20 MB of 100 MB, 1024 kB/s, 80 s left",
        "replay nsw: 20 bytes of 100 bytes, 1 bytes/s, 80 s left",
    ]


def test_the_latest_item_is_logged_while_it_reports_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cdc_replay")
    clock = Clock()
    report = ProgressLog(clock)
    report(Progress("copy", "public.t", 5, 5))
    report(Progress("compare", "nsw", 1, 3, Unit.TABLES, current="public.big"))
    for second in range(26):
        clock.now = float(second)
        report.remind()
    report(Progress("compare", "nsw", 3, 3, Unit.TABLES))
    clock.now = 60.0
    report.remind()
    assert caplog.messages == ["compare nsw: 1 of 3 tables, public.big"] * 2


def test_without_a_terminal_progress_is_logged() -> None:
    with show_progress("sync nsw", Console(file=io.StringIO())) as report:
        assert isinstance(report, ProgressLog)


def test_display_of_80_columns_wraps_and_shows_what_is_not_done() -> None:
    long = "warehouse.a_table_whose_name_is_longer_than_its_column"
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    with show_progress("sync nsw", terminal) as report:
        assert isinstance(report, LiveReport)
        report(Progress("copy", "public.done", 5, 5, rows=2))
        report(Progress("copy", long, 25 << 20, 50 << 20, rows=190_234))
        report(Progress("compare", "nsw\x1b[31m", 1, 4, Unit.TABLES))
        with report.paused():
            screen = io.StringIO()
            Console(file=screen, width=80, color_system=None).print(report.display.get_renderable())
    shown = screen.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert long in "".join(line[2:36].strip() for line in shown.splitlines())
    assert "190,234 rows, 25 MB of" in shown
    assert "public.done" not in shown
    assert "…" not in shown
    assert "\x1b" not in shown
