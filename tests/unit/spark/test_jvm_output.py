"""What the JVM of a local Spark says reaches standard error, but for its chatter."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from cdc_replay.spark.session import CHATTER, pass_on

if TYPE_CHECKING:
    import pytest


def test_lines_are_passed_on_without_chatter(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    passing = threading.Thread(target=pass_on, args=(reader,))
    passing.start()
    os.write(writer, CHATTER + b"\n2026-01-01 ERROR Executor: lost\nno end of line")
    os.close(writer)
    passing.join(timeout=30)
    assert capfd.readouterr().err == "2026-01-01 ERROR Executor: lost\nno end of line"
