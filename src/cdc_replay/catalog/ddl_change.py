"""What one DDL command changed, as the publisher's event triggers say it: from a message to a new catalog.

The triggers (`capture.ddl.event_triggers`) write transactional logical messages, so that a definition has a
position in the change stream (R9.10, R9.11). Their content is JSON in UTF-8.

`cdc_replay.catalog`: rows of the reader's queries, of the objects that the command touched.

    {"format": 1,
     "touched_tables": [oid…], "partitions": [oid…], "written_columns": [[table, attnum]…],
     "respelled_tables": [oid…],
     "touched_publications": [oid…], "removed_memberships": [[publication, table]…],
     "schemas_of": [oid…], "added_schemas": [[publication, name]…], "removed_schemas": [[publication, name]…],
     "tables": [row…], "columns": [row…], "publications": [row…], "memberships": [row…]}

| the known catalog has                                       | then                                        |
|-------------------------------------------------------------|---------------------------------------------|
| a touched table, with its memberships                       | its rows replace it; without one it is gone |
| a column of it that is as it was, and was not written       | its type is spelled as it was               |
| a table, not touched, whose parent is touched, and which is | it was detached: it has no parent           |
| not among `partitions`, the children that stay as they are  |                                             |
| a respelled table, with its memberships                     | texts of what is as it was are replaced     |
| a touched publication                                       | its row replaces it, but for what it lists; |
|                                                             | without one it is gone                      |
| a publication of `schemas_of`                               | the row's list of schemas replaces its own  |
| what is added to a publication, or removed                  | is there, or is gone                        |
| anything else                                               | stays                                       |

What is not known and touched is added, a new publication with everything that it lists. So a delta has
nothing but what its own transaction did, and was alone to do: two transactions with open DDL do not undo each
other.

    {"format": 1, "whole": true, "tables": …, "columns": …, "publications": …, "memberships": …}

says everything; what is not in it is gone.

`cdc_replay.rewrite`: `{"format": 1, "relations": [oid…]}`, tables whose rows were rewritten, so that their
values may have changed without a change being sent (R11.9).

Before the JSON there is a line with the code of the message (`capture.ddl.message_code`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import ValidationError

from cdc_replay.catalog.reader import CatalogRow, memberships_of, publication_of, tables_of
from cdc_replay.catalog.schema import MOST_MESSAGE_BYTES, DeltaContent, RewriteContent
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.publication import Membership, Publication, PublisherCatalog, Table, TableColumn
from cdc_replay.model.relation import QualifiedName, RelationId

CATALOG_PREFIX: Final = "cdc_replay.catalog"
"""Of the messages that say what a command changed."""

REWRITE_PREFIX: Final = "cdc_replay.rewrite"
"""Of the messages that say that tables were rewritten."""

DELTA_FORMAT: Final = 1

CODE_LINE: Final = re.compile(rb"([0-9]{1,18}) ([0-9a-f]{64})\n")
"""Ordinal and code, which come before the content of a message of the event triggers."""

_Content = TypeVar("_Content", DeltaContent, RewriteContent)


@dataclass(frozen=True, slots=True)
class CatalogDelta:
    """What one command changed; `publications` have no memberships, which may need other tables' columns."""

    whole: bool
    touched_tables: frozenset[RelationId]
    partitions: frozenset[RelationId]
    """Children of touched tables that the command left as they are."""
    written_columns: frozenset[tuple[RelationId, int]]
    respelled_tables: frozenset[RelationId]
    touched_publications: frozenset[int]
    schemas_of: frozenset[int]
    removed_memberships: frozenset[tuple[int, RelationId]]
    added_schemas: frozenset[tuple[int, str]]
    removed_schemas: frozenset[tuple[int, str]]
    tables: Mapping[RelationId, Table]
    publications: Mapping[int, Publication]
    memberships: tuple[CatalogRow, ...]


def parse_delta(content: bytes | str) -> CatalogDelta:
    """The delta of a message with `CATALOG_PREFIX`.

    Raises:
        InvalidMessage: if it is not such a text.
    """
    read = _read(DeltaContent, content)
    try:
        tables = tables_of(read.tables, read.columns)
    except (ValueError, LookupError) as error:
        raise _invalid(f"{type(error).__name__}: {error}") from error
    if any(table.dropped_columns < 0 for table in tables.values()):
        raise _invalid("a table has more columns than numbers for them")
    return CatalogDelta(
        whole=read.whole,
        touched_tables=_relations(read.touched_tables),
        partitions=_relations(read.partitions),
        written_columns=frozenset((RelationId(oid), attnum) for oid, attnum in read.written_columns),
        respelled_tables=_relations(read.respelled_tables),
        touched_publications=frozenset(read.touched_publications),
        schemas_of=frozenset(read.schemas_of),
        removed_memberships=frozenset(
            (publication, RelationId(relation)) for publication, relation in read.removed_memberships
        ),
        added_schemas=frozenset(read.added_schemas),
        removed_schemas=frozenset(read.removed_schemas),
        tables=tables,
        publications={row[0]: publication_of(row, {}) for row in read.publications},
        memberships=read.memberships,
    )


def without_code(content: bytes) -> bytes:
    """What a message says; one of a log that is older than codes has no line to take off."""
    line = CODE_LINE.match(content)
    return content if line is None else content[line.end() :]


def parse_rewrite(content: bytes | str) -> tuple[RelationId, ...]:
    """The tables that a message with `REWRITE_PREFIX` names.

    Raises:
        InvalidMessage: if it is not such a text.
    """
    return tuple(map(RelationId, _read(RewriteContent, content).relations))


def apply_delta(catalog: PublisherCatalog, delta: CatalogDelta) -> PublisherCatalog:
    """The catalog after the command; its position is still that of `catalog`."""
    if delta.whole:
        tables = dict(delta.tables)
        members = memberships_of(delta.memberships, tables)
        publications = [
            dataclasses.replace(each, memberships=members.get(oid, {}))
            for oid, each in delta.publications.items()
        ]
    else:
        tables = _tables(catalog, delta)
        publications = list(_publications(catalog, delta, tables))
    return dataclasses.replace(
        catalog, tables=tables, publications={each.name: each for each in publications}
    )


def _tables(catalog: PublisherCatalog, delta: CatalogDelta) -> dict[RelationId, Table]:
    found: dict[RelationId, Table] = {}
    for relation, table in catalog.tables.items():
        if relation in delta.touched_tables:
            continue
        if relation in delta.respelled_tables and relation in delta.tables:
            found[relation] = _respelled(table, delta.tables[relation])
        elif table.parent not in delta.touched_tables or relation in delta.partitions:
            found[relation] = table
        elif not _is_private(table):
            found[relation] = dataclasses.replace(table, parent=None)
    for relation, table in delta.tables.items():
        if relation in delta.touched_tables:
            found[relation] = _touched(catalog.tables.get(relation), table, delta)
    return found


def _touched(known: Table | None, told: Table, delta: CatalogDelta) -> Table:
    """The table as it is told, but for names of types that somebody else has changed since."""
    spelled = {} if known is None else {_structure(column): column for column in known.columns}

    def column(told_column: TableColumn) -> TableColumn:
        before = spelled.get(_structure(told_column))
        if before is None or (told.id, told_column.attnum) in delta.written_columns:
            return told_column
        return dataclasses.replace(told_column, type_sql=before.type_sql, collation_sql=before.collation_sql)

    return dataclasses.replace(told, columns=tuple(map(column, told.columns)))


def _respelled(table: Table, told: Table) -> Table:
    """The table with the names of what it is made of; what has become something else since stays as it is."""
    spelled = {_structure(column): column for column in told.columns}
    return dataclasses.replace(
        table,
        name=QualifiedName(told.name.schema, table.name.name),
        columns=tuple(spelled.get(_structure(column), column) for column in table.columns),
    )


def _structure(column: TableColumn) -> tuple[object, ...]:
    return (column.attnum, column.name, column.type_oid, column.typmod, column.generated)


def _is_private(table: Table) -> bool:
    """An unlogged table that is not partitioned is known only as a partition (R2.1)."""
    return not table.is_publishable and not table.is_partitioned


def _publications(
    catalog: PublisherCatalog, delta: CatalogDelta, tables: Mapping[RelationId, Table]
) -> Iterator[Publication]:
    members = memberships_of(delta.memberships, tables)
    known = {each.oid for each in catalog.publications.values()}
    for each in catalog.publications.values():
        told = delta.publications.get(each.oid)
        if each.oid in delta.touched_publications and told is None:
            continue
        renewed = each if told is None or each.oid not in delta.touched_publications else told
        yield dataclasses.replace(
            renewed,
            schemas=_listed_schemas(each, told, delta),
            memberships=_memberships(each, members.get(each.oid, {}), delta, tables),
        )
    for oid, told in delta.publications.items():
        if oid in delta.touched_publications and oid not in known:
            yield dataclasses.replace(told, memberships=members.get(oid, {}))


def _listed_schemas(known: Publication, told: Publication | None, delta: CatalogDelta) -> frozenset[str]:
    schemas = known.schemas if told is None or known.oid not in delta.schemas_of else told.schemas
    removed = {name for publication, name in delta.removed_schemas if publication == known.oid}
    return (schemas - removed) | {
        name for publication, name in delta.added_schemas if publication == known.oid
    }


def _memberships(
    known: Publication,
    told: Mapping[RelationId, Membership],
    delta: CatalogDelta,
    tables: Mapping[RelationId, Table],
) -> dict[RelationId, Membership]:
    kept = {
        relation: membership
        for relation, membership in known.memberships.items()
        if relation in tables
        and relation not in delta.touched_tables
        and (known.oid, relation) not in delta.removed_memberships
    }
    for relation, membership in told.items():
        if relation not in delta.respelled_tables:
            kept[relation] = membership
        elif relation in kept and _tree(kept[relation]) == _tree(membership):
            kept[relation] = dataclasses.replace(kept[relation], row_filter=membership.row_filter)
    return kept


def _tree(membership: Membership) -> str | None:
    return None if membership.row_filter is None else membership.row_filter.node_tree


def _relations(oids: Iterable[int]) -> frozenset[RelationId]:
    return frozenset(map(RelationId, oids))


def _read(kind: type[_Content], content: bytes | str) -> _Content:
    if len(content) > MOST_MESSAGE_BYTES:
        raise _invalid(f"it has more than {MOST_MESSAGE_BYTES} bytes")
    try:
        return kind.model_validate_json(without_code(content) if isinstance(content, bytes) else content)
    except ValidationError as error:
        # Without the value, which may be as long as the message.
        (first, *_) = error.errors(include_url=False, include_context=False, include_input=False)
        if first["loc"] == ("format",):
            raise InvalidMessage(
                f"a message of the publisher's event triggers is not of format {DELTA_FORMAT}",
                hint="Use the version of cdc-replay whose `setup` installed the triggers, or a later one.",
                rule="R9.11",
            ) from error
        raise _invalid(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ValueError as error:  # a text of Python can have what UTF-8 has not
        raise _invalid(str(error)) from error


def _invalid(why: str) -> InvalidMessage:
    return InvalidMessage(
        "a message of the publisher's event triggers cannot be read", detail=why, rule="R9.11"
    )
