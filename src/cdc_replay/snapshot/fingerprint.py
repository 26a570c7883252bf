"""What a chunk was read under: as long as it is the same, a row that nobody touches reads the same.

A staged chunk outlives the run that has read it. It can be used again only if a row of the publisher that no
transaction has touched since would be read into the very same text, from the very same page:

| part of the definition                   | otherwise                                                       |
|------------------------------------------|-----------------------------------------------------------------|
| the change log: cluster, timeline, start | positions would mean another history                            |
| the physical tables and their files      | rows would lie elsewhere: TRUNCATE, VACUUM FULL, rewrites       |
| columns: number, name, type              | a column would have another value, with no change of the row    |
| the types' labels and attributes         | so would an enum whose value was renamed                        |
| row filters and column list              | other rows, other columns would be read                         |
| the key                                  | the log would tell another one                                  |
| the target's columns and their types     | the staging table would not fit                                 |

A table has no definition, and its copy is not taken up again, if its rows cannot be told apart by a key whose
text is the same on both sides, or if the role does not see its rows directly (policies, R7.10): what it sees
can change without a change of the table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cdc_replay.model.publication import Table
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.publication.resolve import SyncedTable
from cdc_replay.snapshot.plan import Storage, is_read_by_pages
from cdc_replay.subscriber.target_tables import Operator, TargetTable, read_target_tables

TYPES: Final = """
    with recursive used (oid) as (
        select pg_catalog.unnest(%s::oid[])
        union
        select part.oid
          from used
          join pg_catalog.pg_type as type on type.oid = used.oid
         cross join lateral (
                select type.typbasetype
                union all
                select type.typelem
                union all
                select rngsubtype from pg_catalog.pg_range where type.oid in (rngtypid, rngmultitypid)
                union all
                select atttypid from pg_catalog.pg_attribute
                 where attrelid = type.typrelid and attnum > 0 and not attisdropped
               ) as part (oid)
         where part.oid <> 0
    )
    select type.oid::bigint, type.typname::text,
           array(select enumlabel::text from pg_catalog.pg_enum
                  where enumtypid = type.oid order by enumsortorder),
           array(select pg_catalog.concat_ws(' ', attnum, attname, atttypid, atttypmod)
                   from pg_catalog.pg_attribute
                  where attrelid = type.typrelid and attnum > 0 and not attisdropped order by attnum)
      from used
      join pg_catalog.pg_type as type on type.oid = used.oid
     order by type.oid
"""


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of the key, as the publisher compares it; `type_sql` is its type below all domains."""

    name: str
    type_sql: str
    equality: Operator


@dataclass(frozen=True, slots=True)
class CopyFingerprint:
    """What chunks of a table are read under, as a digest, and the key that tells its rows apart."""

    digest: str
    key: tuple[KeyColumn, ...]

    @property
    def key_columns(self) -> tuple[str, ...]:
        """Names of the key's columns."""
        return tuple(column.name for column in self.key)


def read_definitions(
    source: Connection,
    tables: Iterable[SyncedTable],
    storage: Mapping[RelationId, Storage],
    targets: Mapping[QualifiedName, TargetTable],
    history: str,
) -> dict[QualifiedName, CopyFingerprint]:
    """The definitions of those tables that have one; `history` names the change log.

    `source` is inside the transaction under which `storage` was read.
    """
    candidates = [each for each in tables if _is_direct(each, storage)]
    leaves = read_target_tables(source, [leaf.name for each in candidates for leaf in each.leaves])
    found: dict[QualifiedName, CopyFingerprint] = {}
    for synced in candidates:
        target = targets[synced.table.name]
        if key := _key(synced, leaves, target):
            described = [history, *_described(synced, storage, target), _types(source, synced)]
            digest = hashlib.sha256(json.dumps([described, [each.name for each in key]]).encode())
            found[target.name] = CopyFingerprint(digest.hexdigest(), key)
    return found


def _is_direct(synced: SyncedTable, storage: Mapping[RelationId, Storage]) -> bool:
    stored = [storage.get(leaf.id) for leaf in synced.leaves]
    is_open = all(each is not None and each.is_open and each.filenode for each in stored)
    return bool(synced.leaves) and is_open and is_read_by_pages(synced, storage)


def _key(
    synced: SyncedTable, leaves: Mapping[QualifiedName, TargetTable], target: TargetTable
) -> tuple[KeyColumn, ...]:
    """The key that all leaves have, if it is copied and has the same types on both sides; else nothing."""
    keys = [_key_of(leaves[leaf.name]) if leaf.name in leaves else () for leaf in synced.leaves]
    if any(set(key) != set(keys[0]) for key in keys):
        return ()
    held = {column.name: column.base_type_sql for column in target.columns}
    is_usable = all(each.name in synced.columns and held.get(each.name) == each.type_sql for each in keys[0])
    return keys[0] if is_usable else ()


def _key_of(table: TargetTable) -> tuple[KeyColumn, ...]:
    columns = [table.column(name) for name in table.identity]
    return tuple(
        KeyColumn(column.name, column.base_type_sql, column.equality)
        for column in columns
        if column.equality is not None
    )


def _described(synced: SyncedTable, storage: Mapping[RelationId, Storage], target: TargetTable) -> list[Any]:
    filters = synced.filters and [[each.node_tree, each.sql] for each in synced.filters]
    held = {column.name: column.type_sql for column in target.columns}
    return [
        [[int(leaf.id), storage[leaf.id].filenode, _columns(leaf, synced.columns)] for leaf in synced.leaves],
        list(synced.columns),
        filters,
        [held[name] for name in synced.columns],
        target.acting.rights.owner_is_untrusted,
    ]


def _columns(leaf: Table, names: Sequence[str]) -> list[list[Any]]:
    return [[each.attnum, each.name, each.type_oid, each.typmod] for each in map(leaf.column, names)]


def _types(source: Connection, synced: SyncedTable) -> list[Any]:
    oids = sorted({synced.table.column(name).type_oid for name in synced.columns})
    with translated_errors(f'cannot read the types of table "{synced.table.name}" of the publisher'):
        return [list(row) for row in source.execute(TYPES, (oids,)).fetchall()]
