"""Texts of servers made safe to print: a name must not move the cursor, set colours, or forge a log line."""

from __future__ import annotations

import logging
import unicodedata
from typing import Final

_CONTINUED: Final = "\n    "

_STEERING: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control and format characters, lone surrogates, and line breaks that only some programs know."""


def printable(text: str) -> str:
    """The text with control characters as escapes; line breaks stay."""
    return "".join(
        character
        if character == "\n" or unicodedata.category(character) not in _STEERING
        else character.encode("unicode_escape").decode()
        for character in text
    )


class LogLineFormatter(logging.Formatter):
    """Lines whose texts are printable; whatever follows a line break is indented, and so no line of ours."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record."""
        return printable(super().format(record)).replace("\n", _CONTINUED)
