"""The wheel, in an environment with the locked distributions of `requirements-spark.lock` and nothing else.

The distributions are linked from this environment, which has installed them by hash. Only an older
Airflow comes from the index.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest
import yaml

import licences_page
from embedded.java import spark_environment
from fixtures.airflow import ROOT
from fixtures.postgres import Database

PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    wheels = tmp_path_factory.mktemp("wheels")
    process = subprocess.run(
        [*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, sources],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    (file,) = wheels.iterdir()
    return file


def without_python() -> dict[str, str]:
    """The environment variables but for those that lead a Python elsewhere."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip."""

    folder: Path

    @property
    def site_packages(self) -> Path:
        (folder,) = self.folder.glob("lib/python*/site-packages")
        return folder

    def run(self, program: str, *arguments: str, **variables: str) -> str:
        workers = {"PYSPARK_PYTHON": str(self.folder / "bin" / "python")}
        process = subprocess.run(
            [self.folder / "bin" / program, *arguments],
            env=spark_environment() | without_python() | workers | variables,
            cwd=self.folder, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        return process.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return linked(wheel, tmp_path_factory.mktemp("environment"), "requirements-spark.lock")


def linked(wheel: Path, folder: Path, lock: str) -> Environment:
    """An environment with the distributions of a lock and the wheel."""
    environment = Environment(folder)
    venv.create(folder)
    for requirement in licences_page.read_lock(ROOT / lock):
        if requirement.marker is None or requirement.marker.evaluate():
            link(requirement.name, environment.site_packages)
    install(environment, "--no-deps", "--no-index", str(wheel))
    return environment


def install(environment: Environment, *arguments: str) -> None:
    command = [*PIP, "--python", str(environment.folder), "install", "--quiet", *arguments]
    subprocess.run(command, env=without_python(), check=True)


def link(name: str, site_packages: Path) -> None:
    """Link the files and folders that a distribution has in this environment."""
    distribution = metadata.distribution(name)
    parts = {file.parts[0] for file in distribution.files or () if file.parts[0] not in {"..", "__pycache__"}}
    for part in parts:
        target = site_packages / part
        if not target.exists():
            target.symlink_to(str(distribution.locate_file(part)))


def test_contents(wheel: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert wheel.name == f"cdc_replay-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    data = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*") if path.is_file()}
    data = {name for name in data if "__pycache__" not in name and ".egg-info" not in name}
    assert {name for name in names if ".dist-info/" not in name} == data
    assert "cdc_replay/py.typed" in names


def test_changelog_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", changelog, re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert version in [name for name, _ in headings]
    assert all(date for name, date in headings[1:]), "a release has a date"
    kinds = set(re.findall(r"^### (.*)$", changelog, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_everything_needed_is_there_and_nothing_else(installed: Environment) -> None:
    check = (*PIP, "--python", str(installed.folder), "check")
    process = subprocess.run(check, env=without_python(), capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    present = installed.run(
        "python",
        "-c",
        "import importlib.util as u; print([m for m in ('airflow', 'pytest') if u.find_spec(m)])",
    )
    assert present == "[]\n"


def test_airflow_finds_the_provider(installed: Environment) -> None:
    program = """
import importlib.metadata
for entry in importlib.metadata.entry_points(group="apache_airflow_provider"):
    print(entry.value, entry.load()()["package-name"])
"""
    assert (
        installed.run("python", "-c", program) == "cdc_replay.airflow.provider:get_provider_info cdc-replay\n"
    )


def test_every_module_but_airflows_can_be_imported(installed: Environment) -> None:
    """Without a message: warnings are errors."""
    program = """
import importlib, pkgutil, cdc_replay
for module in pkgutil.walk_packages(cdc_replay.__path__, "cdc_replay."):
    if not module.name.startswith("cdc_replay.airflow") and "__main__" not in module.name:
        importlib.import_module(module.name)
        print(module.name)
"""
    assert "cdc_replay.commands.sync" in installed.run("python", "-W", "error", "-c", program).splitlines()


@pytest.mark.slow
@pytest.mark.spark
def test_one_database_is_replicated_into_another(
    installed: Environment, publisher: Database, subscriber: Database
) -> None:
    publisher.run(
        "create table t (id int primary key); create publication p for table t; insert into t values (1)"
    )
    subscriber.run("create table t (id int primary key)")
    content = {
        "publishers": {"pub": {"dsn": publisher.dsn, "change_log": "log", "slot": publisher.name}},
        "subscriptions": {
            "s": {"publisher": "pub", "publications": ["p"], "dsn": subscriber.dsn, "run_as_owner": True}
        },
    }
    file = installed.folder / "cdc_replay.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    installed.run("cdc-replay", "setup", "pub")
    checks = json.loads(installed.run("cdc-replay", "doctor", "--json"))
    result = json.loads(installed.run("cdc-replay", "sync", "s", "--json"))
    assert checks["error"] is None
    assert result["replay"]["error"] is None
    assert subscriber.rows("select * from t") == [(1,)]


HOME_CONFIGURATION = """
publishers:
  shop: {conn_id: shop_publisher, change_log: ./log}
subscriptions:
  nsw: {publisher: shop, publications: [nsw], conn_id: dwh}
"""


OF_ITS_TIME: Final = "fastapi<0.137"
"""Airflow 3.2 does not start with later ones; its constraints, and the metadata of 3.3, exclude them."""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.2.2", metadata.version("apache-airflow")])
def test_home_of_airflow_gets_the_provider_and_the_dags(wheel: Path, tmp_path: Path, version: str) -> None:
    if version == metadata.version("apache-airflow"):
        environment = linked(wheel, tmp_path / "environment", "requirements.lock")
    else:
        environment = Environment(tmp_path / "environment")
        venv.create(environment.folder)
        install(environment, f"{wheel}[airflow]", f"apache-airflow=={version}", OF_ITS_TIME)
    home = tmp_path / "home"
    for folder in ("dags", "plugins"):
        shutil.copytree(ROOT / folder, home / folder)
    (home / "cdc_replay.yaml").write_text(HOME_CONFIGURATION, encoding="utf-8")

    def airflow(*command: str) -> str:
        return environment.run(
            "python",
            *("-m", "airflow", *command),
            AIRFLOW_HOME=str(home),
            AIRFLOW__CORE__DAGS_FOLDER=str(home / "dags"),
            AIRFLOW__CORE__PLUGINS_FOLDER=str(home / "plugins"),
            AIRFLOW__CORE__LOAD_EXAMPLES="False",
            CDC_REPLAY_CONFIG=str(home / "cdc_replay.yaml"),
        )

    def rows(key: str, *command: str) -> set[str]:
        return {row[key] for row in json.loads(airflow(*command, "--output=json").splitlines()[-1])}

    assert airflow("version").endswith(f"{version}\n")
    airflow("db", "migrate")
    airflow("dag-processor", "--num-runs=1")
    assert "cdc-replay" in rows("package_name", "providers", "list")
    kinds = rows("connection_type", "providers", "hooks")
    assert {"cdc_replay_publisher", "cdc_replay_subscriber"} <= kinds
    assert "cdc_replay" in rows("name", "plugins")
    verbs = ("validate", "snapshot", "refresh", "backfill", "resume")
    assert rows("dag_id", "dags", "list") == {
        "capture__shop", "watch__shop", "replay__shop", *(f"{verb}__nsw" for verb in verbs),
    }  # fmt: skip
