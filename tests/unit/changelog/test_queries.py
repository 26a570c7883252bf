"""Queries for logical messages, and for the first change of a relation version."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from cdc_replay.arrow.version_index import CatalogVersions
from cdc_replay.changelog.queries import LoggedMessage, SentChanges
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.relation import RelationId
from unit.changelog.small_log import EVERYTHING, TABLE, TRUNCATE, SmallLog, insert, message_rows, transaction


def logical(prefix: str, content: bytes, *, is_transactional: bool = True) -> bytes:
    head = struct.pack(">BQ", is_transactional, 1)
    return b"M" + head + prefix.encode() + b"\0" + struct.pack(">I", len(content)) + content


@pytest.fixture
def log(tmp_path: Path) -> SmallLog:
    return SmallLog.create(tmp_path)


def test_logical_messages_are_selected_by_window_and_prefix(log: SmallLog) -> None:
    """R9.13: a non-transactional message belongs to no transaction."""
    other, outside = logical("other", b"x"), logical("mine", b"x", is_transactional=False)
    log.pull(110, transaction(110))
    log.pull(120, message_rows(120, [(0, insert(1)), (1, logical("mine", b"one")), (2, other)]))
    log.pull(130, message_rows(130, [(0, outside), (1, logical("mine", b"two"))]))

    summary = log.reopened().summary(EVERYTHING)
    assert summary.logical == Window(Lsn(119), Lsn(130))
    assert log.reopened().definitions_in(EVERYTHING, [(0, 0)]).summary == summary
    assert log.reopened().summary(Window(Lsn(100), Lsn(110))).logical is None
    assert list(log.reopened().logical_messages(EVERYTHING, "mine")) == [
        LoggedMessage(Lsn(120), b"one"),
        LoggedMessage(Lsn(130), b"two"),
    ]
    assert list(log.reopened().logical_messages(Window(Lsn(100), Lsn(120)), "mine")) == [
        LoggedMessage(Lsn(120), b"one")
    ]


@pytest.mark.parametrize(
    ("after", "upto", "versions", "expected"),
    [
        (100, 150, {2}, 120),  # 130 is the first with it
        (110, 150, {2}, 120),
        (120, 150, {2}, 120),  # the first of the window has it
        (100, 150, {1}, 100),
        (100, 150, {1, 2}, 100),
        (100, 150, {3}, 150),  # none has it
        (100, 120, {2}, 120),
        (130, 150, {2}, 140),  # 140 has it not; 150 has
    ],
)
def test_a_window_ends_before_the_first_change_of_a_version(
    log: SmallLog, after: int, upto: int, versions: set[int], expected: int
) -> None:
    """R9.10. Transactions are whole, also where one has both versions and lies in two row groups."""
    log.pull(110, message_rows(110, [(0, insert(1))], relation_version=1))
    log.pull(
        130,
        message_rows(120, [(0, insert(1))], relation_version=1),
        message_rows(130, [(0, insert(1))], relation_version=1),
        message_rows(130, [(1, insert(1))], relation_version=2),
    )
    log.pull(150, message_rows(140, [(0, insert(1))], relation_version=1))
    log.pull(160, message_rows(150, [(0, insert(1))], relation_version=2))

    window = Window(Lsn(after), Lsn(upto))

    assert log.reopened().last_lsn_without(window, versions) == Lsn(expected)


@pytest.mark.parametrize(
    ("kinds", "truncated", "expected"),
    [
        ({(1, 1, "I")}, set(), 110),  # 120 is the first under the second catalog
        ({(1, 0, "I")}, set(), 100),
        ({(1, 1, "D"), (2, 1, "I")}, set(), 150),  # another kind, another version
        (set(), {(TABLE.id, 1)}, 120),
        (set(), {(TABLE.id, 0)}, 150),
        ({(1, 1, "I")}, {(TABLE.id, 1)}, 110),
    ],
)
def test_a_window_ends_before_the_first_change_under_a_catalog(
    log: SmallLog, kinds: set[tuple[int, int, str]], truncated: set[tuple[RelationId, int]], expected: int
) -> None:
    """R9.10: the same change means something else under another catalog."""
    log.pull(110, message_rows(110, [(0, insert(1))], relation_version=1))
    log.pull(120, message_rows(120, [(0, insert(1))], relation_version=1))
    log.pull(130, message_rows(130, [(0, TRUNCATE)]))
    window = Window(Lsn(100), Lsn(150))
    catalogs = CatalogVersions.from_positions([(0, 0), (0, 112)])

    end = log.reopened().end_before(window, SentChanges(frozenset(kinds), frozenset(truncated)), catalogs)

    assert end == Lsn(expected)
