"""Arguments of operators that a template may give, as text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from cdc_replay.errors import InvalidConfiguration

TABLE: Final = r"^[^.]+\.[\s\S]+$"
"""What `QualifiedName.parse` takes: a dot ends the schema; the name may have anything."""


def table_names(tables: Sequence[str] | str) -> tuple[str, ...]:
    """Names of tables, also as a JSON array, which is what a template can give.

    Raises:
        InvalidConfiguration: if it is no array of names.
    """
    names = tables
    if isinstance(tables, str):
        try:
            names = json.loads(tables)
        except json.JSONDecodeError:
            names = tables
    if isinstance(names, str) or not all(re.fullmatch(TABLE, str(name)) for name in names):
        raise InvalidConfiguration(f"{tables!r} is no list of tables", hint='Give ["schema.table"].')
    return tuple(names)


def is_set(value: bool | str) -> bool:
    """A flag, also as the text that a template makes of it.

    Raises:
        InvalidConfiguration: for any other text: a misspelt `dry_run` must not write.
    """
    try:
        return {"True": True, "False": False}[str(value)]
    except KeyError:
        raise InvalidConfiguration(f'"{value}" is neither True nor False') from None
