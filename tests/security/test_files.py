"""What is written on this machine can be read by nobody else, whatever the umask (`private_files`).

The change log holds all rows of the captured tables, reports hold keys and rows that differ. The attacker is
another user of the operating system, who can enter every folder above those that are ours. That user exists
where tests run as root; elsewhere the permissions speak.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
import yaml

from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.prepared_transactions import PreparedKey
from cdc_replay.changelog.segment import LOG_SCHEMA
from cdc_replay.failpoints import VARIABLE
from cdc_replay.model.lsn import Lsn
from embedded.java import spark_environment
from fixtures.native import wait_for
from fixtures.postgres import ANY_DATABASE, Database

NOBODY: Final = 65534
READ_ALL: Final = """
import pathlib, sys
for path in pathlib.Path(sys.argv[1]).rglob("*"):
    try:
        if path.is_file() and path.read_bytes():
            print(path)
    except PermissionError:
        pass
"""
SECRET: Final = "a-secret-of-the-publisher"


@pytest.fixture
def folder() -> Path:
    """A folder that everybody can enter, unlike pytest's own."""
    made = Path(tempfile.mkdtemp(prefix="files_"))
    made.chmod(0o755)
    return made


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def paths_below(folder: Path) -> list[Path]:
    """What is in a folder, however deep; unlike rglob, whatever a JVM that ends removes meanwhile."""
    return sorted(
        Path(parent, name) for parent, folders, files in os.walk(folder) for name in (*folders, *files)
    )


def open_to_others(folder: Path) -> list[str]:
    """What is in a folder, however deep, and has permissions for others."""
    opened = []
    for path in paths_below(folder):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & 0o077:
                opened.append(f"{path.relative_to(folder)} {stat.filemode(mode)}")
    return opened


def read_by_another_user(folder: Path) -> list[str]:
    """The files in a folder that a user without any rights can read; none where there is no such user."""
    if os.geteuid() != 0:
        return []
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-c", READ_ALL, str(folder)],
        user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    return done.stdout.splitlines()


def log_with_rows(folder: Path) -> ChangeLog:
    """Segments, a checkpoint, and a prepared transaction."""
    log = ChangeLog.create(str(folder / "log"), LogHeader("1", 1, "slot", Lsn(100), ANY_DATABASE))
    for end in range(101, 204):
        log.commit(log.write([rows(end)]), Lsn(end))
    assert list((folder / "log" / "changes" / "_delta_log").glob("*.checkpoint.parquet"))
    log.prepared.store(PreparedKey(7, Lsn(150)), [rows(150)])
    return log


def rows(commit_lsn: int) -> pa.RecordBatch:
    row = {"commit_lsn": commit_lsn, "commit_time": 1, "xid": 1, "origin": None, "seq": 0, "lsn": 90,
           "kind": "M", "relation_id": None, "relation_version": None,
           "message": SECRET.encode()}  # fmt: skip
    return pa.RecordBatch.from_pylist([row], schema=LOG_SCHEMA)


@pytest.mark.usefixtures("open_umask")
def test_change_log_is_written_for_its_user_only_whatever_the_umask(folder: Path) -> None:
    log_with_rows(folder)
    assert open_to_others(folder) == []
    assert read_by_another_user(folder) == []


@pytest.mark.usefixtures("open_umask")
def test_change_log_that_others_can_enter_is_closed_to_them_when_it_is_opened(folder: Path) -> None:
    log_with_rows(folder)
    log = folder / "log"
    for path in (log, *log.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    ChangeLog.open(str(log))
    assert read_by_another_user(folder) == []
    assert stat.S_IMODE(log.stat().st_mode) == 0o700


@pytest.mark.usefixtures("open_umask")
def test_change_log_in_a_folder_of_somebody_else_is_closed_below_it(folder: Path) -> None:
    """As on a volume whose root belongs to root, and that its group may write to."""
    (folder / "log").mkdir()
    if os.geteuid() == 0:
        os.chown(folder / "log", NOBODY, NOBODY)
    log_with_rows(folder)
    for name in ("changes", "relations", "catalogs", "prepared"):
        (folder / "log" / name).chmod(0o755)
    ChangeLog.open(str(folder / "log"))
    assert [line for line in open_to_others(folder / "log") if "/" not in line] == []
    assert read_by_another_user(folder) == []


@pytest.mark.spark
def test_whole_run_leaves_no_file_readable_by_others(
    folder: Path, publisher: Database, subscriber: Database
) -> None:
    """Setup, capture, snapshot, replay, validate, compared while Spark is at work, and afterwards."""
    table = "create table t (id int primary key, body text)"
    publisher.run(f"{table}; create publication p for table t; insert into t values (1, '{SECRET}')")
    subscriber.run(table)
    process = batch(folder, publisher, subscriber)
    with process:
        answers = [say(process, line) for line in ("setup pub", "snapshot s")]
        publisher.run(f"insert into t values (2, '{SECRET}')")
        answers.append(say(process, "capture pub"))
        begin(process, "replay s")
        wait_for(lambda: state(process.pid) == "T", "the replay to stop")
        session = open_to_others(folder), read_by_another_user(folder)
        os.kill(process.pid, signal.SIGCONT)
        answers += [answer(process), say(process, "validate s")]
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0
    assert session == ([], [])
    assert [answer.get("error") for answer in answers] == [None] * 5
    assert subscriber.rows("select count(*) from t") == [(2,)]
    assert any(path.name == "latest.html" for path in paths_below(folder))
    assert open_to_others(folder) == []
    assert read_by_another_user(folder) == []


def batch(folder: Path, publisher: Database, subscriber: Database) -> subprocess.Popen[str]:
    """`cdc-replay batch`, all of whose files go below the folder; stands still when rows are staged."""
    configuration = folder / "cdc_replay.yaml"
    source = {"dsn": publisher.dsn, "slot": f"s_{publisher.name}", "change_log": "./var/log"}
    content = {
        "publishers": {"pub": source},
        "subscriptions": {"s": {"publisher": "pub", "publications": ["p"], "dsn": subscriber.dsn}},
    }
    configuration.write_text(yaml.safe_dump(content), encoding="utf-8")
    configuration.chmod(0o600)
    folders = {name: str(folder) for name in ("TMPDIR", "SPARK_LOCAL_DIRS")}
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("cdc-replay")), "batch"],
        env=os.environ
        | spark_environment()
        | folders
        | {
            VARIABLE: "replay.after_staging=stop",
            "CDC_REPLAY_CONFIG": str(configuration),
            "JDK_JAVA_OPTIONS": f"-Djava.io.tmpdir={folder}",
        },
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, umask=0,
    )  # fmt: skip


def say(process: subprocess.Popen[str], line: str) -> dict[str, Any]:
    begin(process, line)
    return answer(process)


def begin(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
