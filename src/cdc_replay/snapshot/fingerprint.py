"""Fingerprint of everything that determines how an unchanged row is read.

A staged chunk outlives the run that read it. It is reusable only while an unchanged row of the publisher
would be read as the same text, from the same page:

| part of the fingerprint                  | otherwise                                                       |
|------------------------------------------|-----------------------------------------------------------------|
| the change log: cluster, timeline, start | positions would belong to another history                       |
| the physical tables and their files      | rows would be elsewhere: TRUNCATE, VACUUM FULL, rewrites        |
| columns: number, name, type              | a column would have another value without a change of the row   |
| the types' labels and attributes         | the same, for an enum with a renamed value                      |
| row filters and column list              | other rows and columns would be read                            |
| the key                                  | the log would give another one                                  |
| the target's columns and their types     | the staging table would not fit                                 |

A table has no fingerprint, and its copy is not resumed, if no key with equal texts on both sides identifies
its rows, or if the role does not read its rows directly (policies, R7.10): visible rows can change without a
change of the table.
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
    """A column of the key with the publisher's equality; `type_sql` is its base type."""

    name: str
    type_sql: str
    equality: Operator


@dataclass(frozen=True, slots=True)
class CopyFingerprint:
    """The fingerprint as a digest, and the key that identifies rows."""

    digest: str
    key: tuple[KeyColumn, ...]

    @property
    def key_columns(self) -> tuple[str, ...]:
        """Names of the key's columns."""
        return tuple(column.name for column in self.key)


def read_fingerprints(
    source: Connection,
    tables: Iterable[SyncedTable],
    storage: Mapping[RelationId, Storage],
    targets: Mapping[QualifiedName, TargetTable],
    log_identity: str,
) -> dict[QualifiedName, CopyFingerprint]:
    """The fingerprints of tables that have one; `log_identity` identifies the change log.

    `source` is inside the transaction that read `storage`.
    """
    candidates = [synced for synced in tables if _is_direct(synced, storage)]
    leaves = read_target_tables(source, [leaf.name for synced in candidates for leaf in synced.leaves])
    fingerprints: dict[QualifiedName, CopyFingerprint] = {}
    for synced in candidates:
        target = targets[synced.table.name]
        if key := _key(synced, leaves, target):
            description = [log_identity, *_describe(synced, storage, target), _types(source, synced)]
            digest = hashlib.sha256(json.dumps([description, [column.name for column in key]]).encode())
            fingerprints[target.name] = CopyFingerprint(digest.hexdigest(), key)
    return fingerprints


def _is_direct(synced: SyncedTable, storage: Mapping[RelationId, Storage]) -> bool:
    stored = [storage.get(leaf.id) for leaf in synced.leaves]
    is_open = all(leaf is not None and leaf.is_open and leaf.filenode for leaf in stored)
    return bool(synced.leaves) and is_open and is_read_by_pages(synced, storage)


def _key(
    synced: SyncedTable, leaves: Mapping[QualifiedName, TargetTable], target: TargetTable
) -> tuple[KeyColumn, ...]:
    """The common key of all leaves, if it is copied and has the same types on both sides; else empty."""
    keys = [_key_of(leaves[leaf.name]) if leaf.name in leaves else () for leaf in synced.leaves]
    if any(set(key) != set(keys[0]) for key in keys):
        return ()
    target_types = {column.name: column.base_type_sql for column in target.columns}
    is_copied = all(column.name in synced.columns for column in keys[0])
    has_same_types = all(target_types.get(column.name) == column.type_sql for column in keys[0])
    return keys[0] if is_copied and has_same_types else ()


def _key_of(table: TargetTable) -> tuple[KeyColumn, ...]:
    columns = [table.column(name) for name in table.identity]
    return tuple(
        KeyColumn(column.name, column.base_type_sql, column.equality)
        for column in columns
        if column.equality is not None
    )


def _describe(synced: SyncedTable, storage: Mapping[RelationId, Storage], target: TargetTable) -> list[Any]:
    filters = synced.filters and [[row_filter.node_tree, row_filter.sql] for row_filter in synced.filters]
    target_types = {column.name: column.type_sql for column in target.columns}
    return [
        [[int(leaf.id), storage[leaf.id].filenode, _columns(leaf, synced.columns)] for leaf in synced.leaves],
        list(synced.columns),
        filters,
        [target_types[name] for name in synced.columns],
        target.acting.rights.owner_is_untrusted,
    ]


def _columns(leaf: Table, names: Sequence[str]) -> list[list[Any]]:
    columns = map(leaf.column, names)
    return [[column.attnum, column.name, column.type_oid, column.typmod] for column in columns]


def _types(source: Connection, synced: SyncedTable) -> list[Any]:
    oids = sorted({synced.table.column(name).type_oid for name in synced.columns})
    with translated_errors(f'cannot read the types of table "{synced.table.name}" of the publisher'):
        return [list(row) for row in source.execute(TYPES, (oids,)).fetchall()]
