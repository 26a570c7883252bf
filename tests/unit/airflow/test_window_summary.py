"""What a replay did, as it is pushed by its report task and read by a page that trusts nobody."""

from __future__ import annotations

import json

import pytest

from cdc_replay.airflow.window_summary import COUNTS, WindowSummary
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import ReplayResult

RESULT = ReplayResult(
    "nsw",
    Lsn(1),
    Lsn(9),
    0.5,
    changes_read=7,
    filtered_out=2,
    updates_to_insert=1,
    updates_to_delete=3,
    applied={"insert": 2, "update": 1, "delete": 2, "truncate": 0},
    conflicts={"update_missing": 1, "delete_missing": 4},
)


def test_summary_adds_up_counts_and_survives_xcom() -> None:
    summary = WindowSummary.of_result(RESULT.to_dict())
    assert list(summary.counts.values()) == [7, 2, 1, 3, 5, 5]
    assert WindowSummary.parse(json.loads(json.dumps(summary.to_json()))) == summary


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"subscription": "nsw"},
        {"subscription": "nsw", "from_lsn": "<b>", "to_lsn": "0/1"},
        {"subscription": "nsw", "from_lsn": "0/1", "to_lsn": None},
    ],
)
def test_anything_else_is_no_summary(value: dict[object, object]) -> None:
    assert WindowSummary.parse(value) is None


@pytest.mark.parametrize("count", ["<script>", -1, 2**70, 10**400, None, [1], 0.5])
def test_counts_that_are_none_are_zero(count: object) -> None:
    fields: dict[object, object] = dict.fromkeys([*COUNTS.values(), "seconds"], count)
    summary = WindowSummary.parse({"subscription": "nsw", "from_lsn": "0/1", "to_lsn": "0/2", **fields})
    assert summary is not None
    assert set(summary.counts.values()) == {0}
    assert summary.seconds in {0, 0.5}


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1, 10**400])
def test_times_that_are_none_are_zero(seconds: float) -> None:
    summary = WindowSummary.parse(
        {"subscription": "s", "from_lsn": "0/1", "to_lsn": "0/2", "seconds": seconds}
    )
    assert summary is not None
    assert summary.seconds == 0
