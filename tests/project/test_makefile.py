"""The targets of the Makefile, as a person at a terminal uses them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_ctrl_c_ends_the_demo_without_an_error(tmp_path: Path) -> None:
    """A terminal sends SIGINT to `make` as well. The program in the place of Python ends as the demo does."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\ntrap 'echo stopped; exit 130' INT\necho up\nwhile :; do sleep 0.1; done\n")
    program.chmod(0o755)
    with subprocess.Popen(
        ["make", "--old-file=env", "demo", f"BIN={tmp_path}"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as make:  # fmt: skip
        assert make.stdout is not None
        while make.stdout.readline().strip() != "up":
            pass
        os.killpg(make.pid, signal.SIGINT)
        rest = make.stdout.read()
    assert "stopped" in rest
    assert "***" not in rest
