"""A publisher and a subscriber, and a stranger: a role that may log in to the publisher, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fixtures.postgres import Database
from security.stranger import Stranger


@pytest.fixture
def stranger(publisher: Database) -> Iterator[Stranger]:
    made = Stranger(publisher, f"stranger_of_{publisher.name}")
    made.enter()
    yield made
    made.leave()
