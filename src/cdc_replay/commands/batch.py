"""`batch`: many commands in one process and one Spark session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TextIO

from cdc_replay.arrow.freed_memory import release_freed_memory
from cdc_replay.model.results import Json

RunLine = Callable[[str], tuple[dict[str, Json] | None, str | None]]
"""Runs one command line; returns its result, its error, or both."""


def batch(lines: Iterable[str], out: TextIO, run_line: RunLine) -> None:
    """Run each line and print one JSON object for it; a failed command does not end the batch."""
    for line in lines:
        command = line.strip()
        if not command or command.startswith("#"):
            continue
        result, error = _run_guarded(run_line, command)
        answer: dict[str, Json] = {"command": command, "ok": error is None}
        if result is not None:
            answer["result"] = result
        if error is not None:
            answer["error"] = error
        out.write(json.dumps(answer, ensure_ascii=False) + "\n")
        out.flush()
        release_freed_memory()


def _run_guarded(run_line: RunLine, command: str) -> tuple[dict[str, Json] | None, str | None]:
    try:
        return run_line(command)
    except Exception as error:  # noqa: BLE001 - the next line must run all the same
        return None, f"{type(error).__name__}: {error}"
