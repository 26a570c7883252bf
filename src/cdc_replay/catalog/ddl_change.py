"""What one DDL command changed, as the publisher's event triggers report it, and how it changes a catalog.

The triggers (`capture.ddl.event_triggers`) write transactional logical messages, so that a definition has a
position in the change stream (R9.10, R9.11). Their content is JSON in UTF-8.

`cdc_replay.catalog`: rows of the reader's queries, for the objects that the command touched.

    {"format": 1,
     "touched_tables": [oid…], "partitions": [oid…], "written_columns": [[table, attnum]…],
     "respelled_tables": [oid…], "rekeyed_tables": [oid…], "described_tables": [oid…],
     "touched_publications": [oid…], "removed_memberships": [[publication, table]…],
     "schemas_of": [oid…], "added_schemas": [[publication, name]…], "removed_schemas": [[publication, name]…],
     "tables": [row…], "columns": [row…], "publications": [row…], "memberships": [row…]}

| object of the previous catalog                               | effect                                     |
|--------------------------------------------------------------|--------------------------------------------|
| a touched table, with its memberships                        | replaced by its row; removed without a row |
| an unchanged column of it, not among `written_columns`       | keeps the text of its type                 |
| an untouched table whose parent is touched, and which is not | it was detached: its parent is removed     |
| among `partitions` (the children that stay as they are)      |                                            |
| a respelled table, with its memberships                      | texts of its unchanged parts are replaced  |
| a rekeyed table: an index of it has become valid             | its primary key is replaced, and its       |
|                                                              | identity unless that was set differently   |
| a described table: it was added to a publication             | the same, but not for its memberships      |
| a table without a row filter any more                        | loses texts of its generation expressions  |
| a touched publication                                        | replaced by its row, except for its lists; |
|                                                              | removed without a row                      |
| a publication of `schemas_of`                                | gets the row's list of schemas             |
| what is added to a publication or removed from it            | is added or removed                        |
| a text that is missing, of an equal tree                     | stays                                      |
| anything else                                                | stays                                      |

New touched objects are added, a new publication with its lists. A DDL change contains only what its own
transaction changed, under a lock: two transactions with open DDL do not undo each other.

    {"format": 1, "whole": true, "tables": …, "columns": …, "publications": …, "memberships": …}

is a full catalog: objects that are not in it do not exist.

`cdc_replay.rewrite`: `{"format": 1, "relations": [oid…]}`, tables that were rewritten, so that their values
may have changed without a change being sent (R11.9).

A line with the code of the message (`capture.ddl.message_code`) precedes the JSON.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import ValidationError

from cdc_replay.catalog.known_texts import with_known_texts
from cdc_replay.catalog.reader import (
    CatalogRow,
    parse_memberships,
    parse_publication,
    parse_tables,
    without_generation_texts,
)
from cdc_replay.catalog.schema import MAX_MESSAGE_BYTES, DdlChangeContent, RewriteContent
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.publication import Membership, Publication, PublisherCatalog, Table, TableColumn
from cdc_replay.model.relation import QualifiedName, RelationId

CATALOG_PREFIX: Final = "cdc_replay.catalog"
"""Prefix of the messages with what a command changed."""

REWRITE_PREFIX: Final = "cdc_replay.rewrite"
"""Prefix of the messages that name rewritten tables."""

MESSAGE_FORMAT: Final = 1

CODE_LINE: Final = re.compile(rb"([0-9]{1,18}) ([0-9a-f]{64})\n")
"""Ordinal and code, the first line of a message of the event triggers."""

_Content = TypeVar("_Content", DdlChangeContent, RewriteContent)


@dataclass(frozen=True, slots=True)
class DdlChange:
    """What one command changed; memberships are raw rows, as they may refer to other tables' columns."""

    whole: bool
    touched_tables: frozenset[RelationId]
    partitions: frozenset[RelationId]
    """Children of touched tables that the command left as they are."""
    written_columns: frozenset[tuple[RelationId, int]]
    respelled_tables: frozenset[RelationId]
    rekeyed_tables: frozenset[RelationId]
    described_tables: frozenset[RelationId]
    """Tables with generated columns whose memberships were added: a row filter may read the expressions."""
    touched_publications: frozenset[int]
    schemas_of: frozenset[int]
    removed_memberships: frozenset[tuple[int, RelationId]]
    added_schemas: frozenset[tuple[int, str]]
    removed_schemas: frozenset[tuple[int, str]]
    tables: Mapping[RelationId, Table]
    publications: Mapping[int, Publication]
    memberships: tuple[CatalogRow, ...]


def parse_ddl_change(content: bytes | str) -> DdlChange:
    """Parse a message with `CATALOG_PREFIX`.

    Raises:
        InvalidMessage: if it has another form.
    """
    parsed = _parse_content(DdlChangeContent, content)
    try:
        tables = parse_tables(parsed.tables, parsed.columns)
    except (ValueError, LookupError) as error:
        raise _invalid(f"{type(error).__name__}: {error}") from error
    if any(table.dropped_columns < 0 for table in tables.values()):
        raise _invalid("a table has more columns than its highest attnum")
    return DdlChange(
        whole=parsed.whole,
        touched_tables=_relation_ids(parsed.touched_tables),
        partitions=_relation_ids(parsed.partitions),
        written_columns=frozenset((RelationId(oid), attnum) for oid, attnum in parsed.written_columns),
        respelled_tables=_relation_ids(parsed.respelled_tables),
        rekeyed_tables=_relation_ids(parsed.rekeyed_tables),
        described_tables=_relation_ids(parsed.described_tables),
        touched_publications=frozenset(parsed.touched_publications),
        schemas_of=frozenset(parsed.schemas_of),
        removed_memberships=frozenset(
            (publication, RelationId(relation)) for publication, relation in parsed.removed_memberships
        ),
        added_schemas=frozenset(parsed.added_schemas),
        removed_schemas=frozenset(parsed.removed_schemas),
        tables=tables,
        publications={row[0]: parse_publication(row, {}) for row in parsed.publications},
        memberships=parsed.memberships,
    )


def strip_code(content: bytes) -> bytes:
    """The content without its code line, which messages of older logs do not have."""
    code_line = CODE_LINE.match(content)
    return content if code_line is None else content[code_line.end() :]


def parse_rewrite(content: bytes | str) -> tuple[RelationId, ...]:
    """The tables that a message with `REWRITE_PREFIX` names.

    Raises:
        InvalidMessage: if it has another form.
    """
    return tuple(map(RelationId, _parse_content(RewriteContent, content).relations))


def apply_ddl_change(catalog: PublisherCatalog, change: DdlChange) -> PublisherCatalog:
    """The catalog after the command, with the position of `catalog`."""
    if change.whole:
        tables = dict(change.tables)
        members = parse_memberships(change.memberships, tables)
        publications = [
            dataclasses.replace(publication, memberships=members.get(oid, {}))
            for oid, publication in change.publications.items()
        ]
    else:
        tables = _merge_tables(catalog, change)
        publications = list(_merge_publications(catalog, change, tables))
        for relation in _filtered(catalog.publications.values()) - _filtered(publications):
            if relation in tables:
                tables[relation] = without_generation_texts(tables[relation])
    changed = dataclasses.replace(
        catalog, tables=tables, publications={publication.name: publication for publication in publications}
    )
    has_texts = all(tree is None or text is not None for _, _, tree, text, *_ in change.memberships)
    return changed if has_texts else with_known_texts(changed, catalog)


def _filtered(publications: Iterable[Publication]) -> set[RelationId]:
    """The tables with a row filter."""
    return {
        relation
        for publication in publications
        for relation, membership in publication.memberships.items()
        if membership.row_filter is not None
    }


def _merge_tables(catalog: PublisherCatalog, change: DdlChange) -> dict[RelationId, Table]:
    # Copied as a whole: of thousands of tables, a command changes few.
    tables = dict(catalog.tables)
    for relation in change.touched_tables:
        tables.pop(relation, None)
    for table in _partitions_of(change.touched_tables, catalog):
        if table.id in tables and table.id not in change.tables and table.id not in change.partitions:
            if _is_unlogged_leaf(table):
                del tables[table.id]
            else:
                tables[table.id] = dataclasses.replace(table, parent=None)
    for relation, table in change.tables.items():
        if relation in change.touched_tables:
            tables[relation] = _merge_touched(catalog.tables.get(relation), table, change)
        elif relation in tables:
            tables[relation] = _merge_mentioned(tables[relation], table, change)
    return tables


def _partitions_of(relations: Set[RelationId], catalog: PublisherCatalog) -> tuple[Table, ...]:
    known = (catalog.tables[relation] for relation in relations if relation in catalog.tables)
    if not any(table.is_partitioned for table in known):
        return ()
    return tuple(table for table in catalog.tables.values() if table.parent in relations)


def _merge_touched(previous: Table | None, new: Table, change: DdlChange) -> Table:
    """The new table; unchanged columns keep type names, which another transaction may have changed since."""
    spellings = {} if previous is None else {_structure(column): column for column in previous.columns}

    def column(new_column: TableColumn) -> TableColumn:
        before = spellings.get(_structure(new_column))
        if before is None or (new.id, new_column.attnum) in change.written_columns:
            return new_column
        return dataclasses.replace(new_column, type_sql=before.type_sql, collation_sql=before.collation_sql)

    return dataclasses.replace(new, columns=tuple(map(column, new.columns)))


def _merge_mentioned(table: Table, new: Table, change: DdlChange) -> Table:
    """What the message says of a table that it does not replace."""
    return _rekey(table, new) if table.id in change.rekeyed_tables else _respell(table, new)


def _respell(table: Table, new: Table) -> Table:
    """The table with new schema and type names; parts that have changed otherwise stay as they are."""
    spellings = {_structure(column): column for column in new.columns}
    return dataclasses.replace(
        table,
        name=QualifiedName(new.name.schema, table.name.name),
        columns=tuple(spellings.get(_structure(column), column) for column in table.columns),
    )


def _rekey(table: Table, new: Table) -> Table:
    """The table with new keys, by the names that their columns have in it."""
    names = {column.attnum: column.name for column in table.columns}
    attnums = {column.name: column.attnum for column in new.columns}

    def key(columns: Iterable[str]) -> tuple[str, ...]:
        # A catalog that was read later may not have the column any more.
        return tuple(names[attnums[column]] for column in columns if attnums[column] in names)

    is_same_kind = table.replica_identity is new.replica_identity
    return dataclasses.replace(
        table,
        primary_key=key(new.primary_key),
        key_columns=key(new.key_columns) if is_same_kind else table.key_columns,
    )


def _structure(column: TableColumn) -> tuple[object, ...]:
    return (column.attnum, column.name, column.type_oid, column.typmod, column.generated)


def _is_unlogged_leaf(table: Table) -> bool:
    """An unlogged table that is not partitioned is known only as a partition (R2.1)."""
    return not table.is_publishable and not table.is_partitioned


def _merge_publications(
    catalog: PublisherCatalog, change: DdlChange, tables: Mapping[RelationId, Table]
) -> Iterator[Publication]:
    members = parse_memberships(change.memberships, tables)
    previous_oids = {publication.oid for publication in catalog.publications.values()}
    for publication in catalog.publications.values():
        new = change.publications.get(publication.oid)
        if publication.oid in change.touched_publications and new is None:
            continue
        base = publication if new is None or publication.oid not in change.touched_publications else new
        yield dataclasses.replace(
            base,
            schemas=_merge_schemas(publication, new, change),
            memberships=_merge_memberships(publication, members.get(publication.oid, {}), change, tables),
        )
    for oid, new in change.publications.items():
        if oid in change.touched_publications and oid not in previous_oids:
            yield dataclasses.replace(new, memberships=members.get(oid, {}))


def _merge_schemas(previous: Publication, new: Publication | None, change: DdlChange) -> frozenset[str]:
    schemas = previous.schemas if new is None or previous.oid not in change.schemas_of else new.schemas
    removed = {name for publication, name in change.removed_schemas if publication == previous.oid}
    return (schemas - removed) | {
        name for publication, name in change.added_schemas if publication == previous.oid
    }


def _merge_memberships(
    previous: Publication,
    new: Mapping[RelationId, Membership],
    change: DdlChange,
    tables: Mapping[RelationId, Table],
) -> dict[RelationId, Membership]:
    memberships = {
        relation: membership
        for relation, membership in previous.memberships.items()
        if relation in tables
        and relation not in change.touched_tables
        and (previous.oid, relation) not in change.removed_memberships
    }
    for relation, membership in new.items():
        if relation not in change.respelled_tables:
            memberships[relation] = membership
        elif relation in memberships and memberships[relation].filter_tree == membership.filter_tree:
            memberships[relation] = dataclasses.replace(
                memberships[relation], row_filter=membership.row_filter
            )
    return memberships


def _relation_ids(oids: Iterable[int]) -> frozenset[RelationId]:
    return frozenset(map(RelationId, oids))


def _parse_content(kind: type[_Content], content: bytes | str) -> _Content:
    if len(content) > MAX_MESSAGE_BYTES:
        raise _invalid(f"it has more than {MAX_MESSAGE_BYTES} bytes")
    try:
        return kind.model_validate_json(strip_code(content) if isinstance(content, bytes) else content)
    except ValidationError as error:
        # Without the value, which may be as long as the message.
        (first, *_) = error.errors(include_url=False, include_context=False, include_input=False)
        if first["loc"] == ("format",):
            raise InvalidMessage(
                f"a message of the publisher's event triggers is not of format {MESSAGE_FORMAT}",
                hint="Use the version of cdc-replay whose `setup` installed the triggers, or a later one.",
                rule="R9.11",
            ) from error
        raise _invalid(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ValueError as error:  # a str can have characters that UTF-8 cannot encode
        raise _invalid(str(error)) from error


def _invalid(why: str) -> InvalidMessage:
    return InvalidMessage(
        "a message of the publisher's event triggers cannot be read", detail=why, rule="R9.11"
    )
