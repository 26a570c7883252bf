"""The program on a terminal of 80 columns: no chatter, a sentence per result, one error, a question."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Final

import pytest

from cdc_replay.model.publication import PublishAction
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS
from embedded.java import spark_environment
from fixtures.command_line import CommandLine
from fixtures.postgres import Database

TABLES: Final = "create table t (id int primary key, a text)"
CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(
    cli: CommandLine, *arguments: str, answer: str = "", question: bytes = b"[y/N]"
) -> tuple[int, str]:
    """Exit code and all that is shown, without control sequences that only draw."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environment = spark_environment() | os.environ | {"TERM": "xterm", "CDC_REPLAY_CONFIG": str(cli.file)}
    shown = b""
    with subprocess.Popen(
        [sys.executable, "-m", "cdc_replay.cli", *arguments],
        env={name: value for name, value in environment.items() if name not in {"COLUMNS", "LINES"}},
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
    ) as running:  # fmt: skip
        os.close(slave)
        with contextlib.suppress(OSError):  # the end of a terminal
            while content := os.read(master, 1 << 16):
                shown += content
                if answer and question in shown:
                    os.write(master, answer.encode())
                    answer = ""
    os.close(master)
    return running.returncode, CONTROL.sub("", shown.decode()).replace("\r\n", "\n")


def last_lines(screen: str) -> list[str]:
    """What stays: a live display is overwritten."""
    return [line.rpartition("\r")[2].rstrip() for line in screen.splitlines()]


@pytest.fixture
def cli(tmp_path: Path, publisher: Database, subscriber: Database) -> CommandLine:
    publisher.run(f"{TABLES}; create publication p for table t; insert into t values (1, 'one')")
    subscriber.run(TABLES)
    command_line = CommandLine(tmp_path, publisher, subscriber, environment={})
    command_line.write("p")
    command_line.succeeds("setup", "pub")
    return command_line


@pytest.mark.spark
def test_a_refused_row_is_told_once_with_its_key_and_the_way_out(cli: CommandLine) -> None:
    code, screen = on_terminal(cli, "sync", "s")
    assert code == 0, screen
    for chatter in ("WARN", "log4j", "NativeCodeLoader", "log level", "INFO", "Skipping registering"):
        assert chatter not in screen
    assert "sync s" in screen  # the live display
    assert any(line.startswith("synced s up to") for line in last_lines(screen)), screen

    cli.subscriber.run("alter table t add check (a <> 'two')")
    cli.publisher.run("insert into t values (2, 'two'), (3, 'three')")
    cli.succeeds("capture", "pub")
    code, screen = on_terminal(cli, "replay", "s")
    said = " ".join(screen.split())
    assert code == 1
    assert said.count("violates check constraint") == said.count("HINT:") == 1
    assert "The row has (id)=(2)." in said
    assert "Everything before the transaction is applied" in said
    assert "Nothing of the window" not in said
    assert max(map(len, screen[screen.index("cdc-replay: ") :].splitlines())) <= 80

    code, screen = on_terminal(cli, "resume", "s")
    assert code == 0
    assert "s is no longer parked\n" in screen
    assert "run `cdc-replay replay s`" in screen


def test_teardown_says_what_goes_and_asks(cli: CommandLine) -> None:
    slots = "select slot_name::text from pg_replication_slots where database = current_database()"
    code, screen = on_terminal(cli, "teardown", "pub", answer="n\n")
    assert "cdc-replay: nothing was done" in screen
    assert code == 1
    assert f'drops replication slot "{cli.slot}"' in " ".join(screen.split())
    assert cli.publisher.rows(slots) == [(cli.slot,)]
    code, screen = on_terminal(cli, "teardown", "pub", answer="y\n")
    assert code == 0, screen
    assert "removed from publisher pub" in screen
    assert cli.publisher.rows(slots) == []


HOSTILE: Final = "x\x1b]0;title\x07\x9b2J"
"""Sets the title of a terminal, and clears one that knows 8-bit control characters."""


@pytest.mark.parametrize(
    "arguments", [("setup", "pub", "--dry-run"), ("setup", "pub", "--dry-run", "--json"), ("explain", "s")]
)
def test_a_name_does_not_steer_the_terminal(cli: CommandLine, arguments: tuple[str, ...]) -> None:
    cli.publisher.run(
        f'create table "{HOSTILE}" (id int primary key); alter publication p add table "{HOSTILE}";'
        f" drop publication {CAPTURE_PUBLICATIONS[PublishAction.INSERT]}"
    )

    code, screen = on_terminal(cli, *arguments)

    assert code == 0, screen
    assert "]0;title" in screen
    assert not {"\x1b", "\x07", "\x9b"} & set(screen)


def test_a_publication_does_not_steer_the_terminal_of_init(cli: CommandLine, tmp_path: Path) -> None:
    """Whoever may create objects in the database can create a publication."""
    cli.publisher.run(f'create publication "{HOSTILE}"')
    sides = (f"--publisher-dsn={cli.publisher.dsn}", f"--subscriber-dsn={cli.subscriber.dsn}")

    code, screen = on_terminal(
        cli, "init", f"--config={tmp_path / 'new.yaml'}", *sides, answer="p\n", question=b"Publications"
    )

    assert code == 0, screen
    assert "]0;title" in screen
    assert not {"\x1b", "\x07", "\x9b"} & set(screen)
