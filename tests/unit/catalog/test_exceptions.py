"""Catalogs of 19, whose publications FOR ALL TABLES have exceptions: rows, messages, JSON form (R2.18)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cdc_replay.catalog.ddl_change import apply_ddl_change, parse_ddl_change
from cdc_replay.catalog.diff import differences
from cdc_replay.catalog.json_form import catalog_from_json, catalog_to_json
from cdc_replay.catalog.reader import parse_memberships, parse_publication, parse_tables
from cdc_replay.errors import InvalidMessage
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName, RelationId
from cdc_replay.publication.resolve import resolve, synced_tables
from fixtures.catalogs import catalog, excepted, publication, table

KEPT, SECRET = 1, 2

TABLES = [[oid, "s", f"t{oid}", False, True, None, "d", [1], [1], 1] for oid in (KEPT, SECRET)]
COLUMNS = [[oid, 1, "id", 23, -1, "integer", None, "", None, None] for oid in (KEPT, SECRET)]
EXCEPTION = [90, SECRET, None, None, None, True]
"""As the reader's query gives it: `prexcept` comes last."""
LISTED = [90, SECRET, None, None, None, False]


def publication_row(*, all_tables: bool) -> list[Any]:
    return [90, "p", all_tables, False, True, True, True, True, [], False]


def catalog_of(*memberships: list[Any], all_tables: bool = True) -> PublisherCatalog:
    tables = parse_tables(TABLES, COLUMNS)
    members = parse_memberships(memberships, tables)
    result = parse_publication(publication_row(all_tables=all_tables), members.get(90, {}))
    return catalog(*tables.values(), publications=[result], server_version=190000)


def published(catalog_read: PublisherCatalog) -> list[int]:
    copied = [int(synced.table.id) for synced in synced_tables(catalog_read, ["p"])]
    streamed = [
        int(oid) for oid in sorted(catalog_read.tables) if resolve(catalog_read, ["p"], oid) is not None
    ]
    assert sorted(copied) == streamed
    return streamed


def test_exception_row_is_no_member() -> None:
    assert published(catalog_of(EXCEPTION)) == [KEPT]
    assert published(catalog_of()) == [KEPT, SECRET]
    assert published(catalog_of(LISTED, all_tables=False)) == [SECRET]


def message(**content: Any) -> str:
    names = ("tables", "columns", "publications", "memberships", "touched_tables", "touched_publications")
    return json.dumps({"format": 1, **dict.fromkeys(names, ()), **content})


def after(known: PublisherCatalog, **content: Any) -> PublisherCatalog:
    return apply_ddl_change(known, parse_ddl_change(message(**content)))


def test_message_adds_and_removes_exception() -> None:
    before = catalog_of()
    narrowed = after(before, memberships=[EXCEPTION])
    assert published(narrowed) == [KEPT]
    assert differences(before, narrowed) == ('publication "p"',)
    assert published(after(narrowed, removed_memberships=[[90, SECRET]])) == [KEPT, SECRET]


def test_new_publication_and_full_catalog_have_exceptions() -> None:
    content = {"publications": [publication_row(all_tables=True)], "memberships": [EXCEPTION]}
    nothing = catalog(*parse_tables(TABLES, COLUMNS).values())
    assert published(after(nothing, touched_publications=[90], **content)) == [KEPT]
    assert published(after(nothing, whole=True, tables=TABLES, columns=COLUMNS, **content)) == [KEPT]


def test_exception_follows_renamed_table() -> None:
    """Renamed, moved to another schema, or altered it stays excepted; a new table of its name is not."""
    renamed = [SECRET, "other", "name", False, True, None, "d", [1], [1], 1]
    moved = after(
        catalog_of(EXCEPTION), touched_tables=[SECRET], tables=[renamed], columns=COLUMNS[1:],
        memberships=[EXCEPTION],
    )  # fmt: skip
    assert moved.tables[RelationId(SECRET)].name == QualifiedName("other", "name")
    assert published(moved) == [KEPT]
    anew = [7, "s", "t2", False, True, None, "d", [1], [1], 1]
    column = [[7, 1, "id", 23, -1, "integer", None, "", None, None]]
    dropped = after(catalog_of(EXCEPTION), touched_tables=[SECRET, 7], tables=[anew], columns=column)
    assert published(dropped) == [KEPT, 7]


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(InvalidMessage):
        after(catalog_of(), memberships=[[*EXCEPTION, True]])


def test_json_form_has_exceptions_only_if_there_are_any() -> None:
    known = catalog(table(1, "a.t"), publications=[publication("p", excepted(1), all_tables=True)])
    assert catalog_from_json(catalog_to_json(known)) == known
    assert '"is_exception":true' in catalog_to_json(known)
    assert "is_exception" not in catalog_to_json(catalog_of(LISTED, all_tables=False))
