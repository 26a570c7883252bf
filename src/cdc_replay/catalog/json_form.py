"""The JSON form of the publisher's catalog, as the change log stores it.

Format 1 is stable. Keys are the fields of `model/publication.py`; sets are sorted lists; enums are
PostgreSQL's words and characters; tables are in order of oid, publications in order of name. So equal
catalogs have equal texts.

    {"format": 1, "lsn": "0/16B3748", "server_version": 180006,
     "publications": [
        {"oid", "name", "all_tables", "via_root", "actions", "schemas", "publish_generated",
         "memberships": [{"relation", "row_filter": null | {"node_tree", "sql"}, "columns": null | […],
                          "is_exception": true}]}],      only if true
     "tables": [
        {"id", "schema", "name", "is_partitioned", "parent", "replica_identity", "key_columns",
         "primary_key", "dropped_columns", "is_publishable",
         "columns": [{"attnum", "name", "type_oid", "typmod", "type_sql", "collation_sql",
                      "generated", "generation_sql", "generation_tree"}]}]}      the last only if recorded
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final, TypeAlias

from pydantic import ValidationError

from cdc_replay.catalog.schema import (
    MAX_CATALOG_BYTES,
    StoredCatalog,
    StoredColumn,
    StoredMembership,
    StoredPublication,
    StoredTable,
)
from cdc_replay.errors import ChangeLogDamaged, PublisherNotReady
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
    """Whether the catalogs are equal apart from their position."""
    return a == dataclasses.replace(b, lsn=a.lsn)


def catalog_to_json(catalog: PublisherCatalog) -> str:
    """The JSON form, in one line.

    Raises:
        PublisherNotReady: if it is too long to be read again.
    """
    text = _dump(
        {
            "format": FORMAT,
            "lsn": str(catalog.lsn),
            "server_version": catalog.server_version,
            "publications": [
                _publication_json(publication) for _, publication in sorted(catalog.publications.items())
            ],
            "tables": [_table_json(table) for _, table in sorted(catalog.tables.items())],
        }
    )
    if len(text) > MAX_CATALOG_BYTES:
        raise _too_long(catalog)
    return text


def _dump(value: _Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _too_long(catalog: PublisherCatalog) -> PublisherNotReady:
    """The error for a catalog that could not be read again; it names the table that contributes most."""
    sizes = {table.id: len(_dump(_table_json(table))) for table in catalog.tables.values()}
    for publication in catalog.publications.values():
        for relation in publication.memberships.keys() & sizes.keys():
            sizes[relation] += len(_dump(_membership_json(publication.memberships[relation])))
    largest = sorted(catalog.tables.values(), key=lambda table: sizes[table.id])[-1:]
    return PublisherNotReady(
        f"the publisher's catalog has more than {MAX_CATALOG_BYTES} bytes",
        detail=" ".join(
            f'The largest definition, of {sizes[table.id]} bytes, is that of table "{table.name}".'
            for table in largest
        ),
        hint="Shorten the definitions of the database's tables, or drop tables.",
        rule="R9.10",
    )


def catalog_from_json(text: str) -> PublisherCatalog:
    """Parse the result of `catalog_to_json`.

    Raises:
        ChangeLogDamaged: if the text has another form.
    """
    if len(text) > MAX_CATALOG_BYTES:
        raise _damaged(f"it has more than {MAX_CATALOG_BYTES} bytes")
    try:
        stored = StoredCatalog.model_validate_json(text)
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
        lsn=Lsn.parse(stored.lsn),
        server_version=stored.server_version,
        publications={publication.name: _publication(publication) for publication in stored.publications},
        tables={RelationId(table.id): _table(table) for table in stored.tables},
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


def _publication(stored: StoredPublication) -> Publication:
    memberships = [_membership(membership) for membership in stored.memberships]
    return Publication(
        oid=stored.oid,
        name=stored.name,
        all_tables=stored.all_tables,
        via_root=stored.via_root,
        actions=frozenset(PublishAction(action) for action in stored.actions),
        schemas=frozenset(stored.schemas),
        memberships={membership.relation: membership for membership in memberships},
        publish_generated=stored.publish_generated,
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


def _membership(stored: StoredMembership) -> Membership:
    row_filter = stored.row_filter
    return Membership(
        relation=RelationId(stored.relation),
        row_filter=None if row_filter is None else RowFilter(row_filter.node_tree, row_filter.sql),
        columns=None if stored.columns is None else frozenset(stored.columns),
        is_exception=stored.is_exception,
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
    column_json = dataclasses.asdict(column) | {"generated": column.generated.value}
    if column.generation_tree is None:
        del column_json["generation_tree"]
    return column_json


def _table(stored: StoredTable) -> Table:
    return Table(
        id=RelationId(stored.id),
        name=QualifiedName(stored.schema_name, stored.name),
        is_partitioned=stored.is_partitioned,
        parent=None if stored.parent is None else RelationId(stored.parent),
        replica_identity=ReplicaIdentity(stored.replica_identity),
        key_columns=stored.key_columns,
        primary_key=stored.primary_key,
        columns=tuple(map(_column, stored.columns)),
        dropped_columns=stored.dropped_columns,
        is_publishable=stored.is_publishable,
    )


def _column(stored: StoredColumn) -> TableColumn:
    # A dictionary: calling the enum takes as long as everything else.
    return TableColumn(
        stored["attnum"],
        stored["name"],
        stored["type_oid"],
        stored["typmod"],
        stored["type_sql"],
        stored["collation_sql"],
        _GENERATED[stored["generated"]],
        stored["generation_sql"],
        stored.get("generation_tree"),
    )


_GENERATED: Final = {generated.value: generated for generated in Generated}
