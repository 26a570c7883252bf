"""The report files of a subscription's validations.

Neither a name nor a symbolic link can leave the subscription's folder: reports of other subscriptions and the
configuration of Great Expectations are outside. The folder of all reports may be a link to a mounted volume.
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
    """The content of the page; None if the subscription has no such page."""
    if PAGE_NAME.fullmatch(page) is None:
        return None
    reports = expectations / "gx" / "uncommitted" / "reports"
    with contextlib.suppress(OSError):
        folder = os.open(reports / subscription, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            file = os.open(page, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        finally:
            os.close(folder)
        with os.fdopen(file, "rb") as report:
            return report.read()
    return None
