"""Messages of rows for a `SmallLog`, and the search for a row in it."""

from __future__ import annotations

import struct

from cdc_replay.explain_row.log_search import FoundChanges, SearchedTable, find_row
from cdc_replay.explain_row.row_key import RowKey
from cdc_replay.model.relation import RelationId
from unit.changelog.small_log import EVERYTHING, TABLE, SmallLog

LEAF = RelationId(TABLE.id)


def value(text: str | None) -> bytes:
    return b"n" if text is None else b"t" + struct.pack(">i", len(text)) + text.encode()


def row(*texts: str | None) -> bytes:
    return struct.pack(">H", len(texts)) + b"".join(map(value, texts))


def update(key: str, a: str | None, *, old_key: str | None = None) -> bytes:
    old = b"" if old_key is None else b"K" + row(old_key, None)
    return b"U" + struct.pack(">I", TABLE.id) + old + b"N" + row(key, a)


def update_full(old: tuple[str, str | None], new: tuple[str, str | None]) -> bytes:
    """An UPDATE under REPLICA IDENTITY FULL."""
    return b"U" + struct.pack(">I", TABLE.id) + b"O" + row(*old) + b"N" + row(*new)


def delete(key: str) -> bytes:
    return b"D" + struct.pack(">I", TABLE.id) + b"K" + row(key, None)


def find(log: SmallLog, key: str, last: int = 100) -> FoundChanges:
    """The changes of the row with this key of `TABLE`."""
    ids = frozenset({LEAF})
    table = SearchedTable(log.log, ids, ids, log.log.relations(), [(0, 90)])
    return find_row(table, RowKey(("id",), (key,)), EVERYTHING, last)
