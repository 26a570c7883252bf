"""Power is lost at every step of a capture from a real server, whose slot keeps its confirmed position."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.capture.setup import SetupRequest, setup_publisher
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.model.lsn import Lsn
from fixtures.captured import Captured
from fixtures.postgres import Database
from integration.changelog.power_loss import Disk, Moment, put_down, survivors

WORK = [
    "insert into t values (1, 'a'), (2, 'b')",
    "update t set v = repeat('x', 3000) where id = 1",
    "create table later (id int primary key); drop table later",
    "insert into u values (1)",
    "truncate u",
    "alter table t add w int",
    "insert into t values (3, 'c', 7); delete from t where id = 2",
]
"""Each is one transaction; capture reads two messages at a time."""


@pytest.fixture
def captured(publisher: Database, tmp_path: Path) -> Captured:
    publisher.run(
        "create table t (id int primary key, v text); create table u (id int primary key);"
        " create publication p for table t, u"
    )
    (tmp_path / "disk").mkdir()
    slot, change_log = f"slot_{publisher.name}", str(tmp_path / "disk" / "log")
    request = SetupRequest("test", publisher.dsn, slot, change_log, ("p",))
    setup_publisher(request)
    return Captured(
        publisher, CaptureSource("test", publisher.dsn, slot, change_log, max_changes_per_pull=2), request
    )


def copy_slot(publisher: Database, source: str, name: str, position: Lsn | None = None) -> None:
    """Recreate a slot as a copy that was advanced to `position`."""
    with publisher.connect() as connection:
        connection.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s",
            (name,),
        )
        connection.execute("select pg_copy_logical_replication_slot(%s, %s)", (source, name))
        if position is not None:
            connection.execute("select pg_replication_slot_advance(%s, %s)", (name, str(position)))


def states(disk: Disk, folder: Path, stride: int) -> Iterator[tuple[Moment, Path]]:
    root, seen = disk.root.stat().st_ino, set()
    for seed, moment in enumerate(disk.moments):
        for tree in survivors(moment, root, seed=seed):
            key = hash((frozenset(tree.items()), moment.noted))
            if key not in seen:
                seen.add(key)
                if len(seen) % stride == 0:
                    folder.mkdir()
                    put_down(tree, folder)
                    yield moment, folder
                    shutil.rmtree(folder)


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_a_capture_that_lost_power_at_any_step_is_completed_by_the_next(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    """The log reaches at least the slot's position, and has the same rows in the end."""
    monkeypatch.setattr("cdc_replay.changelog.delta.table.CHECKPOINT_EVERY", 3)
    monkeypatch.setattr("cdc_replay.changelog.delta.checkpoints.KEPT_COMMITS", 3)
    publisher, slot = captured.database, captured.source.slot
    copy_slot(publisher, slot, f"first_{slot}")
    for statement in WORK:
        publisher.run(statement)
    disk = Disk(tmp_path / "disk", lambda: captured.position)
    with disk.recording():
        target = captured.capture().to_lsn
    rows, shapes = captured.rows(), captured.log.relations()
    assert len(rows) == 7

    tried = 0
    for moment, folder in states(disk, tmp_path / "state", stride):
        copy_slot(publisher, f"first_{slot}", slot, moment.noted)
        change_log = str(folder / "log")
        survivor_log = ChangeLog.open(change_log)
        assert survivor_log.end_lsn >= moment.noted
        source = dataclasses.replace(captured.source, change_log=change_log)
        survivor = dataclasses.replace(captured, source=source)
        assert survivor.rows() == [row for row in rows if row["commit_lsn"] <= survivor_log.end_lsn.value]
        survivor.capture(target)
        assert (survivor.rows(), survivor.log.end_lsn) == (rows, target)
        assert survivor.log.relations() == shapes
        tried += 1
    assert tried > 80 / stride
