"""Which pyspark the workers are forked with."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from cdc_replay.spark.worker_daemon import prefer_installed


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """An installed package that ships an archive of itself."""
    package = tmp_path / "installed" / "packed"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    with zipfile.ZipFile(package / "lib" / "packed.zip", "w") as archive:
        archive.writestr("packed/__init__.py", "")
    return package


def test_archive_of_the_installed_package_is_removed_from_the_path(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, installed = str(packed / "lib" / "packed.zip"), str(packed.parent)
    monkeypatch.setattr(sys, "path", [archive, installed])
    monkeypatch.setattr(sys, "path_importer_cache", {archive: None})

    prefer_installed("packed")

    assert sys.path == [installed]
    assert sys.path_importer_cache.get(archive, "nothing") == "nothing"


def test_archive_of_another_origin_stays_on_the_path(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster, whose nodes have a Spark of their own."""
    other = str((packed / "lib" / "packed.zip").rename(tmp_path / "packed.zip"))
    monkeypatch.setattr(sys, "path", [other, str(packed.parent)])

    prefer_installed("packed")

    assert sys.path == [other, str(packed.parent)]


def test_archive_without_installed_package_stays_on_the_path(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = str(packed / "lib" / "packed.zip")
    monkeypatch.setattr(sys, "path", [archive])

    prefer_installed("packed")

    assert sys.path == [archive]
