"""Texts of servers made safe to print."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """The text with control characters as escapes: a name must not move the cursor or set colours."""
    return "".join(
        character
        if character == "\n" or unicodedata.category(character) not in {"Cc", "Cf", "Cs"}
        else character.encode("unicode_escape").decode()
        for character in text
    )
