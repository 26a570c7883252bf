"""What the shim of the packaged Java makes of a command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdc_replay.spark.java import TRAINING, program

SUBMIT = ("-cp", "/jars/*", "org.apache.spark.deploy.SparkSubmit", "a file.py", "")


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    """With a Java that says what it was called with, one argument a line."""
    java = tmp_path / "java"
    java.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    shim = tmp_path / "shim"
    shim.write_text(program(java, tmp_path / "spark.aot"))
    for each in (java, shim):
        each.chmod(0o755)
    return shim


def called(shim: Path, *arguments: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [str(shim), *arguments], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\n")[:-1]


def test_the_module_that_the_package_lacks_is_left_out_and_nothing_else(shim: Path) -> None:
    given = ("--add-modules=jdk.incubator.vector", "--add-opens=java.base/java.lang=ALL-UNNAMED", *SUBMIT)
    assert called(shim, *given) == list(given[1:])


def test_spark_starts_from_the_cache_if_there_is_one(shim: Path, tmp_path: Path) -> None:
    cache = tmp_path / "spark.aot"
    assert called(shim, *SUBMIT) == list(SUBMIT)
    cache.touch()
    assert called(shim, *SUBMIT) == [f"-XX:AOTCache={cache}", "-Xlog:aot*=off", *SUBMIT]


def test_sparks_launcher_and_other_programs_do_not(shim: Path, tmp_path: Path) -> None:
    (tmp_path / "spark.aot").touch()
    launcher = ("-cp", "/jars/*", "org.apache.spark.launcher.Main", "org.apache.spark.deploy.SparkSubmit")
    for given in (launcher, ("-version",)):
        assert called(shim, *given) == list(given)


def test_a_training_run_writes_a_new_cache(shim: Path, tmp_path: Path) -> None:
    (tmp_path / "spark.aot").touch()
    fresh = str(tmp_path / "fresh")
    assert called(shim, *SUBMIT, **{TRAINING: fresh}) == [f"-XX:AOTCacheOutput={fresh}", *SUBMIT]


def test_variables_that_no_shell_can_name_come_through(shim: Path, tmp_path: Path) -> None:
    """The connection `dwh-2` of Airflow is `AIRFLOW_CONN_DWH-2`."""
    java = tmp_path / "java"
    java.write_text(f"#!{sys.executable}\nimport os\nprint(os.environ.get('AIRFLOW_CONN_DWH-2'))\n")
    assert called(shim, "-version", **{"AIRFLOW_CONN_DWH-2": "told"}) == ["told"]
