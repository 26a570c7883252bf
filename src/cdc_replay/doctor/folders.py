"""Folders that must be writable, with space left."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from cdc_replay.model.check import Check, Verdict
from cdc_replay.model.size import size_in_words

LITTLE_SPACE: Final = 2 << 30
NO_SPACE: Final = 100 << 20


def check_folder(subject: str, purpose: str, folder: Path) -> Check:
    """Whether files can be created in the folder, or where it will be created, and how much space is left."""
    present = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=present):
            free = shutil.disk_usage(present).free
    except OSError as error:
        remedy = f"Give this user the right to write to {present}, or configure another folder."
        return Check(subject, Verdict.FAILED, f"{purpose} {folder} is not writable: {error.strerror}", remedy)
    verdict = Verdict.FAILED if free < NO_SPACE else Verdict.WARNING if free < LITTLE_SPACE else Verdict.OK
    remedy = "" if verdict is Verdict.OK else "Free some space, or configure a folder on another disk."
    return Check(subject, verdict, f"{purpose} {folder} is writable, {size_in_words(free)} free", remedy)
