"""The documented example: our Expectations in a project of a user, with two real databases.

The suite is defined by one process and run by others, which load it from its JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cdc_replay.changelog.log import ChangeLog
from cdc_replay.commands.capture import capture
from cdc_replay.commands.setup import setup
from cdc_replay.config import load_config
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import state_schema, subscription_records, subscription_tables
from embedded.java import spark_environment
from fixtures.airflow import ROOT
from fixtures.postgres import Database

PAGE = (ROOT / "docs" / "how-to" / "own-suite.md").read_text(encoding="utf-8")
SCRIPTS: Mapping[str, str] = {
    name: f'"""{name}"""{code}'
    for name, code in re.findall(r'```python\n"""(\w+\.py)"""(.*?)```', PAGE, re.DOTALL)
}
CONFIGURATION, _ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
(PRINTED,) = re.findall(r"```\n(expect_row_count.*?)```", PAGE, re.DOTALL)
ROWS = (
    "create table orders (id int primary key, region text, note text);"
    " insert into orders select i, case i % 2 when 0 then 'NSW' else 'VIC' end, 'note' || i"
    " from generate_series(1, 1000) i;"
)
SECRET = "s3cret"


@dataclass(frozen=True)
class Project:
    """A folder with a fresh Data Context and the documented scripts."""

    folder: Path
    subscriber: Database
    environment: Mapping[str, str]

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, script],
            cwd=self.folder,
            env={**os.environ, **spark_environment(), **self.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


@pytest.fixture
def project(
    publisher: Database, subscriber: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Project:
    """Both sides are equal; the suite is defined, by a process of its own."""
    publisher.run(f"{ROWS} create publication p for table orders where (region = 'NSW')")
    publisher.run("alter table orders replica identity full")
    subscriber.run(f"{ROWS} delete from orders where region <> 'NSW'")
    slot = f"slot: own_{publisher.name}, change_log"
    text = CONFIGURATION.replace("change_log", slot, 1)
    (tmp_path / "cdc_replay.yaml").write_text(text, encoding="utf-8")
    dsn = publisher.dsn.replace("postgres@", f"postgres:{SECRET}@")
    target = subscriber.dsn.replace("postgres@", f"postgres:{SECRET}@")
    assert SECRET in dsn
    monkeypatch.setenv("SHOP_DSN", dsn)
    config = load_config(tmp_path / "cdc_replay.yaml")
    setup(config, "shop")
    position = capture(config, "shop").to_lsn
    with connect(subscriber.dsn, purpose="test") as connection:
        header = ChangeLog.open(str(tmp_path / "change_log")).header
        state_schema.install(connection)
        subscription_records.bind_subscription(
            connection, "nsw", header.system_identifier, ["p"], header.database
        )
        table = QualifiedName("public", "orders")
        subscription_tables.set_table_state(connection, "nsw", table, Ready(position))
    for name, script in SCRIPTS.items():
        (tmp_path / name).write_text(script, encoding="utf-8")
    made = Project(tmp_path, subscriber, {"SHOP_DSN": dsn})
    defined = made.run("define_suite.py")
    assert defined.returncode == 0, defined.stderr
    variables = tmp_path / "gx" / "uncommitted" / "config_variables.yml"
    variables.write_text(json.dumps({"nsw_target": target}), encoding="utf-8")
    return made


def test_equal_sides_hold_then_a_difference_fails_then_an_error_is_one(project: Project) -> None:
    equal = project.run("run_suite.py")
    assert equal.returncode == 0, equal.stderr + equal.stdout
    assert equal.stdout.count("holds") == 4

    project.subscriber.run("delete from orders where id = 10")
    differing = project.run("run_suite.py")
    assert (differing.returncode, differing.stdout) == (1, PRINTED), differing.stderr

    project.subscriber.run("alter table orders drop column note")
    broken = project.run("run_suite.py")
    assert broken.returncode == 1
    assert broken.stdout.count("error: the table on the subscriber lacks the published column") == 4
    assert "fails" not in broken.stdout

    results = list((project.folder / "gx" / "uncommitted" / "validations").rglob("*.json"))
    assert len(results) == 3
    assert "missing: id=10" in "".join(file.read_text(encoding="utf-8") for file in results)
    (suite,) = (project.folder / "gx" / "expectations").glob("*.json")
    assert {entry["type"] for entry in json.loads(suite.read_text())["expectations"]} == {
        "expect_row_count_to_equal_publisher",
        "expect_content_to_equal_publisher",
        "expect_keys_to_be_unique",
        "expect_rows_to_satisfy_row_filter",
    }
    for file in (project.folder / "gx").rglob("*"):
        if file.is_file() and file.name != "config_variables.yml":
            content = file.read_bytes()
            for secret in (SECRET, project.subscriber.name):
                assert secret.encode() not in content, file
