"""Expectations judge the comparison frame; a table that is not in it is an error."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from cdc_replay.validate.expectations import (
    SUMMARY,
    ComparisonExpectation,
    ExpectContentToEqualPublisher,
    ExpectKeysToBeUnique,
    ExpectRowCountToEqualPublisher,
    ExpectRowsToSatisfyRowFilter,
    TableNotCompared,
    table_comparison,
)
from cdc_replay.validate.suites import COLUMNS

CHECKOUT = Path(__file__).resolve().parents[3]
EQUAL = {"publisher_rows": 3, "publisher_digest": "1:2", "subscriber_rows": 3, "subscriber_digest": "1:2"}


def frame(*buckets: dict[str, object], error: str | None = None, **summary: int) -> pd.DataFrame:
    counts = {"missing": 0, "unexpected": 0, "outside": 0, "different": 0, "duplicates": 0} | summary
    rows: list[dict[str, object]] = [
        {"relation": "public.t", "bucket": SUMMARY, "keys": json.dumps({}), "error": error, **counts},
        *(
            {"relation": "public.t", "bucket": number, "outside_filter": 0} | EQUAL | bucket
            for number, bucket in enumerate(buckets)
        ),
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)


@pytest.mark.parametrize(
    ("expectation", "comparison", "holds"),
    [
        (ExpectRowCountToEqualPublisher, frame(EQUAL, EQUAL), True),
        (ExpectRowCountToEqualPublisher, frame(), True),
        (ExpectRowCountToEqualPublisher, frame({"subscriber_rows": 2}), False),
        (ExpectContentToEqualPublisher, frame(EQUAL), True),
        (ExpectContentToEqualPublisher, frame(), True),
        # A surplus in one bucket must not make up for a lack in another.
        (ExpectContentToEqualPublisher, frame({"subscriber_rows": 2}, {"subscriber_rows": 4}), False),
        (ExpectContentToEqualPublisher, frame({"subscriber_digest": "1:3"}), False),
        (ExpectKeysToBeUnique, frame(EQUAL), True),
        (ExpectKeysToBeUnique, frame(EQUAL, duplicates=1), False),
        (ExpectRowsToSatisfyRowFilter, frame(EQUAL), True),
        (ExpectRowsToSatisfyRowFilter, frame(EQUAL, {"outside_filter": 1}), False),
    ],
)
def test_expectation_holds_exactly_if_its_part_of_the_frame_is_equal(
    expectation: type[ComparisonExpectation], comparison: pd.DataFrame, holds: bool
) -> None:
    assert expectation.judge(table_comparison(comparison, "public.t")).success is holds


def test_table_that_was_not_compared_is_an_error() -> None:
    with pytest.raises(TableNotCompared, match="division by zero"):
        table_comparison(frame(error="division by zero"), "public.t")
    with pytest.raises(TableNotCompared, match=r"public\.other is not in the comparison"):
        table_comparison(frame(EQUAL), "public.other")


def test_committed_data_context_equals_the_installed_one() -> None:
    committed = CHECKOUT / "expectations" / "gx" / "great_expectations.yml"
    installed = importlib.resources.files("cdc_replay.validate") / "great_expectations.yml"
    assert committed.read_bytes() == installed.read_bytes()


def test_fence_and_comparison_do_not_load_great_expectations() -> None:
    program = "import sys, cdc_replay.compare.comparison; sys.exit('great_expectations' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0  # our own


def test_great_expectations_is_loaded_without_telemetry_and_without_a_word() -> None:
    """A task's log has the root logger at INFO."""
    program = (
        "import logging; logging.basicConfig(level=logging.INFO);"
        " import os, cdc_replay.validate.gx; print(os.environ['GX_ANALYTICS_ENABLED'])"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, check=True, capture_output=True, text=True)  # our own
    assert process.stdout.strip() == "false"
    assert "great_expectations" not in process.stderr
