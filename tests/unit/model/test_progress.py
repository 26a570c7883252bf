"""How progress is worded."""

from __future__ import annotations

import pytest

from cdc_replay.model.progress import Pace, Progress, Unit, each_table

MIB = 1 << 20


@pytest.mark.parametrize(
    ("progress", "seconds", "words"),
    [
        (
            Progress("copy", "public.t", 25 * MIB, 45 * MIB, rows=190_234),
            10,
            "190,234 rows, 25 MB of 45 MB, 2048 kB/s, 10 s left",
        ),
        (Progress("copy", "public.t", 45 * MIB, 45 * MIB), 10, "45 MB of 45 MB, 4096 kB/s"),
        (Progress("capture", "shop", 5 * MIB, None), 0, "5120 kB"),
        (
            Progress("compare", "nsw", 3, 4, Unit.TABLES, current="public.t"),
            300,
            "3 of 4 tables, public.t",
        ),
        (Progress("read", "window", 0, 1, Unit.TASKS), 300, "0 of 1 task"),
    ],
)
def test_progress_in_words(progress: Progress, seconds: float, words: str) -> None:
    assert Pace(0.0, 5 * MIB if progress.unit is Unit.BYTES else 0).describe(progress, seconds) == words


def test_each_table_is_reported_when_its_turn_comes() -> None:
    reported: list[Progress] = []
    seen = [(table, len(reported)) for table in each_table(reported.append, "merge", "nsw", ("a", "b"))]
    assert seen == [("a", 1), ("b", 2)]
    assert [(report.done, report.total, report.current) for report in reported] == [
        (0, 2, "a"),
        (1, 2, "b"),
        (2, 2, None),
    ]
    assert [report.is_done for report in reported] == [False, False, True]
