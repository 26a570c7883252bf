"""What is logged of a JVM that has ended: the cause is told once, by us."""

from __future__ import annotations

import logging

import pytest

from cdc_replay.spark.session import is_not_of_py4j


@pytest.mark.parametrize(
    ("path", "is_kept"),
    [
        ("/venv/lib/python3.11/site-packages/py4j/java_gateway.py", False),
        ("/venv/lib/python3.11/site-packages/pyspark/java_gateway.py", True),
        ("/opt/py4jfan/app.py", True),
    ],
)
def test_records_of_py4j_do_not_reach_the_terminal(path: str, is_kept: bool) -> None:
    record = logging.LogRecord(
        "root", logging.ERROR, path, 1059, "Exception while sending command.", None, None
    )
    assert is_not_of_py4j(record) is is_kept
