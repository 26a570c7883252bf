"""Power is lost at every step of a log's life: nothing promised is lost, and captures continue."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import CdcReplayError, ChangeLogNotWritable, ChangeLogUnavailable
from integration.changelog.power_loss import Disk, Moment, after_kill, path_of, put_down, survivors
from integration.changelog.pulls import HEADER, PULLS, Publisher, expected_rows, read_log_rows

LAST = PULLS[-1].end


@pytest.fixture(autouse=True)
def frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six pulls write three checkpoints, and old commits are deleted."""
    monkeypatch.setattr("cdc_replay.changelog.delta.table.CHECKPOINT_EVERY", 2)
    monkeypatch.setattr("cdc_replay.changelog.delta.checkpoints.KEPT_COMMITS", 2)


@contextlib.contextmanager
def without_flushes() -> Iterator[None]:
    """Code in the block loses no power, so it need not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def from_the_beginning(publisher: Publisher, uri: str, upto: int = LAST) -> None:
    publisher.set_up(uri)
    publisher.capture(uri, upto)


def record(disk: Disk, publisher: Publisher, upto: int = LAST) -> Disk:
    """Pull into a log on that disk; its notes are what the publisher was promised."""
    with disk.recording():
        from_the_beginning(publisher, str(disk.root / "log"), upto)
    return disk


def new_disk(folder: Path, publisher: Publisher) -> Disk:
    folder.mkdir()
    return Disk(folder, publisher.copy)


def states(disk: Disk, folder: Path) -> Iterator[tuple[Moment, str]]:
    """Each state that a power loss may leave, once per promise, with the log's URI in it."""
    root, seen = disk.root.stat().st_ino, set()
    for seed, moment in enumerate(disk.moments):
        for tree in survivors(moment, root, seed=seed):
            key = (frozenset(tree.items()), moment.noted.position, moment.noted.promised)
            if key not in seen:
                seen.add(key)
                folder.mkdir()
                put_down(tree, folder)
                with without_flushes():
                    yield moment, str(folder / "log")
                shutil.rmtree(folder)


def check(uri: str, promised: Publisher) -> None:
    """The first reader sees a log with everything promised; then a capture continues."""
    if promised.promised or ChangeLog.exists(uri):
        check_readable(uri, promised)
    check_goes_on(uri, promised)


def check_readable(uri: str, promised: Publisher) -> None:
    """A reader, ours or another, sees the log as of the end of some pull that was not undone."""
    log = ChangeLog.open(uri)
    end = log.end_lsn.value
    assert end in {HEADER.start_lsn.value, *promised.ends}
    assert end >= promised.position
    assert read_log_rows(log) == expected_rows(end)
    rows = DeltaTable(f"{uri}/changes").to_pyarrow_table(columns=["commit_lsn", "seq", "message"])
    assert sorted(tuple(row.values()) for row in rows.to_pylist()) == expected_rows(end)


def check_goes_on(uri: str, publisher: Publisher) -> None:
    """The next capture ends with all rows, each once."""
    from_the_beginning(publisher, uri)
    log = ChangeLog.open(uri)
    assert (log.end_lsn.value, read_log_rows(log)) == (LAST, expected_rows(LAST))
    assert [version.text for version in log.catalogs()] == ["catalog before 110", "catalog before 140"]
    assert log.remove_dead_pulls() == 0


@pytest.mark.parametrize("upto", [120, pytest.param(LAST, marks=pytest.mark.slow)])
def test_nothing_is_lost_when_power_is_lost_at_any_step(tmp_path: Path, upto: int) -> None:
    """The creation of a log and six pulls, with a prepared transaction, new shapes and checkpoints."""
    publisher = Publisher()
    disk = record(new_disk(tmp_path / "disk", publisher), publisher, upto)
    states_seen = 0
    for moment, uri in states(disk, tmp_path / "state"):
        check(uri, moment.noted.copy())
        states_seen += 1
    assert states_seen > upto - HEADER.start_lsn.value


@pytest.mark.slow
def test_nothing_is_lost_when_power_is_lost_after_a_process_was_killed_at_any_step(tmp_path: Path) -> None:
    """The kill leaves visible names that are not durable; whatever depends on them must make them so."""
    publisher = Publisher()
    disk = record(new_disk(tmp_path / "disk", publisher), publisher, PULLS[0].end)
    root, seen = disk.root.stat().st_ino, 0
    for moment in disk.moments:
        folder = tmp_path / "killed"
        folder.mkdir()
        survivor = moment.noted.copy()
        second = record(after_kill(moment, root, folder, survivor.copy), survivor, PULLS[0].end)
        for later, uri in states(second, tmp_path / "state"):
            if later.noted.promised or ChangeLog.exists(uri):
                check_readable(uri, later.noted)
                seen += 1
        shutil.rmtree(folder)
    assert seen > len(disk.moments)


@pytest.mark.parametrize("flushed", ["content", "names"])
def test_the_model_detects_a_writer_that_flushes_only_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: str
) -> None:
    """Without flushes of names, or without flushes of content, some state breaks a promise."""
    publisher = Publisher()
    disk = new_disk(tmp_path / "disk", publisher)
    with disk.recording():
        fsync = os.fsync

        def half(descriptor: int) -> None:
            is_folder = Path(f"/proc/self/fd/{descriptor}").is_dir()
            if is_folder == (flushed == "names"):
                fsync(descriptor)

        monkeypatch.setattr(os, "fsync", half)
        from_the_beginning(publisher, str(disk.root / "log"), PULLS[0].end)
        monkeypatch.setattr(os, "fsync", fsync)
    disk.moments.reverse()
    assert any(is_broken(uri, moment.noted.copy()) for moment, uri in states(disk, tmp_path / "state"))


def is_broken(uri: str, promised: Publisher) -> bool:
    try:
        check(uri, promised)
    except (AssertionError, CdcReplayError):
        return True
    return False


@contextlib.contextmanager
def failing(step: int, folder: Path) -> Iterator[list[str]]:
    """The step of that number, of those below the folder, fails; the block gets its name."""
    reached: list[str] = []
    calls = itertools.count()

    def failing_at_its_turn(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def called(file_or_path: int | str | Path, *more: object) -> object:
            if folder in path_of(file_or_path).parents and next(calls) == step:
                reached.append(name)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file_or_path))
            return call(file_or_path, *more)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "link", "replace", "mkdir"):
            patch.setattr(os, name, failing_at_its_turn(name, getattr(os, name)))
        yield reached


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_disk_failure_is_reported_and_leaves_the_log_unchanged(tmp_path: Path, stride: int) -> None:
    """Each step in turn fails because the disk is full; later there is space again."""
    errors: list[ChangeLogNotWritable | ChangeLogUnavailable] = []
    for step in itertools.count(step=stride):
        folder, publisher = tmp_path / str(step), Publisher()
        folder.mkdir()
        uri = str(folder / "log")
        with failing(step, folder) as reached:
            try:
                from_the_beginning(publisher, uri, 120)
            except (ChangeLogNotWritable, ChangeLogUnavailable) as error:
                errors.append(error)
        if not reached:
            break
        with without_flushes():
            check(uri, publisher.copy())
    assert len(errors) > 50 / stride
    assert all(
        str(tmp_path) in error.message and os.strerror(errno.ENOSPC) in str(error.detail) for error in errors
    )
