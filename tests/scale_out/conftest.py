"""A Spark cluster for the tests of this folder, and twins whose replay runs on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from embedded.postgres import Cluster
from fixtures.postgres import Database
from fixtures.twin import Twin
from scale_out.cluster import SparkCluster


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """A master and two workers."""
    with SparkCluster(tmp_path_factory.mktemp("spark_cluster"), workers=2) as cluster:
        yield cluster


@pytest.fixture
def twin(publisher: Database, subscriber_cluster: Cluster, tmp_path: Path) -> Iterator[Twin]:
    """The change log is in a folder that all processes of the machine share."""
    found = Twin(publisher, subscriber_cluster, tmp_path)
    yield found
    found.drop()
