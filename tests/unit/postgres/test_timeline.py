"""Parsing of timeline history files: ancestors and branch points."""

from __future__ import annotations

import pytest

from cdc_replay.errors import InvalidLsn
from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.timeline import TimelineHistory

FILE = """\
# comments and empty lines are allowed

1\t0/3000098\tno recovery target specified
2\t1/A0000000\tat restore point "before the release"
"""


def test_a_history_names_every_ancestor_and_its_branch_point() -> None:
    history = TimelineHistory.parse(5, FILE)
    assert history.branch_lsn(1) == Lsn.parse("0/3000098")
    assert history.branch_lsn(2) == Lsn.parse("1/A0000000")
    assert [history.branch_lsn(timeline) for timeline in (3, 4, 5, 6)] == [None] * 4


def test_the_first_timeline_has_no_ancestor() -> None:
    assert TimelineHistory(1).branch_lsn(1) is None
    assert TimelineHistory.parse(1, "") == TimelineHistory(1)


@pytest.mark.parametrize(("text", "error"), [("1\tnowhere\treason", InvalidLsn), ("one\t0/1\t", ValueError)])
def test_a_malformed_history_is_refused(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        TimelineHistory.parse(2, text)
