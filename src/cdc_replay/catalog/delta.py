"""What one DDL command changed, as the publisher's event triggers say it: from a message to a new catalog.

The triggers (`capture.event_trigger`) write transactional logical messages, so that a definition has a
position in the change stream (R9.10, R9.11). Their content is JSON in UTF-8.

`cdc_replay.catalog`: rows of the reader's queries, of the objects that the command touched.

    {"format": 1, "whole": true | absent,
     "touched_tables": [oid…], "touched_publications": [oid…], "partitions": [oid…],
     "tables": [row…], "columns": [row…], "publications": [row…], "memberships": [row…]}

| the known catalog has                                       | then                                        |
|-------------------------------------------------------------|---------------------------------------------|
| a touched table or publication                              | its rows replace it; without one it is gone |
| a table, not touched, whose parent is touched, and which is | it was detached: it has no parent           |
| not among `partitions`, the children that stay as they are  |                                             |
| memberships of what is touched                              | the rows replace them                       |
| anything else                                               | stays; it is gone if the message is `whole` |

So deltas are applied object by object, and two transactions with open DDL do not undo each other.

`cdc_replay.rewrite`: `{"format": 1, "relations": [oid…]}`, tables whose rows were rewritten, so that their
values may have changed without a change being sent (R11.9).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cdc_replay.catalog.reader import CatalogRow, memberships_of, publication_of, tables_of
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.publication import Membership, Publication, PublisherCatalog, Table
from cdc_replay.model.relation import RelationId

CATALOG_PREFIX: Final = "cdc_replay.catalog"
"""Of the messages that say what a command changed."""

REWRITE_PREFIX: Final = "cdc_replay.rewrite"
"""Of the messages that say that tables were rewritten."""

DELTA_FORMAT: Final = 1

_MALFORMED: Final = (ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class CatalogDelta:
    """What one command changed; `publications` are without memberships, which may need other tables' columns.

    `partitions` are children of touched tables that the command left as they are.
    """

    whole: bool
    touched_tables: frozenset[RelationId]
    touched_publications: frozenset[int]
    partitions: frozenset[RelationId]
    tables: Mapping[RelationId, Table]
    publications: tuple[Publication, ...]
    memberships: tuple[CatalogRow, ...]


def parse_delta(content: bytes | str) -> CatalogDelta:
    """The delta of a message with `CATALOG_PREFIX`.

    Raises:
        InvalidMessage: if it is not such a text.
    """
    read = _object(content)
    try:
        tables = tables_of(read["tables"], read["columns"])
        return CatalogDelta(
            whole=bool(read.get("whole", False)),
            touched_tables=frozenset(map(RelationId, map(int, read["touched_tables"]))),
            touched_publications=frozenset(map(int, read["touched_publications"])),
            partitions=frozenset(map(RelationId, map(int, read.get("partitions", ())))),
            tables=tables,
            publications=tuple(publication_of(row, {}) for row in read["publications"]),
            memberships=tuple(_membership(row) for row in read["memberships"]),
        )
    except _MALFORMED as error:
        raise _invalid(error) from error


def parse_rewrite(content: bytes | str) -> tuple[RelationId, ...]:
    """The tables that a message with `REWRITE_PREFIX` names.

    Raises:
        InvalidMessage: if it is not such a text.
    """
    read = _object(content)
    try:
        return tuple(RelationId(int(relation)) for relation in read["relations"])
    except _MALFORMED as error:
        raise _invalid(error) from error


def apply_delta(catalog: PublisherCatalog, delta: CatalogDelta) -> PublisherCatalog:
    """The catalog after the command; its position is still that of `catalog`.

    A publication without an oid, of a catalog that was stored long ago, is known by its name.
    """
    tables = _tables(catalog, delta)
    members = memberships_of(delta.memberships, tables)
    kept = _kept_publications(catalog, delta)
    publications = [
        dataclasses.replace(each, memberships=_memberships(each, delta, tables) | members.get(each.oid, {}))
        for each in kept
    ]
    publications += [
        dataclasses.replace(each, memberships=members.get(each.oid, {})) for each in delta.publications
    ]
    return dataclasses.replace(
        catalog, tables=tables, publications={each.name: each for each in publications}
    )


def _tables(catalog: PublisherCatalog, delta: CatalogDelta) -> dict[RelationId, Table]:
    if delta.whole:
        return dict(delta.tables)
    found = {
        relation: dataclasses.replace(table, parent=None) if _is_detached(table, delta) else table
        for relation, table in catalog.tables.items()
        if relation not in delta.touched_tables and not (_is_detached(table, delta) and _is_private(table))
    }
    return found | dict(delta.tables)


def _is_detached(table: Table, delta: CatalogDelta) -> bool:
    return table.parent in delta.touched_tables and table.id not in delta.partitions


def _is_private(table: Table) -> bool:
    """An unlogged table that is not partitioned is known only as a partition (R2.1)."""
    return not table.is_publishable and not table.is_partitioned


def _kept_publications(catalog: PublisherCatalog, delta: CatalogDelta) -> list[Publication]:
    if delta.whole:
        return []
    told = {each.name for each in delta.publications}
    return [
        each
        for each in catalog.publications.values()
        if each.oid not in delta.touched_publications and (each.oid or each.name not in told)
    ]


def _memberships(
    publication: Publication, delta: CatalogDelta, tables: Mapping[RelationId, Table]
) -> dict[RelationId, Membership]:
    """Those of a publication that is not touched, as far as the delta does not tell of them."""
    return {
        relation: membership
        for relation, membership in publication.memberships.items()
        if relation in tables and relation not in delta.touched_tables
    }


def _membership(row: CatalogRow) -> CatalogRow:
    """The row, checked now: its values are made when the columns of its table are known."""
    publication, relation, node_tree, text, attnums = row
    columns = None if attnums is None else [int(attnum) for attnum in attnums]
    return (int(publication), int(relation), node_tree, text, columns)


def _object(content: bytes | str) -> dict[str, Any]:
    try:
        read = json.loads(content)
    except ValueError as error:
        raise _invalid(error) from error
    if not isinstance(read, dict) or read.get("format") != DELTA_FORMAT:
        raise InvalidMessage(
            f"a message of the publisher's event triggers is not of format {DELTA_FORMAT}",
            hint="Use the version of cdc-replay whose `setup` installed the triggers, or a later one.",
            rule="R9.11",
        )
    return read


def _invalid(error: Exception) -> InvalidMessage:
    return InvalidMessage(
        "a message of the publisher's event triggers cannot be read",
        detail=f"{type(error).__name__}: {error}",
        rule="R9.11",
    )
