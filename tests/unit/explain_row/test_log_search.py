"""Changes of a row are found in the log by its key, whatever else has the same text."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_replay.explain_row.log_search import FoundChanges, is_newer_than_log
from unit.changelog.small_log import EVERYTHING, TABLE, TRUNCATE, SmallLog, insert, message_rows
from unit.explain_row.log_rows import delete, find, update


@pytest.fixture
def log(tmp_path: Path) -> SmallLog:
    return SmallLog.create(tmp_path)


def described(found: FoundChanges) -> list[tuple[int, str]]:
    return [(change.commit_lsn.value, change.kind.value) for change in found.changes]


def test_a_key_is_no_other_value_and_no_part_of_one(log: SmallLog) -> None:
    """The text "5" is in every message; the key is 5 in three of them."""
    log.pull(
        200,
        message_rows(110, [(0, insert(5)), (1, insert(55)), (2, update("7", "5"))]),
        message_rows(120, [(0, update("5", "x")), (1, update("x5", "t\0\0\0\0015"))]),
        message_rows(130, [(0, delete("5"))]),
    )
    assert described(find(log, "5")) == [(110, "I"), (120, "U"), (130, "D")]
    assert find(log, "4711").count == 0


def test_the_newest_changes_are_kept_and_all_counted(log: SmallLog) -> None:
    for lsn in range(110, 200, 10):
        log.pull(lsn, message_rows(lsn, [(0, update("5", str(lsn)))]))
    found = find(log, "5", last=2)
    assert (found.count, described(found)) == (9, [(180, "U"), (190, "U")])


def test_a_truncate_of_the_table_is_a_change_of_every_row(log: SmallLog) -> None:
    log.pull(200, message_rows(110, [(0, insert(5)), (1, TRUNCATE)]))
    found = find(log, "5")
    assert described(found) == [(110, "I"), (110, "T")]
    assert found.changes[1].relation == TABLE.id


def test_a_row_is_followed_to_and_from_other_keys(log: SmallLog) -> None:
    """1 becomes 2, then 3; another row has the key 1 afterwards, which is none of its changes."""
    log.pull(
        200,
        message_rows(110, [(0, insert(1))]),
        message_rows(120, [(0, update("2", "a", old_key="1"))]),
        message_rows(130, [(0, insert(1))]),
        message_rows(140, [(0, update("3", "b", old_key="2"))]),
        message_rows(150, [(0, update("3", "c"))]),
    )
    whole = [(110, "I"), (120, "U"), (140, "U"), (150, "U")]
    assert described(find(log, "3")) == described(find(log, "2")) == whole
    first = find(log, "1")
    assert described(first) == [(110, "I"), (120, "U"), (130, "I")]
    assert [change.moves for change in first.changes] == [False, True, False]


def test_a_transaction_that_began_after_the_log(log: SmallLog) -> None:
    assert not is_newer_than_log(log.log, EVERYTHING, 5)
    log.pull(200, message_rows(110, [(0, insert(1))], xid=2**32 - 3))
    assert not is_newer_than_log(log.log, EVERYTHING, 2**32 - 3)
    assert not is_newer_than_log(log.log, EVERYTHING, None)
    assert is_newer_than_log(log.log, EVERYTHING, 7)  # after the ids have wrapped around
