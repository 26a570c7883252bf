"""The fixture of the validation tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.postgres import Database
from integration.validate.bench import Bench


@pytest.fixture
def bench(publisher: Database, subscriber: Database, tmp_path: Path) -> Bench:
    """Both databases, and a separate Data Context."""
    return Bench(publisher, subscriber, tmp_path / "expectations")
