"""What a watched publisher's WAL position requires, by what is known of the WAL."""

from __future__ import annotations

import pytest

from cdc_replay.capture.commit_watch import MOVE_BYTES, MOVE_SECONDS, Step, WatchState
from cdc_replay.model.lsn import Lsn


@pytest.fixture
def state() -> WatchState:
    """Nothing is known yet; at second 0 the slot is at 100, and least and greatest interval are 2 and 60."""
    state = WatchState(2.0, 60.0, moved_at=0.0)
    assert state.next_step(0.0, Lsn(100), Lsn(100)) is Step.NOTHING
    return state


def test_wal_beyond_the_slot_is_peeked_once(state: WatchState) -> None:
    assert state.next_step(1.0, Lsn(110), Lsn(100)) is Step.PEEK
    state.empty_to = Lsn(110)
    assert state.next_step(1.5, Lsn(110), Lsn(100)) is Step.NOTHING
    assert state.next_step(2.0, Lsn(111), Lsn(100)) is Step.PEEK


def test_wal_of_a_server_that_takes_over_is_peeked_where_it_was_empty(state: WatchState) -> None:
    """A promoted standby may lack the end of the WAL; it writes other changes there."""
    state.empty_to = Lsn(200)
    assert state.next_step(1.0, Lsn(150), Lsn(100)) is Step.PEEK
    state.empty_to = Lsn(150)
    assert state.next_step(MOVE_SECONDS, Lsn(150), Lsn(100)) is Step.MOVE


def test_announced_change_is_announced_again_if_no_capture_follows(state: WatchState) -> None:
    state.announce(1.0, Lsn(110))
    assert state.next_step(5.0, Lsn(500), Lsn(100)) is Step.NOTHING
    assert state.next_step(61.0, Lsn(500), Lsn(100)) is Step.PEEK


def test_commits_of_a_burst_share_an_announcement(state: WatchState) -> None:
    state.announce(1.0, Lsn(110))
    # A capture was quick; what has been committed since waits for the least interval.
    assert state.next_step(1.5, Lsn(120), Lsn(115)) is Step.NOTHING
    assert state.next_step(3.0, Lsn(120), Lsn(115)) is Step.PEEK


def test_slot_moves_past_wal_without_changes(state: WatchState) -> None:
    state.empty_to = Lsn(110)
    assert state.next_step(MOVE_SECONDS - 1, Lsn(110), Lsn(100)) is Step.NOTHING
    assert state.next_step(MOVE_SECONDS, Lsn(110), Lsn(100)) is Step.MOVE
    assert state.next_step(MOVE_SECONDS + 1, Lsn(110), Lsn(110)) is Step.NOTHING
    state.empty_to = Lsn(110 + MOVE_BYTES)
    assert state.next_step(MOVE_SECONDS + 2, state.empty_to, Lsn(110)) is Step.MOVE
