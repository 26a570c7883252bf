"""Sizes in bytes, read and written as PostgreSQL does."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = ("bytes", "kB", "MB", "GB", "TB")
_TEXT: Final = re.compile(r"([0-9]{1,18}) *(kB|MB|GB|TB)?")


def parse_size(text: str) -> int:
    """The bytes of a number, alone or with kB, MB, GB or TB; units are powers of 1024.

    Raises:
        ValueError: if `text` has another form.
    """
    if (match := _TEXT.fullmatch(text.strip())) is None:
        raise ValueError("not a size: give bytes, or a whole number of kB, MB, GB or TB")
    return int(match[1]) << 10 * _UNITS.index(match[2] or "bytes")


def size_in_words(size_bytes: int) -> str:
    """The size in the unit that leaves it two to five digits, as pg_size_pretty does."""
    unit, size = 0, size_bytes
    while size >= 10 << 10 and unit < len(_UNITS) - 1:
        unit, size = unit + 1, (size + 512) >> 10
    return f"{size} {_UNITS[unit]}"
