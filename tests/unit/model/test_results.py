"""Results of consecutive ranges are joined field by field."""

from __future__ import annotations

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import CONFLICT_KEYS_KEPT, ReplayResult, SnapshotResult, TableCopied


def replayed(after: int, upto: int, **fields: object) -> ReplayResult:
    return ReplayResult("s", Lsn(after), Lsn(upto), 1.0, **fields)  # type: ignore[arg-type] # checked by the test


def test_joined_result_spans_both_ranges_and_adds_their_counts() -> None:
    earlier = replayed(1, 2, changes_read=3, applied={"insert": 1}, parked=("a",), passed_over=("x", "y"))
    later = replayed(2, 5, changes_read=4, applied={"insert": 2, "delete": 1}, passed_over=("y", "z"))
    assert earlier.followed_by(later) == ReplayResult(
        *("s", Lsn(1), Lsn(5), 2.0),
        changes_read=7,
        applied={"insert": 3, "delete": 1},
        parked=("a",),
        passed_over=("x", "y", "z"),
    )


def test_joined_result_has_the_later_error_and_the_first_conflict_keys() -> None:
    keys = [f"(id)=({number})" for number in range(CONFLICT_KEYS_KEPT)]
    earlier = replayed(1, 2, conflict_keys={"t": keys[:-1]}, error="lost")
    later = replayed(2, 3, conflict_keys={"t": [keys[-1], "one too many"]})
    joined = earlier.followed_by(later)
    assert (joined.error, joined.conflict_keys) == (None, {"t": tuple(keys)})


def test_snapshot_without_a_copy_does_not_change_the_joined_one() -> None:
    empty, table = SnapshotResult.nothing("s"), TableCopied("t", 1, 2, 0.5)
    copied = SnapshotResult("s", Lsn(3), Lsn(3), 1.0, 1, 2, (table,))
    assert empty.followed_by(copied) == copied == copied.followed_by(empty)
