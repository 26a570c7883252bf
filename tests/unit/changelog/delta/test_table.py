"""One table of the log: compatible commits all succeed, others are refused, and the log stays short."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from cdc_replay.changelog.delta.actions import AppTransaction
from cdc_replay.changelog.delta.commits import LogFolder
from cdc_replay.changelog.delta.table import DurableTable
from cdc_replay.changelog.segment import Segment
from cdc_replay.changelog.storage import PARTIAL, Location
from cdc_replay.errors import ChangeLogConflict, ChangeLogMissing
from cdc_replay.model.lsn import Lsn, Window

SCHEMA = pa.schema([("commit_lsn", pa.int64())])


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path / "table"))


@pytest.fixture
def table(location: Location) -> DurableTable:
    return DurableTable.create(
        location, SCHEMA, configuration={"a": "1"}, position=AppTransaction("slot", 100)
    )


def segment(table: DurableTable, name: str, first: int, last: int) -> Segment:
    path = Path(table.location.path, name)
    pq.write_table(pa.table({"commit_lsn": [first, last]}, schema=SCHEMA), path)
    return Segment(name, path.stat().st_size, 2, first, last)


def names(table: DurableTable) -> list[str]:
    return [one.name for one in DurableTable.open(table.location).segments()]


def test_files_by_window_and_by_number_of_rows(table: DurableTable) -> None:
    table.commit([segment(table, "b", 120, 130), segment(table, "a", 105, 110)], AppTransaction("slot", 130))
    assert [one.name for one in table.segments(Window(Lsn(110), Lsn(120)))] == ["b"]
    assert [one.name for one in table.segments(Window(Lsn(109), Lsn(119)))] == ["a"]
    assert table.segments(Window(Lsn(110), Lsn(119))) == ()
    assert [table.split_points(rows) for rows in (1, 2, 3, 4, 5)] == [
        [110, 130],
        [110, 130],
        [130],
        [130],
        [],
    ]


def test_reading_the_files_loads_no_pandas(table: DurableTable) -> None:
    """It takes a third of a second, of every command that reads the log."""
    table.commit([segment(table, "a", 105, 110)], AppTransaction("slot", 110))
    program = """
import sys
from cdc_replay.changelog.delta.table import DurableTable
from cdc_replay.changelog.storage import Location
from cdc_replay.model.lsn import Lsn, Window
table = DurableTable.open(Location.parse(sys.argv[1]))
print(len(table.segments(Window(Lsn(100), Lsn(110)))), table.split_points(1), "pandas" in sys.modules)
"""
    command = [sys.executable, "-c", program, table.location.path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "[110]", "False"]


def test_concurrent_commits_about_different_things_both_succeed(table: DurableTable) -> None:
    """In either order; each writer sees both."""
    other = DurableTable.open(table.location)
    other.replace((), [segment(table, "b", 120, 130)], AppTransaction("slot/start", 100))
    table.commit([segment(table, "a", 105, 110)], AppTransaction("slot", 110))
    other.configure({"b": "2"})
    assert names(table) == ["a", "b"]
    assert (table.version, other.version) == (2, 3)
    memory = {"delta.deletedFileRetentionDuration": "interval 24 hours"}
    assert DurableTable.open(table.location).configuration == {"a": "1", "b": "2"} | memory


def test_a_second_writer_of_one_position_is_refused_even_for_the_same_position(table: DurableTable) -> None:
    other = DurableTable.open(table.location)
    table.commit([segment(table, "a", 105, 110)], AppTransaction("slot", 110))
    for value in (110, 120):
        with pytest.raises(ChangeLogConflict, match="another writer") as refused:
            other.commit([segment(table, "b", 105, 110)], AppTransaction("slot", value))
        assert "position of slot" in str(refused.value.detail)
    assert names(table) == ["a"]


def test_a_file_is_removed_from_a_table_only_once(table: DurableTable) -> None:
    segment_a, two = segment(table, "a", 105, 110), segment(table, "b", 105, 110)
    table.commit([segment_a])
    other = DurableTable.open(table.location)
    table.replace([segment_a], [two], AppTransaction("first", 1))
    with pytest.raises(ChangeLogConflict, match="another writer") as refused:
        other.replace([segment_a], [], AppTransaction("second", 1))
    assert "files a" in str(refused.value.detail)
    assert names(table) == ["b"]
    assert DurableTable.open(table.location).removed_files(older_than_hours=0) == ("a",)


def test_properties_are_set_by_one_writer_at_a_time(table: DurableTable) -> None:
    other = DurableTable.open(table.location)
    table.configure({"a": "2"})
    with pytest.raises(ChangeLogConflict, match="another writer"):
        other.configure({"a": "3"})


def test_a_missing_file_is_not_committed(table: DurableTable) -> None:
    segment_a = segment(table, "a", 105, 110)
    Path(table.location.path, "a").unlink()
    with pytest.raises(ChangeLogConflict, match="missing before their commit"):
        table.commit([segment_a], AppTransaction("slot", 110))
    assert DurableTable.open(table.location).position("slot") == 100


def test_a_recreated_table_refuses_commits_of_its_predecessor(table: DurableTable) -> None:
    for value in (110, 120):
        table.commit([], AppTransaction("slot", value))
    shutil.rmtree(table.location.path)
    DurableTable.create(table.location, SCHEMA, position=AppTransaction("slot", 500))
    with pytest.raises(ChangeLogConflict, match="not the one that was opened"):
        table.commit([], AppTransaction("slot", 130))
    assert DurableTable.open(table.location).position("slot") == 500


def test_an_interrupted_creation_is_no_table_and_can_be_repeated(location: Location) -> None:
    folder = Path(location.path, "_delta_log")
    folder.mkdir(parents=True)
    (folder / f"{PARTIAL}1.json").write_bytes(b'{"proto')
    assert not DurableTable.exists(location)
    with pytest.raises(ChangeLogMissing):
        DurableTable.open(location)
    DurableTable.create(location, SCHEMA)
    assert DurableTable.exists(location)
    with pytest.raises(ChangeLogConflict, match="already exists"):
        DurableTable.create(location, SCHEMA)


def test_readers_ignore_partial_files(table: DurableTable) -> None:
    table.commit([segment(table, "a.parquet", 105, 110)])
    for name in (
        f"{PARTIAL}b.parquet",
        f"_delta_log/{PARTIAL}1.json",
        f"_delta_log/{PARTIAL}_last_checkpoint",
    ):
        Path(table.location.path, name).write_bytes(b"PAR1")
    assert DeltaTable(table.location.uri).to_pyarrow_table().num_rows == 2
    assert pq.read_table(table.location.path).num_rows == 2
    assert names(table) == ["a.parquet"]
    assert table.unnamed_files() == (f"{PARTIAL}b.parquet",)


def test_segments_are_those_of_a_window_in_order(table: DurableTable) -> None:
    for name, first, last in (("c", 120, 130), ("a", 105, 110), ("b", 110, 120)):
        table.commit([segment(table, name, first, last)])
    assert names(table) == ["a", "b", "c"]
    assert [one.name for one in table.segments(Window(Lsn(110), Lsn(119)))] == ["b"]
    assert table.segments(Window(Lsn(130), Lsn(200))) == ()


def test_numbers_of_read_and_kept_commits_are_bounded(
    table: DurableTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a checkpoint every 5 commits and 12 kept ones."""
    monkeypatch.setattr("cdc_replay.changelog.delta.table.CHECKPOINT_EVERY", 5)
    monkeypatch.setattr("cdc_replay.changelog.delta.checkpoints.KEPT_COMMITS", 12)
    for value in range(101, 161):
        # Each commit by a process of its own.
        writer = DurableTable.open(table.location)
        writer.commit([], AppTransaction("slot", value))
        folder = LogFolder.read(table.location)
        assert writer.version - max(folder.checkpoints, default=0) < 5
        assert len(folder.commits) <= 12 + 2 * 5
        assert not set(range(folder.commits[0], writer.version + 1)) - set(folder.commits)
        assert DeltaTable(table.location.uri).transaction_version("slot") == value
    folder = LogFolder.read(table.location)
    assert (folder.checkpoints, folder.commits[0]) == ((45, 50, 55, 60), 45)


@pytest.mark.parametrize(("hours", "remembered"), [(23, ("a",)), (25, ())])
def test_checkpoints_forget_files_that_were_removed_a_day_ago(
    table: DurableTable, monkeypatch: pytest.MonkeyPatch, hours: int, remembered: tuple[str, ...]
) -> None:
    """Also those of a table that was created without that property."""
    monkeypatch.setattr("cdc_replay.changelog.delta.table.CHECKPOINT_EVERY", 4)
    with monkeypatch.context() as before:
        before.setattr("cdc_replay.changelog.delta.table._PROPERTIES", {})
        earlier = DurableTable.create(Location.parse(f"{table.location.path}_earlier"), SCHEMA)
    then = time.time_ns() - hours * 3600 * 10**9
    for one in (table, earlier):
        removed = segment(one, "a", 105, 110)
        one.commit([removed])
        with monkeypatch.context() as past:
            past.setattr("cdc_replay.changelog.delta.actions.time.time_ns", lambda: then)
            one.replace([removed], [segment(one, "b", 105, 110)], AppTransaction("start", 1))
        one.forget_old_removed_files()
        for value in (101, 102):
            one.commit([], AppTransaction("slot", value))
        assert LogFolder.read(one.location).checkpoints == (4,)
        assert DurableTable.open(one.location).removed_files(older_than_hours=0) == remembered
        assert names(one) == ["b"]


def test_a_failed_checkpoint_is_written_by_a_later_commit(
    table: DurableTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit itself succeeds."""
    monkeypatch.setattr("cdc_replay.changelog.delta.table.CHECKPOINT_EVERY", 3)
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr("tempfile.tempdir", "/nowhere")
        for value in (101, 102, 103):
            table.commit([], AppTransaction("slot", value))
    assert "cannot write a checkpoint" in caplog.text
    assert LogFolder.read(table.location).checkpoints == ()
    table.commit([], AppTransaction("slot", 104))
    assert LogFolder.read(table.location).checkpoints == (4,)


@pytest.mark.parametrize(
    "damage", [b"", b'{"version":1e999}', b'{"version":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
)
def test_a_damaged_pointer_to_the_last_checkpoint_is_replaced(
    table: DurableTable, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setattr("cdc_replay.changelog.delta.table.CHECKPOINT_EVERY", 3)
    for value in (101, 102, 103):
        table.commit([], AppTransaction("slot", value))
    pointer = Path(table.location.path, "_delta_log", "_last_checkpoint")
    pointer.write_bytes(damage)
    DurableTable.open(table.location).commit([], AppTransaction("slot", 104))
    assert b'"version":4' in pointer.read_bytes()
