"""A publisher that is set up for capture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdc_replay.capture.pull import CaptureSource
from cdc_replay.capture.setup import SetupRequest, setup_publisher
from fixtures.captured import Captured
from fixtures.postgres import Database


@pytest.fixture
def set_up(publisher: Database, tmp_path: Path) -> Callable[..., Captured]:
    """Set the publisher up for publications that the test has created; default: `p`."""

    def set_up(*publications: str, two_phase: bool = False, **options: Any) -> Captured:
        slot = f"slot_{publisher.name}"
        change_log = str(tmp_path / "log")
        request = SetupRequest("test", publisher.dsn, slot, change_log, publications or ("p",), two_phase)
        setup_publisher(request)
        source = CaptureSource("test", publisher.dsn, slot, change_log, two_phase=two_phase, **options)
        return Captured(publisher, source, request)

    return set_up
