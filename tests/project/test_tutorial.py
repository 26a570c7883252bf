"""The tutorial's statements and commands work in their order, on two servers as it expects them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from embedded.java import spark_environment
from embedded.postgres import Cluster, binaries
from fixtures.airflow import ROOT
from fixtures.postgres import Database

pytestmark = pytest.mark.slow

TEXT: Final = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8").partition("\n## Remove it\n")[0]
STEP: Final = re.compile(
    r"^```(sql|yaml)\n(.*?)^```|^ {4}((?:cdc-replay|psql) [^\n]*)$", re.MULTILINE | re.DOTALL
)
ON: Final = re.compile(r"^(.*;) +-- on the (publisher|subscriber)$", re.MULTILINE)


@pytest.fixture
def databases(tmp_path: Path) -> Iterator[dict[str, Database]]:
    with Cluster(tmp_path, "publisher") as publisher, Cluster(tmp_path, "subscriber") as subscriber:
        Database(publisher, "postgres").run("create database shop")
        Database(subscriber, "postgres").run("create database warehouse")
        yield {"publisher": Database(publisher, "shop"), "subscriber": Database(subscriber, "warehouse")}


def place_of(position: int) -> str:
    """Where a block of SQL runs: on the side that the text before it names last."""
    return str(re.findall(r"On the (publisher|subscriber)", TEXT[:position])[-1])


@dataclass(frozen=True)
class Reader:
    """Somebody who does what the tutorial says, in a folder."""

    databases: dict[str, Database]
    folder: Path

    def write(self, configuration: str) -> None:
        (self.folder / "cdc_replay.yaml").write_text(self._locate(configuration), encoding="utf-8")

    def execute(self, block: str, side: str) -> None:
        """A block of SQL; a line may say that it is for one side."""
        if lines := ON.findall(block):
            for statement, other_side in lines:
                self.databases[other_side].run(statement)
        else:
            self.databases[side].run(block)

    def run(self, command: str) -> None:
        path = f"{Path(sys.executable).parent}:{binaries()}:{os.environ['PATH']}"
        process = subprocess.run(
            ["/bin/sh", "-c", self._locate(command)],
            env=spark_environment() | os.environ | {"PATH": path},
            cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert process.returncode == 0, f"{command}: {process.stderr}"

    def _locate(self, text: str) -> str:
        """The text with the servers' addresses in place of the tutorial's hosts."""
        for host, side in (("shop-db", "publisher"), ("warehouse-db", "subscriber")):
            text = text.replace(f"@{host}/", f"@127.0.0.1:{self.databases[side].cluster.port}/")
        return text


def test_everything_works_in_order(databases: dict[str, Database], tmp_path: Path) -> None:
    reader = Reader(databases, tmp_path)
    orders: list[object] = []
    for match in STEP.finditer(TEXT):
        language, block, command = match.groups()
        if language == "yaml":
            reader.write(block)
        elif language == "sql":
            reader.execute(block, place_of(match.start()))
        else:
            reader.run(command)
            if command.startswith("cdc-replay sync"):
                orders.append(databases["subscriber"].rows("select id from orders order by id"))
    assert orders == [[(1,)], [(2,)]]
