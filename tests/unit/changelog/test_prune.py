"""Pruning removes segments at the start of the log, and no reader mistakes the rest for the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdc_replay.changelog.delta.checkpoints import CHECKPOINT_EVERY
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import ChangeLogConflict, ChangeLogDamaged, ChangeLogPruned
from cdc_replay.failpoints import VARIABLE, FailpointReached
from cdc_replay.model.lsn import Lsn, Window
from unit.changelog.small_log import LOGICAL, SmallLog, message_rows, transaction


@pytest.fixture
def small(tmp_path: Path) -> SmallLog:
    """Four pulls, which end at 120, 130, 150 and 160; the third one has two transactions."""
    small = SmallLog.create(tmp_path)
    small.pull(120, transaction(110), transaction(120))
    small.pull(130, transaction(125))
    small.pull(150, transaction(140), transaction(150))
    small.pull(160, transaction(160))
    return small


def starts(log: ChangeLog, upto: int, committed_by: int | None = None) -> list[int]:
    prunable = log.prunable_segments(Lsn(upto), committed_by=committed_by)
    return [segment.min_commit_lsn for segment in prunable]


@pytest.mark.parametrize(
    ("upto", "expected"),
    [(100, []), (119, []), (120, [110]), (130, [110, 125]), (149, [110, 125]), (999, [110, 125, 140, 160])],
)
def test_segments_wholly_before_a_position_are_prunable(
    small: SmallLog, upto: int, expected: list[int]
) -> None:
    assert starts(small.log, upto) == expected


def test_segments_committed_later_stay_with_all_following_ones(small: SmallLog) -> None:
    """Commit times need not be in commit order (R9.14): the last segment stays after earlier ones."""
    small.pull(170, message_rows(170, [(0, LOGICAL)], commit_time=None))
    small.pull(180, message_rows(180, [(0, LOGICAL)], commit_time=145))
    assert starts(small.log, 999, committed_by=124) == [110]
    assert starts(small.log, 999, committed_by=150) == [110, 125, 140]
    assert starts(small.log, 999, committed_by=160) == [110, 125, 140, 160, 170, 180]
    assert starts(small.log, 130, committed_by=160) == [110, 125]


def test_pruning_moves_the_start_after_the_removed_segments(small: SmallLog) -> None:
    """To the last removed position, whatever the limit was: the log still has everything after it."""
    assert small.log.prune(small.log.prunable_segments(Lsn(135))) == 2
    log = small.reopened()
    assert (log.start_lsn, log.end_lsn, log.header.start_lsn) == (Lsn(125), Lsn(160), Lsn(100))
    assert [row["commit_lsn"] for row in small.rows(Window(Lsn(125), Lsn(150)))] == [140, 140, 150, 150]
    assert len(small.data_files()) == 2
    assert small.verify().from_lsn == Lsn(125)


def test_repeated_pruning_continues_up_to_the_end_of_the_log(small: SmallLog) -> None:
    small.log.prune(small.log.prunable_segments(Lsn(120)))
    small.log.prune(small.reopened().prunable_segments(Lsn(999)))
    assert small.reopened().start_lsn == small.reopened().end_lsn == Lsn(160)
    assert small.data_files() == []
    small.pull(170, transaction(165))
    assert [row["commit_lsn"] for row in small.rows(Window(Lsn(160), Lsn(170)))] == [165, 165]
    assert small.verify().segments == 1


def test_nothing_to_prune_is_no_commit(small: SmallLog) -> None:
    commits = len(list(Path(small.uri, "changes", "_delta_log").glob("*.json")))
    assert small.log.prune([]) == 0
    assert len(list(Path(small.uri, "changes", "_delta_log").glob("*.json"))) == commits


@pytest.mark.parametrize("after", [0, 100, 124])
def test_every_read_of_pruned_changes_is_refused(small: SmallLog, after: int) -> None:
    small.log.prune(small.log.prunable_segments(Lsn(130)))
    log = small.reopened()
    window = Window(Lsn(after), Lsn(160))
    readers = (
        *(log.segments, log.summary, log.relation_versions, log.first_commit),
        lambda window: list(log.commits(window)),
    )
    for read in readers:
        with pytest.raises(ChangeLogPruned, match="no longer contains") as refused:
            read(window)
        assert "starts at 0/7D" in str(refused.value)
        assert "cdc-replay snapshot" in str(refused.value.hint)
    assert log.summary(Window(Lsn(125), Lsn(160))).transactions == 3


def test_an_unpruned_log_refuses_no_window(small: SmallLog) -> None:
    assert small.log.summary(Window(Lsn(0), Lsn(160))).transactions == 6


def test_a_reader_that_opened_the_log_before_a_prune_gets_no_damage_error(small: SmallLog) -> None:
    reader = small.reopened()
    small.log.prune(small.log.prunable_segments(Lsn(130)))
    with pytest.raises(ChangeLogPruned):
        reader.segments(Window(Lsn(100), Lsn(160)))
    assert len(reader.segments(Window(Lsn(125), Lsn(160)))) == 2
    small.data_files()[-1].unlink()
    with pytest.raises(ChangeLogDamaged):
        reader.segments(Window(Lsn(125), Lsn(160)))


def test_kept_files_serve_older_readers_until_they_are_deleted(small: SmallLog) -> None:
    reader = small.reopened()
    assert small.log.prune(small.log.prunable_segments(Lsn(130)), keep_files=lambda: True) == 0
    assert reader.summary(Window(Lsn(100), Lsn(160))).transactions == 6
    assert small.log.delete_removed() == 0
    assert len(small.data_files()) == 4
    assert small.log.delete_removed(older_than_hours=0) == 2
    assert small.verify().segments == 2


def test_files_left_by_a_killed_prune_are_deleted_by_a_later_one(
    small: SmallLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "prune.after_commit=error")
    with pytest.raises(FailpointReached):
        small.log.prune(small.log.prunable_segments(Lsn(130)))
    monkeypatch.delenv(VARIABLE)
    assert (small.reopened().start_lsn, len(small.data_files())) == (Lsn(125), 4)
    small.verify()
    assert small.reopened().delete_removed(older_than_hours=0) == 2
    small.verify()


def test_a_capture_and_a_prune_do_not_conflict(small: SmallLog) -> None:
    """Each has opened the log before the other committed."""
    pruner, capture = small.reopened(), small.reopened()
    pruner.prune(pruner.prunable_segments(Lsn(120)))
    capture.commit(capture.write([transaction(170)]), Lsn(170))
    pruner = small.reopened()
    capture.commit(capture.write([transaction(180)]), Lsn(180))
    pruner.prune(pruner.prunable_segments(Lsn(130)))
    verified = small.verify()
    assert (verified.from_lsn, verified.to_lsn, verified.segments) == (Lsn(125), Lsn(180), 4)


def test_the_second_of_two_prunes_is_refused(small: SmallLog) -> None:
    first, second = small.reopened(), small.reopened()
    first.prune(first.prunable_segments(Lsn(120)))
    with pytest.raises(ChangeLogConflict, match="another writer"):
        second.prune(second.prunable_segments(Lsn(130)))
    assert small.verify().segments == 3


def test_the_start_survives_the_clean_up_of_old_commits(small: SmallLog) -> None:
    small.log.prune(small.log.prunable_segments(Lsn(130)))
    small.pulls(CHECKPOINT_EVERY)
    (checkpoint,) = Path(small.uri, "changes", "_delta_log").glob("*.checkpoint.parquet")
    for version in range(int(checkpoint.name.partition(".")[0])):
        small.commit_file(version).unlink()
    assert small.reopened().start_lsn == Lsn(125)
    assert small.verify().from_lsn == Lsn(125)


@pytest.mark.parametrize("path", ["../../precious.txt", "{folder}/precious.txt", ".."])
def test_a_file_outside_of_the_log_is_never_deleted(tmp_path: Path, small: SmallLog, path: str) -> None:
    """Whoever can write the log's files could name one in a commit."""
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    commits = tmp_path / "log" / "changes" / "_delta_log"
    last = max(commits.glob("*.json"))
    (added,) = (json.loads(line)["add"] for line in last.read_text().splitlines() if '"add"' in line)
    forged = {"add": {**added, "path": path.format(folder=tmp_path), "size": 8}}
    (commits / f"{int(last.stem) + 1:020}.json").write_text(f'{{"commitInfo":{{}}}}\n{json.dumps(forged)}\n')
    log = ChangeLog.open(small.log.uri)
    with pytest.raises(ChangeLogDamaged, match="outside of its folder"):
        log.prune(log.prunable_segments(Lsn(999)))
    assert precious.read_text() == "precious"
