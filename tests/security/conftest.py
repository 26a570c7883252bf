"""A publisher and a subscriber, and a stranger: a role that may log in to the publisher, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from embedded.postgres import Cluster
from fixtures.postgres import Database
from integration.commands.twin import Twin
from security.stranger import Stranger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def twin(
    spark: SparkSession, publisher: Database, subscriber_cluster: Cluster, tmp_path: Path
) -> Iterator[Twin]:
    assert spark.version
    made = Twin(publisher, subscriber_cluster, tmp_path)
    yield made
    made.drop()


@pytest.fixture
def stranger(publisher: Database) -> Iterator[Stranger]:
    made = Stranger(publisher, f"stranger_of_{publisher.name}")
    made.enter()
    yield made
    made.leave()
