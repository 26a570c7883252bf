"""A subscriber whose disk is full, really: its database is in a tablespace on a small file system.

What is refused for want of room leaves nothing half done, says so, and goes on when there is room again.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdc_replay.commands.capture import capture
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.replay import replay
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.validate import validate
from cdc_replay.errors import Retry, SubscriberNotWritable
from cdc_replay.model.relation import QualifiedName
from fixtures.postgres import Database
from fixtures.twin import Twin

pytestmark = [pytest.mark.spark, pytest.mark.slow]

DISK = "64m"
LEFT = 1024 * 1024
TABLE = "create table t (id int primary key, pad text)"
T = QualifiedName("public", "t")


class SmallDisk:
    """A file system of `DISK` that can be filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Leave next to nothing."""
        free = os.statvfs(self.folder)
        with self._ballast.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - LEFT))

    def make_room(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if os.geteuid() != 0:
        pytest.skip("a file system of its own can be mounted by root alone")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=True)
    yield SmallDisk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def subscribed(twin: Twin, disk: SmallDisk) -> Iterator[Twin]:
    """The whole subscriber, with our state and staging, is on the small disk."""
    twin.publisher.run(f"{TABLE}; create publication p for table t")
    twin.subscribe("s", "p", tables=TABLE)
    data = disk.folder / "data"
    data.mkdir(mode=0o700)
    ours = twin.pairs["s"].ours
    with Database(ours.cluster, "postgres").connect() as admin:
        space = f"small_{ours.name}"
        admin.execute(f"create tablespace {space} location '{data}'".encode())
        admin.execute(f"alter database {ours.name} set tablespace {space}".encode())
        twin.publish("insert into t select n, 'small' from generate_series(1, 100) n")
        twin.sync()
        yield twin
        admin.execute(f"alter database {ours.name} set tablespace pg_default".encode())
        admin.execute(f"drop tablespace {space}".encode())


def grow(twin: Twin) -> None:
    """By 8 MB that cannot be compressed."""
    twin.publish("update t set pad = (select string_agg(md5(n::text), '') from generate_series(1, 2500) n)")


def test_replay_onto_a_full_disk_applies_nothing_and_continues_when_there_is_room(
    subscribed: Twin, disk: SmallDisk
) -> None:
    twin, ours = subscribed, subscribed.pairs["s"].ours
    before = twin.rows("s", "t")
    grow(twin)
    capture(twin.config, "pub")
    disk.fill()

    (failed,) = replay(twin.config, ["s"])

    assert "No space left on device" in (failed.error or "")
    assert failed.retry is Retry.LATER
    assert ours.rows("select * from t as t order by t::text") == before

    disk.make_room()
    twin.sync()
    assert len(twin.rows("s", "t")) == 100


COMMANDS: dict[str, Callable[[Twin], object]] = {
    "snapshot": lambda twin: snapshot(twin.config, "s", tables=[T]),
    "reconcile": lambda twin: refresh(twin.config, "s", reconcile=True),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_copy_onto_a_full_disk_leaves_the_old_rows_and_is_done_again(
    subscribed: Twin, disk: SmallDisk, command: str
) -> None:
    twin, ours = subscribed, subscribed.pairs["s"].ours
    before = twin.rows("s", "t")
    grow(twin)
    disk.fill()

    with pytest.raises(SubscriberNotWritable, match="No space left on device") as full:
        COMMANDS[command](twin)

    assert "Free space" in str(full.value.hint)
    assert ours.rows("select * from t as t order by t::text") == before

    disk.make_room()
    COMMANDS[command](twin)
    twin.sync()
    assert len(twin.rows("s", "t")) == 100
    assert validate(twin.config, "s").success
