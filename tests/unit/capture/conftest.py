"""What the tests of assembled transactions share."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_replay.changelog.prepared_transactions import PreparedTransactions
from cdc_replay.changelog.storage import Location


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedTransactions:
    return PreparedTransactions(Location.parse(str(tmp_path)))
