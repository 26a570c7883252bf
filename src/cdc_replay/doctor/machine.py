"""The machine that runs the commands: Python, its packages, Java, Spark's folders."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from cdc_replay.doctor.folders import check_folder
from cdc_replay.model.check import Check, Verdict
from cdc_replay.spark.java import local_environment

SUBJECT: Final = "machine"
DISTRIBUTION: Final = "cdc-replay"
OLDEST_JAVA: Final = 17
"""The oldest release that Spark 4 supports."""

JAVA_SECONDS: Final = 30

_INSTALL_JAVA: Final = f"Install Java {OLDEST_JAVA} or later, and set JAVA_HOME. Copies and replays need it."


def check_machine() -> Iterator[Check]:
    """The checks that need no configuration."""
    yield _packages()
    yield _java()
    folders = os.environ.get("SPARK_LOCAL_DIRS") or tempfile.gettempdir()
    for folder in folders.split(","):
        yield check_folder(SUBJECT, "Spark's folder", Path(folder))


def _packages() -> Check:
    needed = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or ()]
    problems = [
        problem
        for requirement in needed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if (problem := _unmet(requirement)) is not None
    ]
    python = f"Python {platform.python_version()}"
    if problems:
        message = f"{python} lacks packages: {', '.join(problems)}"
        return Check(SUBJECT, Verdict.FAILED, message, f"Run `pip install {DISTRIBUTION}` again.")
    return Check(SUBJECT, Verdict.OK, f"{python} has all packages")


def _unmet(requirement: Requirement) -> str | None:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return str(requirement)
    is_met = requirement.specifier.contains(version, prereleases=True)
    return None if is_met else f"{requirement}, not {version}"


def _java() -> Check:
    program = "java"
    try:
        environment = os.environ | local_environment()
        if home := environment.get("JAVA_HOME"):
            program = str(Path(home) / "bin" / "java")
        done = subprocess.run(  # noqa: S603 - the program that Spark will run
            [program, "-version"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=JAVA_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(SUBJECT, Verdict.FAILED, f"Java cannot be started: {error}", _INSTALL_JAVA)
    match = re.search(r'version "([0-9]+)[^"]*"', done.stderr + done.stdout)
    if match is None:
        return Check(SUBJECT, Verdict.FAILED, f"{program} is no Java", _INSTALL_JAVA)
    if int(match[1]) < OLDEST_JAVA:
        return Check(SUBJECT, Verdict.FAILED, f"Java {match[1]} is too old for Spark", _INSTALL_JAVA)
    return Check(SUBJECT, Verdict.OK, f"Java {match[1]}: {program}")
