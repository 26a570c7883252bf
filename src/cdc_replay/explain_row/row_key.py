"""The key of a row as a person gives it: `id=5 region=nsw`, or the values in the order of the key.

| the table has     | accepted                                                                        |
|-------------------|---------------------------------------------------------------------------------|
| a key             | NAME=VALUE for each of its columns, in any order; or the values, in its order   |
| no key            | NAME=VALUE for any of its columns: the history of all rows with these values    |

Arguments are NAME=VALUE if each of them begins with the name of a column and `=`. Otherwise they are values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.count import count_in_words


@dataclass(frozen=True, slots=True)
class RowKey:
    """Columns, and the text of each as PostgreSQL prints it."""

    columns: tuple[str, ...]
    texts: tuple[str, ...]

    @property
    def by_column(self) -> dict[str, str]:
        """The texts by column."""
        return dict(zip(self.columns, self.texts, strict=True))

    def with_texts(self, texts: Mapping[str, str | None]) -> Self:
        """The same columns with these texts, where they are known."""
        known = ((texts.get(name), text) for name, text in self.by_column.items())
        return type(self)(self.columns, tuple(text if new is None else new for new, text in known))

    def __str__(self) -> str:
        return f"({', '.join(self.columns)})=({', '.join(self.texts)})"


def parse_key(arguments: Sequence[str], key: Sequence[str], columns: Sequence[str], table: str) -> RowKey:
    """The key of the arguments; `key` are the columns of the table's key, `columns` all of its columns.

    Raises:
        InvalidConfiguration: if the arguments are not a key of the table, or no text.
    """
    for argument in arguments:
        if not argument.isascii() and argument != argument.encode(errors="replace").decode():
            raise InvalidConfiguration(f'"{argument}" is no text: it is not encoded as UTF-8')
    named = _named(arguments, columns)
    if named is None:
        if not key or len(arguments) != len(key):
            raise _not_a_key(key, columns, table, f"Given: {count_in_words(len(arguments), 'value')}.")
        return RowKey(tuple(key), tuple(arguments))
    if key and (len(named) != len(arguments) or set(named) != set(key)):
        raise _not_a_key(key, columns, table, f"Given: {', '.join(named)}.")
    order = key or tuple(named)
    return RowKey(tuple(order), tuple(named[name] for name in order))


def _named(arguments: Sequence[str], columns: Sequence[str]) -> dict[str, str] | None:
    """Values by column; None if an argument does not begin with a column's name."""
    values: dict[str, str] = {}
    for argument in arguments:
        # A name may contain the character itself; the longest one wins.
        names = [name for name in columns if argument.startswith(f"{name}=")]
        if not names:
            return None
        name = max(names, key=len)
        values[name] = argument[len(name) + 1 :]
    return values or None


def _not_a_key(key: Sequence[str], columns: Sequence[str], table: str, given: str) -> InvalidConfiguration:
    if key:
        hint = f"Give `{' '.join(f'{name}=…' for name in key)}`, or the values in this order."
        return InvalidConfiguration(f'this is not a key of table "{table}"', detail=given, hint=hint)
    return InvalidConfiguration(
        f'table "{table}" has no key',
        detail=given,
        hint=f"Give NAME=VALUE for one or more of its columns: {', '.join(columns)}.",
    )
