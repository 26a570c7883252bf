"""Which relation versions the changes of a window have, under which catalogs (R9.10)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from cdc_replay.catalog.json_form import catalog_to_json
from cdc_replay.changelog.metadata_tables import CatalogRow
from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.model.publication import Table
from cdc_replay.replay.log_window import definitions
from fixtures.catalogs import catalog, table
from unit.changelog.small_log import TABLE, TRUNCATE, SmallLog, insert, message_rows

WINDOW = Window(Lsn(100), Lsn(200))


@pytest.fixture
def small(tmp_path: Path) -> SmallLog:
    return SmallLog.create(tmp_path)


def whole(from_lsn: int, *tables: Table, read_lsn: int = 100) -> CatalogRow:
    return CatalogRow(Lsn(from_lsn), Lsn(read_lsn), catalog_to_json(catalog(*tables)))


def command(at: int, commit: int, columns: str | None) -> CatalogRow:
    """The versions of a command that creates, alters or drops the table."""
    names = [
        [TABLE.id, version, name, 23, -1, "integer", None, "", None, None]
        for version, name in enumerate((columns or "").split(), start=1)
    ]
    rows = [[TABLE.id, "s", "t", False, True, None, "d", [1], [1], len(names)]]
    content = {"format": 1, "touched_tables": [TABLE.id], "publications": []}
    table_content = {"tables": rows if columns else [], "columns": names, "memberships": []}
    return CatalogRow(Lsn(at), Lsn(commit), json.dumps(content | table_content), Lsn(commit))


def used(small: SmallLog, window: Window = WINDOW) -> list[tuple[int, Sequence[str], Sequence[str]]]:
    """Number of the catalog version, columns of the relation version, columns of the catalog's table."""
    versions = definitions(small.reopened(), window)
    return [
        (
            versioned.catalog_version,
            versioned.relation.column_names,
            [column.name for column in versioned.catalog.tables[TABLE.id].columns]
            if TABLE.id in versioned.catalog.tables
            else [],
        )
        for versioned in versions
    ]


def test_only_catalogs_in_force_for_some_change_are_read(small: SmallLog) -> None:
    """Numbers are those of the whole history; a change is of the window by its commit."""
    small.log.add_catalogs([
        whole(0, table(TABLE.id, "s.t", "id a")),
        *(command(at, at + 2, f"id a c{at}") for at in (110, 120, 130, 140)),
    ])  # fmt: skip
    small.pull(119, message_rows(119, [(0, insert(1))], lsn=115))
    small.pull(160, message_rows(160, [(0, insert(1)), (1, insert(2))], lsn=135))

    # Each command gives a version for its own transaction, and one for all.
    assert used(small) == [(2, ("id", "a"), ["id", "a", "c110"]), (6, ("id", "a"), ["id", "a", "c130"])]
    assert used(small, Window(Lsn(119), Lsn(200))) == [(6, ("id", "a"), ["id", "a", "c130"])]
    assert used(small, Window(Lsn(160), Lsn(200))) == []


def test_transaction_has_its_own_catalog(small: SmallLog) -> None:
    small.log.add_catalogs([whole(0, table(TABLE.id, "s.t", "id a")), command(110, 150, "id a own")])
    small.pull(140, message_rows(140, [(0, insert(1))], lsn=115))
    small.pull(150, message_rows(150, [(0, insert(1))], lsn=115))

    assert used(small) == [(0, ("id", "a"), ["id", "a"]), (1, ("id", "a"), ["id", "a", "own"])]


def test_truncate_has_the_columns_of_its_catalog(small: SmallLog) -> None:
    """R1.1: T has no shape. If a row change is under the same catalog, its shape is used."""
    small.log.add_catalogs([whole(0, table(TABLE.id, "s.t", "id")), command(120, 130, "id a")])
    small.pull(110, message_rows(110, [(0, TRUNCATE)]))
    small.pull(140, message_rows(140, [(0, insert(1)), (1, TRUNCATE)]))

    assert used(small) == [(0, ("id",), ["id"]), (2, ("id", "a"), ["id", "a"])]


def test_rows_of_a_table_that_was_dropped_before_the_catalog_was_read(small: SmallLog) -> None:
    """R9.11: without event triggers the catalog that lacks the table is in force for them."""
    older = [whole(0, table(TABLE.id, "s.t", "id a")), whole(105, table(TABLE.id, "s.t", "id a b"))]
    small.log.add_catalogs([*older, whole(108, read_lsn=150)])
    small.pull(120, message_rows(120, [(0, insert(1)), (1, TRUNCATE)]))

    for after in (100, 119):
        assert used(small, Window(Lsn(after), Lsn(200))) == [(2, ("id", "a"), ["id", "a", "b"])]


def test_rows_of_create_table_as_come_before_its_message(small: SmallLog) -> None:
    """R9.10: they are in the transaction that creates the table, before anything can drop it."""
    small.log.add_catalogs([whole(0), command(112, 118, "id a"), command(130, 135, None)])
    small.pull(118, message_rows(118, [(0, insert(1))], lsn=111))

    assert used(small) == [(0, ("id", "a"), ["id", "a"])]


def test_table_without_a_catalog_stays_unknown(small: SmallLog) -> None:
    small.log.add_catalogs([whole(0)])
    small.pull(120, message_rows(120, [(0, insert(1)), (1, TRUNCATE)]))

    assert used(small) == [(0, ("id", "a"), [])]


def test_unchanged_definitions_are_one_version(small: SmallLog) -> None:
    small.log.add_catalogs([whole(0, table(TABLE.id, "s.t", "id a"))])
    relation = dataclasses.replace(TABLE, version=7, columns=TABLE.columns[:1])
    small.log.add_relations({relation.version: relation})
    small.pulls(5)

    assert used(small) == [(0, ("id", "a"), ["id", "a"])]
