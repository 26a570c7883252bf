"""The `cdc-replay` program as a person or a scheduler runs it.

cli = CommandLine(tmp_path, publisher, subscriber)
cli.write("p1", "p2")
cli.fails(1, "replay", "s", says=["…"])
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from embedded.java import spark_environment
from fixtures.postgres import Database

PROGRAM = Path(sys.executable).with_name("cdc-replay")
NO_JAVA = {"JAVA_HOME": "/nonexistent"}
"""With this, a command that starts Spark fails, and says so."""


@dataclass
class CommandLine:
    """A configuration file with publisher `pub` and subscription `s`, and the program run on it."""

    folder: Path
    publisher: Database
    subscriber: Database
    environment: dict[str, str] = field(default_factory=lambda: dict(NO_JAVA))

    @property
    def file(self) -> Path:
        return self.folder / "cdc_replay.yaml"

    @property
    def slot(self) -> str:
        return f"cli_{self.publisher.name}"

    @property
    def change_log(self) -> Path:
        return self.folder / "change_log"

    def write(
        self, *publications: str, of_publisher: dict[str, Any] | None = None, **of_subscription: Any
    ) -> None:
        """A valid configuration, but for what is given."""
        publisher = {"dsn": self.publisher.dsn, "slot": self.slot, "change_log": "./change_log"}
        subscription = {"publisher": "pub", "publications": list(publications), "dsn": self.subscriber.dsn}
        content = {
            "publishers": {"pub": publisher | (of_publisher or {})},
            "subscriptions": {"s": subscription | of_subscription},
        }
        self.file.write_text(yaml.safe_dump(content), encoding="utf-8")

    def run(self, *arguments: str, lines: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PROGRAM, *arguments],
            env=spark_environment() | os.environ | {"CDC_REPLAY_CONFIG": str(self.file)} | self.environment,
            input="\n".join(lines),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def succeeds(self, *arguments: str) -> dict[str, Any]:
        """Run with --json; the one object on standard output."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return one_object(done.stdout)

    def fails(self, code: int, *arguments: str, says: Sequence[str]) -> str:
        """Run with --json; the reason is on standard error and in the object, without a traceback."""
        done = self.run(*arguments, "--json")
        assert done.returncode == code, done.stderr
        reason = str(one_object(done.stdout)["error"])
        assert "Traceback" not in done.stderr
        for words in says:
            assert words in done.stderr, done.stderr
            assert words in reason, reason
        assert "secret" not in done.stderr
        return reason


def one_object(text: str) -> dict[str, Any]:
    (line,) = text.splitlines()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found
