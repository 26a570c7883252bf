"""Fixtures of the tests of capture."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest


@pytest.fixture
def second_peeks(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The log lines about extra peeks since the last call."""
    caplog.set_level(logging.INFO, "cdc_replay.capture")

    def messages() -> list[str]:
        result = [record.getMessage() for record in caplog.records if "peeked" in record.getMessage()]
        caplog.clear()
        return result

    return messages
