"""For root, a throw-away server may have to run as `nobody`, who is not trusted with root's files."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_replay.errors import ThrowawayServerFailed
from cdc_replay.postgres import throwaway_server
from embedded.postgres import Cluster, binaries
from fixtures.postgres import Database


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t_", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_the_password_is_not_written_into_a_file_of_others(
    folder: Path, publisher_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment in which `nobody` gets the folder and that in which root writes into it."""
    major = Database(publisher_cluster, "postgres").version
    victim = folder / "passwd"
    victim.write_text("root:x:0:0", encoding="ascii")

    def plant(_size: int) -> str:
        (home,) = folder.glob(f"{throwaway_server.PREFIX}*/server")
        (home / "password").symlink_to(victim)
        return "s3cret"

    monkeypatch.setattr(secrets, "token_hex", plant)
    with (
        pytest.raises(ThrowawayServerFailed, match="create"),
        throwaway_server.throwaway_server(major, bin_folder=binaries()),
    ):
        pass

    assert victim.read_text(encoding="ascii") == "root:x:0:0"
