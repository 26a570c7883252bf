"""Which columns of a row differ between sides, by hashes of each value, computed by each server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from psycopg import sql

from cdc_replay.compare.digest import TableSide, hash_of
from cdc_replay.postgres.identifiers import commas, names

ValueHashes: TypeAlias = tuple[str | None, ...]
"""By column: the hash of the value's text, None for NULL."""

_HASHES: Final = """
    select key_hash, value_hashes
    from (
        select {key_hash} as key_hash, array[{values}]::text[] as value_hashes from ({rows}) as rows
    ) as hashed
    where key_hash = any ({hashes}::text[])
"""

# Not `is null`, which is also true of a row of NULLs.
_HASH: Final = """
    case when pg_catalog.num_nulls({0}) = 0
        then pg_catalog.md5(pg_catalog.convert_to(pg_catalog.format('%s', {0}), 'UTF8')) end
"""


@dataclass(frozen=True, slots=True)
class RowOnSides:
    """One key's values as hashes: natively, here, and on the publisher now.

    None on a side that has not exactly one row of this key.
    """

    columns: tuple[str, ...]
    native: ValueHashes | None
    ours: ValueHashes | None
    published: ValueHashes | None

    @property
    def differing(self) -> tuple[str, ...]:
        """The columns in which native and we differ; empty unless both have one row."""
        if self.native is None or self.ours is None:
            return ()
        pairs = zip(self.columns, self.native, self.ours, strict=True)
        return tuple(name for name, native, ours in pairs if native != ours)

    def is_null_natively(self, column: str) -> bool:
        """Whether native has NULL there, and we a value."""
        return self._value(self.native, column) is None and self._value(self.ours, column) is not None

    def publisher_agrees(self, columns: Sequence[str]) -> bool:
        """Whether the publisher's row has our values in these columns, or has changed since.

        The publisher is read later than both sides: if it differs from them elsewhere, or the row is gone,
        its values in these columns prove nothing.
        """
        if self.published is None or self.ours is None:
            return True
        same = {
            name: theirs == mine
            for name, theirs, mine in zip(self.columns, self.published, self.ours, strict=True)
        }
        return all(same[name] for name in columns) or not all(
            equal for name, equal in same.items() if name not in columns
        )

    def _value(self, values: ValueHashes | None, column: str) -> str | None:
        return None if values is None else values[self.columns.index(column)]


def read_rows(
    native: TableSide, ours: TableSide, published: TableSide | None, key_hashes: Sequence[str]
) -> dict[str, RowOnSides]:
    """The rows of these keys on the sides, by the hash of the key. The sides have one key and columns."""
    sides = [
        {} if side is None else _value_hashes(side, native, key_hashes) for side in (native, ours, published)
    ]
    return {
        key: RowOnSides(native.columns, *(_only(side.get(key, ())) for side in sides)) for key in key_hashes
    }


def with_key_of(side: TableSide, other: TableSide) -> TableSide:
    """The side with the key and the columns of the other."""
    return dataclasses.replace(side, key=other.key, columns=other.columns)


def _only(rows: Sequence[ValueHashes]) -> ValueHashes | None:
    return rows[0] if len(rows) == 1 else None


def _value_hashes(
    side: TableSide, native: TableSide, key_hashes: Sequence[str]
) -> Mapping[str, Sequence[ValueHashes]]:
    query = sql.SQL(_HASHES).format(
        key_hash=hash_of(names(native.hashed_key)),
        values=commas(sql.SQL(_HASH).format(sql.Identifier(name)) for name in native.columns),
        rows=side.rows,
        hashes=sql.Literal(list(key_hashes)),
    )
    rows: dict[str, list[ValueHashes]] = {}
    with side.read_errors():
        for key_hash, values in side.session.stream(query, "key_hash text, value_hashes text[]"):
            rows.setdefault(key_hash, []).append(tuple(values))
    return rows
