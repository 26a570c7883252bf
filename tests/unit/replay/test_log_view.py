"""A change log that several readers share."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.errors import ChangeLogMissing
from cdc_replay.model.lsn import Lsn
from cdc_replay.replay.log_view import LogView
from unit.changelog.small_log import START, SmallLog, transaction


def test_a_view_stays_as_of_its_first_use(tmp_path: Path) -> None:
    small = SmallLog.create(tmp_path)
    small.pull(120, transaction(115))
    view = LogView(small.uri)
    assert view.end_lsn() == Lsn(120)
    small.pull(140, transaction(135))
    assert (view.end_lsn(), view.first_commit_after(Lsn(120))) == (Lsn(120), None)
    assert LogView(small.uri).end_lsn() == Lsn(140)


def test_threads_share_one_open_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SmallLog.create(tmp_path)
    small.pull(120, transaction(115))
    original, uris = ChangeLog.open, list[str]()

    def opened(uri: str) -> ChangeLog:
        uris.append(uri)
        return original(uri)

    monkeypatch.setattr(ChangeLog, "open", opened)
    view = LogView(small.uri)
    with ThreadPoolExecutor(8) as threads:
        commits = list(threads.map(lambda _: view.first_commit_after(Lsn(START)), range(20)))
    assert {commit and commit.commit_lsn for commit in commits} == {Lsn(115)}
    assert view.catalogs() is view.catalogs()
    assert uris == [small.uri]


def test_an_error_is_not_kept(tmp_path: Path) -> None:
    small = SmallLog.create(tmp_path / "now")
    shutil.move(tmp_path / "now", tmp_path / "gone")
    view = LogView(small.uri)
    with pytest.raises(ChangeLogMissing):
        view.end_lsn()
    shutil.move(tmp_path / "gone", tmp_path / "now")
    assert view.end_lsn() == Lsn(START)
