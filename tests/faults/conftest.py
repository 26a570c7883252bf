"""Twins for commands that are killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from fixtures.twin import Twin
from integration.changelog.conftest import s3_endpoint, s3_uri

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["on_storage", "s3_endpoint", "s3_uri"]


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.slow)])
def on_storage(twin: Twin, spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[Twin]:
    """A twin whose change log is on a disk, and one whose log is in an object store."""
    environment = spark.sparkContext.environment
    before = dict(environment)
    if request.param == "s3":
        twin.options["change_log"] = request.getfixturevalue("s3_uri")
        # The workers of a JVM that was there before the store.
        environment.update({name: value for name, value in os.environ.items() if name.startswith("AWS_")})
    yield twin
    environment.clear()
    environment.update(before)
