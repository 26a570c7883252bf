"""Twins for commands that are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from embedded.postgres import Cluster
from fixtures.postgres import Database
from integration.commands.twin import Twin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def twin(
    spark: SparkSession, publisher: Database, subscriber_cluster: Cluster, tmp_path: Path
) -> Iterator[Twin]:
    """Commands that run to their end do so in this process, on its Spark session."""
    assert spark.version
    found = Twin(publisher, subscriber_cluster, tmp_path)
    yield found
    found.drop()
