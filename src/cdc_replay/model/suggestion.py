"""What a person may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """A question with the nearest of the known names; None if none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {nearest[0]}?" if nearest else None
