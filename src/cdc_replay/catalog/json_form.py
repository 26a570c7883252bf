"""The JSON form of the publisher's catalog.

The JSON form is what the change log keeps, so it is stable: format 1 is read for as long as there are logs
of it. Keys are those of the values in `model/publication.py`; sets are sorted lists; enums are PostgreSQL's
own words and characters; the position is in PostgreSQL's form; tables are in order of oid, publications in
order of name. So equal catalogs have equal texts.

    {"format": 1, "lsn": "0/16B3748", "server_version": 180006,
     "publications": [
        {"oid", "name", "all_tables", "via_root", "actions", "schemas", "publish_generated",
         "memberships": [{"relation", "row_filter": null | {"node_tree", "sql"}, "columns": null | […],
                          "is_exception": true}]}],      the last one only where it is one
     "tables": [
        {"id", "schema", "name", "is_partitioned", "parent", "replica_identity", "key_columns",
         "primary_key", "dropped_columns", "is_publishable",
         "columns": [{"attnum", "name", "type_oid", "typmod", "type_sql", "collation_sql",
                      "generated", "generation_sql", "generation_tree"}]}]}      the last of generated columns
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final, TypeAlias

from pydantic import ValidationError

from cdc_replay.catalog.schema import (
    MOST_CATALOG_BYTES,
    StoredCatalog,
    StoredColumn,
    StoredMembership,
    StoredPublication,
    StoredTable,
)
from cdc_replay.errors import ChangeLogDamaged
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import (
    Generated,
    Membership,
    Publication,
    PublishAction,
    PublisherCatalog,
    RowFilter,
    Table,
    TableColumn,
)
from cdc_replay.model.relation import QualifiedName, RelationId, ReplicaIdentity

FORMAT: Final = 1

_Json: TypeAlias = dict[str, Any]


def same_definitions(a: PublisherCatalog, b: PublisherCatalog) -> bool:
    """Whether the two say the same, wherever in the WAL they were read."""
    return a == dataclasses.replace(b, lsn=a.lsn)


def catalog_to_json(catalog: PublisherCatalog) -> str:
    """The JSON form described above, in one line."""
    return json.dumps(
        {
            "format": FORMAT,
            "lsn": str(catalog.lsn),
            "server_version": catalog.server_version,
            "publications": [
                _publication_json(publication) for _, publication in sorted(catalog.publications.items())
            ],
            "tables": [_table_json(table) for _, table in sorted(catalog.tables.items())],
        },
        ensure_ascii=False,
        separators=(",", ":"),
    )


def catalog_from_json(text: str) -> PublisherCatalog:
    """The catalog of a text that `catalog_to_json` has made.

    Raises:
        ChangeLogDamaged: if it is not such a text.
    """
    if len(text) > MOST_CATALOG_BYTES:
        raise _damaged(f"it has more than {MOST_CATALOG_BYTES} bytes")
    try:
        read = StoredCatalog.model_validate_json(text)
    except ValidationError as error:
        # Without the value, which may be as long as the text.
        (first, *_) = error.errors(include_url=False, include_context=False, include_input=False)
        if first["loc"] == ("format",):
            raise ChangeLogDamaged(
                "a stored catalog has an unknown format",
                hint="Read this change log with the version of cdc-replay that wrote it, or a later one.",
            ) from error
        raise _damaged(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ValueError as error:
        raise _damaged(str(error)) from error
    return PublisherCatalog(
        lsn=Lsn.parse(read.lsn),
        server_version=read.server_version,
        publications={each.name: _publication(each) for each in read.publications},
        tables={RelationId(each.id): _table(each) for each in read.tables},
    )


def _damaged(why: str) -> ChangeLogDamaged:
    return ChangeLogDamaged("a stored catalog cannot be read", detail=why)


def _publication_json(publication: Publication) -> _Json:
    return {
        "oid": publication.oid,
        "name": publication.name,
        "all_tables": publication.all_tables,
        "via_root": publication.via_root,
        "actions": [action.value for action in PublishAction if action in publication.actions],
        "schemas": sorted(publication.schemas),
        "publish_generated": publication.publish_generated,
        "memberships": [_membership_json(member) for _, member in sorted(publication.memberships.items())],
    }


def _publication(read: StoredPublication) -> Publication:
    memberships = [_membership(membership) for membership in read.memberships]
    return Publication(
        oid=read.oid,
        name=read.name,
        all_tables=read.all_tables,
        via_root=read.via_root,
        actions=frozenset(PublishAction(action) for action in read.actions),
        schemas=frozenset(read.schemas),
        memberships={membership.relation: membership for membership in memberships},
        publish_generated=read.publish_generated,
    )


def _membership_json(membership: Membership) -> _Json:
    row_filter = membership.row_filter
    return {
        "relation": membership.relation,
        "row_filter": (
            None if row_filter is None else {"node_tree": row_filter.node_tree, "sql": row_filter.sql}
        ),
        "columns": None if membership.columns is None else sorted(membership.columns),
        **({"is_exception": True} if membership.is_exception else {}),
    }


def _membership(read: StoredMembership) -> Membership:
    row_filter = read.row_filter
    return Membership(
        relation=RelationId(read.relation),
        row_filter=None if row_filter is None else RowFilter(row_filter.node_tree, row_filter.sql),
        columns=None if read.columns is None else frozenset(read.columns),
        is_exception=read.is_exception,
    )


def _table_json(table: Table) -> _Json:
    return {
        "id": table.id,
        "schema": table.name.schema,
        "name": table.name.name,
        "is_partitioned": table.is_partitioned,
        "parent": table.parent,
        "replica_identity": table.replica_identity.value,
        "key_columns": list(table.key_columns),
        "primary_key": list(table.primary_key),
        "dropped_columns": table.dropped_columns,
        "is_publishable": table.is_publishable,
        "columns": [_column_json(column) for column in table.columns],
    }


def _column_json(column: TableColumn) -> _Json:
    written = dataclasses.asdict(column) | {"generated": column.generated.value}
    if column.generation_tree is None:
        del written["generation_tree"]
    return written


def _table(read: StoredTable) -> Table:
    return Table(
        id=RelationId(read.id),
        name=QualifiedName(read.schema_name, read.name),
        is_partitioned=read.is_partitioned,
        parent=None if read.parent is None else RelationId(read.parent),
        replica_identity=ReplicaIdentity(read.replica_identity),
        key_columns=read.key_columns,
        primary_key=read.primary_key,
        columns=tuple(map(_column, read.columns)),
        dropped_columns=read.dropped_columns,
        is_publishable=read.is_publishable,
    )


def _column(read: StoredColumn) -> TableColumn:
    # Not by calling the enum, which takes as long as all the rest.
    return TableColumn(
        read["attnum"],
        read["name"],
        read["type_oid"],
        read["typmod"],
        read["type_sql"],
        read["collation_sql"],
        _GENERATED[read["generated"]],
        read["generation_sql"],
        read.get("generation_tree"),
    )


_GENERATED: Final = {each.value: each for each in Generated}
