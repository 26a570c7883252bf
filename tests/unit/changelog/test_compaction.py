"""Compaction changes the number of files of the log, not its content."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdc_replay.changelog.compaction import CompactionLimits, CompactionResult, plan_merges
from cdc_replay.changelog.metadata_tables import CatalogRow
from cdc_replay.changelog.segment import Segment
from cdc_replay.changelog.storage import Location
from cdc_replay.errors import ChangeLogConflict, ChangeLogDamaged, ChangeLogNotWritable
from cdc_replay.failpoints import VARIABLE, FailpointReached
from cdc_replay.model.lsn import Lsn, Window
from unit.changelog.small_log import TABLE, SmallLog, transaction

ALWAYS = CompactionLimits(worthwhile=2)


@pytest.fixture
def small(tmp_path: Path) -> SmallLog:
    small = SmallLog.create(tmp_path)
    small.pulls(6)
    return small


def test_compaction_keeps_rows_order_and_end(small: SmallLog) -> None:
    small.pull(175)
    rows, before = small.rows(), small.verify()
    result = small.log.compact(ALWAYS)
    assert (result.removed, result.added) == (6, 1)
    log = small.reopened()
    assert (log.start_lsn, log.end_lsn) == (Lsn(100), Lsn(175))
    assert small.rows() == rows
    assert small.verify() == dataclasses.replace(before, segments=1)
    assert small.rows(Window(Lsn(120), Lsn(140))) == [row for row in rows if 120 < row["commit_lsn"] <= 140]


def test_a_log_of_many_small_pulls_stays_small(tmp_path: Path) -> None:
    """With `worthwhile` of ten, there are at most ten small segments besides merged ones."""
    small = SmallLog.create(tmp_path)
    for _ in range(6):
        small.pulls(10)
        small.log.compact(CompactionLimits(worthwhile=10))
        assert len(small.reopened().segments(Window(Lsn(100), Lsn(10**6)))) == 1
    assert small.verify().transactions == 60


segments = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3)), max_size=30)
limits = st.builds(
    CompactionLimits,
    small_bytes=st.integers(1, 20),
    merged_bytes=st.integers(10, 60),
    merged_segments=st.integers(2, 6),
    worthwhile=st.integers(0, 5),
    run_bytes=st.integers(1, 100),
    run_segments=st.integers(1, 12),
)


@given(sizes=segments, limits=limits)
def test_only_small_neighbours_are_merged_within_the_limits(
    sizes: list[tuple[int, int]], limits: CompactionLimits
) -> None:
    given = [
        Segment(f"{value}", size, rows, value, value) for value, (size, rows) in enumerate(sizes, start=1)
    ]
    merges = plan_merges(given, limits)
    for merge in merges:
        first = given.index(merge[0])
        assert list(merge) == given[first : first + len(merge)]
        assert 2 <= len(merge) <= limits.merged_segments
        assert all(segment.size_bytes < limits.small_bytes for segment in merge)
        assert sum(segment.size_bytes for segment in merge) <= limits.merged_bytes
    merged = [segment for merge in merges for segment in merge]
    assert len(merged) == len(set(merged))
    total = sum(segment.size_bytes for merge in merges[:-1] for segment in merge)
    assert not merges or total < limits.run_bytes
    assert not merges or sum(map(len, merges[:-1])) < limits.run_segments


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_compaction_keeps_the_rows_with_any_limits(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    small = SmallLog.create(tmp_path_factory.mktemp("log"))
    for messages in data.draw(st.lists(st.integers(0, 40), max_size=8)):
        end = small.log.end_lsn.value + 10
        small.pull(end, *([transaction(end, messages)] if messages else []))
    sizes = sorted(file.stat().st_size for file in small.data_files()) or [1]
    rows = small.rows()
    small.log.compact(
        CompactionLimits(
            small_bytes=data.draw(st.sampled_from(sizes)) + 1,
            merged_bytes=data.draw(st.integers(sizes[0], 3 * sizes[-1])),
            worthwhile=data.draw(st.integers(0, 4)),
        )
    )
    assert small.rows() == rows
    small.verify()


def test_few_small_segments_are_not_merged(small: SmallLog) -> None:
    assert small.log.compact(CompactionLimits(worthwhile=7)) == CompactionResult()
    assert small.log.compact() == CompactionResult()


def test_a_merged_segment_has_row_groups_of_the_ordinary_size(
    small: SmallLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_replay.changelog.segment.ROW_GROUP_ROWS", 5)
    small.log.compact(ALWAYS)
    groups = small.reopened().segments(Window(Lsn(100), Lsn(200)))
    assert [group.rows for group in groups] == [4, 4, 4]


def test_a_reader_that_opened_the_log_before_a_compaction_finds_its_files(small: SmallLog) -> None:
    """For a day; then a later compaction deletes them."""
    reader = small.reopened()
    small.log.compact(ALWAYS)
    assert reader.summary(Window(Lsn(100), Lsn(200))).messages == 12
    small.pulls(6)
    small.log.compact(ALWAYS)
    assert reader.summary(Window(Lsn(100), Lsn(200))).messages == 12
    # 6 segments, then 6 more and the merged one
    assert small.log.delete_removed(older_than_hours=0) == 13
    assert len(small.data_files()) == 1
    small.verify()


@pytest.mark.parametrize(("point", "segments_left"), [("after_segment", 6), ("after_commit", 1)])
def test_a_killed_compaction_leaves_the_log_unchanged_or_merged(
    small: SmallLog, monkeypatch: pytest.MonkeyPatch, point: str, segments_left: int
) -> None:
    rows = small.rows()
    monkeypatch.setenv(VARIABLE, f"compaction.{point}=error")
    with pytest.raises(FailpointReached):
        small.log.compact(ALWAYS)
    monkeypatch.delenv(VARIABLE)
    assert small.verify().segments == segments_left
    assert small.rows() == rows
    small.pulls(2)
    small.reopened().compact(ALWAYS)
    assert small.verify().segments == 1
    assert small.rows()[: len(rows)] == rows


def test_a_merged_segment_stays_if_its_commit_cannot_be_read_back(
    small: SmallLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = small.rows()

    def fail(_table: DeltaTable) -> None:
        raise OSError("too many open files")

    with monkeypatch.context() as failing:
        failing.setattr(DeltaTable, "update_incremental", fail)
        with pytest.raises(ChangeLogNotWritable, match="cannot be written"):
            small.reopened().compact(ALWAYS)
    assert small.rows() == rows
    assert small.verify().segments == 1


def test_a_merged_segment_is_deleted_if_its_commit_cannot_be_written(
    small: SmallLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, files = small.rows(), small.data_files()

    def fail(_file: Location, _content: bytes) -> bool:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as failing:
        failing.setattr("cdc_replay.changelog.delta.table.put_if_absent", fail)
        with pytest.raises(ChangeLogNotWritable, match="cannot be written"):
            small.reopened().compact(ALWAYS)
    assert (small.rows(), small.data_files()) == (rows, files)


def test_a_capture_and_a_compaction_do_not_conflict(small: SmallLog) -> None:
    """Each has opened the log before the other committed; a second capture is still refused."""
    compaction, capture, other = (small.reopened() for _ in range(3))
    compaction.compact(ALWAYS)
    capture.commit(capture.write([transaction(170)]), Lsn(170))
    with pytest.raises(ChangeLogConflict):
        other.commit(other.write([transaction(165)]), Lsn(165))
    compaction = small.reopened()
    capture.commit(capture.write([transaction(180)]), Lsn(180))
    compaction.compact(ALWAYS)
    verified = small.verify()
    assert (verified.to_lsn, verified.transactions, verified.segments) == (Lsn(180), 8, 2)


def test_the_second_of_two_compactions_is_refused_and_leaves_no_file(small: SmallLog) -> None:
    """Otherwise the log would contain the rows twice."""
    first, second = small.reopened(), small.reopened()
    rows = small.rows()
    first.compact(ALWAYS)
    files = small.data_files()
    with pytest.raises(ChangeLogConflict):
        second.compact(ALWAYS)
    assert small.data_files() == files
    assert small.rows() == rows


def test_the_second_of_a_prune_and_a_compaction_is_refused(small: SmallLog) -> None:
    """Otherwise pruned rows would reappear, or rows after the start would be missing."""
    pruner, compaction = small.reopened(), small.reopened()
    pruner.prune(pruner.prunable_segments(Lsn(130)), keep_files=lambda: True)
    with pytest.raises(ChangeLogConflict):
        compaction.compact(ALWAYS)
    pruner, compaction = small.reopened(), small.reopened()
    compaction.compact(ALWAYS)
    with pytest.raises(ChangeLogConflict):
        pruner.prune(pruner.prunable_segments(Lsn(140)))
    log = small.reopened()
    assert (log.start_lsn, log.summary(Window(Lsn(130), Lsn(160))).transactions) == (Lsn(130), 3)
    small.verify()


def test_files_pruned_during_a_compaction_are_a_conflict_not_damage(small: SmallLog) -> None:
    pruner, compaction = small.reopened(), small.reopened()
    pruner.prune(pruner.prunable_segments(Lsn(130)))
    with pytest.raises(ChangeLogConflict, match="do not exist any more"):
        compaction.compact(ALWAYS)
    assert small.verify().from_lsn == Lsn(130)


def test_a_pruned_log_keeps_its_start(small: SmallLog) -> None:
    small.log.prune(small.log.prunable_segments(Lsn(130)))
    small.reopened().compact(ALWAYS)
    verified = small.verify()
    assert (verified.from_lsn, verified.segments) == (Lsn(130), 1)


def test_an_unreadable_segment_is_not_merged(small: SmallLog) -> None:
    file = small.data_files()[2]
    content = bytearray(file.read_bytes())
    content[60] ^= 1
    file.write_bytes(content)
    files = small.data_files()
    with pytest.raises(ChangeLogDamaged, match=file.name):
        small.log.compact(ALWAYS)
    assert small.data_files() == files
    content[60] ^= 1
    file.write_bytes(content)
    assert small.verify().segments == 6


def test_metadata_tables_of_many_files_become_one_file(small: SmallLog) -> None:
    relations, catalogs = small.log.relations(), small.log.catalogs()
    for index in range(1, 60):
        small.log.add_catalogs([CatalogRow(Lsn(100 + index), Lsn(100 + index), f'{{"n": {index}}}')])
        if index % 10 == 0:
            # The catalog of a pull that died, read again.
            small.log.add_catalogs([CatalogRow(Lsn(100 + index), Lsn(101 + index), "{}")])
        small.log.add_relations({index: dataclasses.replace(TABLE, version=index)})
    relations, catalogs = small.log.relations(), small.log.catalogs()
    assert len(relations) == len(catalogs) == 60
    reader = small.reopened()
    small.log.compact(ALWAYS)
    for log in (small.reopened(), reader):
        assert (log.relations(), log.catalogs()) == (relations, catalogs)
    small.log.delete_removed(older_than_hours=0)
    for table in ("relations", "catalogs"):
        assert len(list(Path(small.uri, table).glob("*.parquet"))) == 1
    assert (small.log.relations(), small.log.catalogs()) == (relations, catalogs)
    small.verify()
