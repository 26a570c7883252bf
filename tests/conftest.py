"""Fixtures live in `tests/fixtures`, one concern per file."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

pytest_plugins = [
    "fixtures.alarm_sinks",
    "fixtures.postgres",
    "fixtures.spark",
    "fixtures.browser",
    "fixtures.airflow",
    "fixtures.twin",
    "fixtures.capture",
]


def pytest_configure(config: pytest.Config) -> None:
    """Temporary files of all that tests start go where they are removed: what is killed leaves them."""
    if hasattr(config, "workerinput"):
        return
    folder = tempfile.mkdtemp(prefix="cdc_tests_")
    Path(folder).chmod(0o711)  # tests run as root act as another user, who has to come through
    config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    os.environ["TMPDIR"] = os.environ["SPARK_LOCAL_DIRS"] = os.environ["XDG_STATE_HOME"] = folder
    os.environ["JDK_JAVA_OPTIONS"] = f"-Djava.io.tmpdir={folder}"


@pytest.fixture(autouse=True)
def _default_log_level() -> None:
    """A command line that another test has run in this process has set its own."""
    logging.getLogger("cdc_replay").setLevel(logging.NOTSET)
