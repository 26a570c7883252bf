"""How the shim of the packaged Java changes a command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdc_replay.spark.connect_server import SERVER_CLASS
from cdc_replay.spark.java import TRAINING, shim_text

SUBMIT = ("-cp", "/conf/:/a.jar", "org.apache.spark.deploy.SparkSubmit", "a file.py", "")


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    """With a Java that prints its arguments, one per line."""
    java = tmp_path / "java"
    java.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    shim = tmp_path / "shim"
    shim.write_text(shim_text(java, tmp_path / "spark.aot"))
    for program in (java, shim):
        program.chmod(0o755)
    return shim


def called(shim: Path, *arguments: str, **environment: str) -> list[str]:
    process = subprocess.run(
        [str(shim), *arguments], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return process.stdout.split("\n")[:-1]


def test_only_the_missing_module_is_left_out(shim: Path) -> None:
    given = ("--add-modules=jdk.incubator.vector", "--add-opens=java.base/java.lang=ALL-UNNAMED", *SUBMIT)
    assert called(shim, *given) == list(given[1:])


def test_spark_starts_from_an_existing_cache(shim: Path, tmp_path: Path) -> None:
    cache = tmp_path / "spark.aot"
    assert called(shim, *SUBMIT) == list(SUBMIT)
    cache.touch()
    assert called(shim, *SUBMIT) == [f"-XX:AOTCache={cache}", "-Xlog:aot*=off", *SUBMIT]


def test_sparks_launcher_and_other_programs_do_not_use_the_cache(shim: Path, tmp_path: Path) -> None:
    (tmp_path / "spark.aot").touch()
    launcher = ("-cp", "/jars/*", "org.apache.spark.launcher.Main", "org.apache.spark.deploy.SparkSubmit")
    for given in (launcher, ("-version",)):
        assert called(shim, *given) == list(given)


@pytest.fixture
def class_path(tmp_path: Path) -> str:
    """As Spark's launcher gives it."""
    jars = tmp_path / "a folder" / "jars"
    jars.mkdir(parents=True)
    for name in ("arrow.jar", "spark-mllib_2.13-4.2.0.jar", "spark-mllib-local_2.13-4.2.0.jar", "readme.txt"):
        (jars / name).touch()
    return f"/conf/:/a.jar:{jars}/*"


@pytest.mark.parametrize("after", ["", ":/etc/hadoop/conf:/dist/jars/*"])
def test_mllib_is_left_out(shim: Path, class_path: str, after: str) -> None:
    """Also with `HADOOP_CONF_DIR` and `SPARK_DIST_CLASSPATH`, which come last.

    No entry of the path is empty, which would be the current folder.
    """
    main, _, jars = class_path.rpartition(":")
    given = ("-cp", class_path + after, "org.apache.spark.deploy.SparkSubmit", "--conf", "/jars/*")
    path = f"{main}:{jars[:-1]}arrow.jar:{jars[:-1]}spark-mllib-local_2.13-4.2.0.jar"
    assert called(shim, *given) == ["-cp", path + after, *given[2:]]


def test_server_has_mllib_last(shim: Path, class_path: str) -> None:
    server = ("org.apache.spark.deploy.SparkSubmit", "--class", SERVER_CLASS, "--port", "1")
    _, path, *arguments = called(shim, "-cp", class_path, *server)
    assert Path(path.split(":")[-1]).name == "spark-mllib_2.13-4.2.0.jar"
    assert arguments == list(server)


def test_training_run_writes_a_new_cache(shim: Path, tmp_path: Path) -> None:
    (tmp_path / "spark.aot").touch()
    fresh = str(tmp_path / "fresh")
    assert called(shim, *SUBMIT, **{TRAINING: fresh}) == [f"-XX:AOTCacheOutput={fresh}", *SUBMIT]


def test_variables_with_names_invalid_in_a_shell_are_passed_on(shim: Path, tmp_path: Path) -> None:
    """The connection `dwh-2` of Airflow is `AIRFLOW_CONN_DWH-2`."""
    java = tmp_path / "java"
    java.write_text(f"#!{sys.executable}\nimport os\nprint(os.environ.get('AIRFLOW_CONN_DWH-2'))\n")
    assert called(shim, "-version", **{"AIRFLOW_CONN_DWH-2": "told"}) == ["told"]
