"""The reports of validations, as files: only pages of the subscription that is asked for.

Neither a name nor a symbolic link leads out of its folder, where others' reports and the configuration of
Great Expectations are. The folder of all reports may itself be behind a link, as a mounted volume is.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

PAGE_NAME: Final = re.compile(r"latest\.html|[0-9A-F]+-[0-9A-F]+-[0-9]{8}T[0-9]{12}Z\.html")
"""Names that `cdc_replay.validate.run` gives."""


def read_report(expectations: Path, subscription: str, page: str) -> bytes | None:
    """The page, or None if the subscription has none of that name."""
    if PAGE_NAME.fullmatch(page) is None:
        return None
    reports = expectations / "gx" / "uncommitted" / "reports"
    with contextlib.suppress(OSError):
        folder = os.open(reports / subscription, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            file = os.open(page, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        finally:
            os.close(folder)
        with os.fdopen(file, "rb") as opened:
            return opened.read()
    return None
