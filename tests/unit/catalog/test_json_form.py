"""The JSON form of the publisher's catalog."""

from __future__ import annotations

import dataclasses

import pytest

from cdc_replay.catalog.json_form import (
    catalog_from_json,
    catalog_to_json,
    same_definitions,
)
from cdc_replay.errors import ChangeLogDamaged
from cdc_replay.model.publication import PublisherCatalog
from fixtures.catalogs import catalog, listed, publication, table


def full(lsn: int = 0x16_B374_D848) -> PublisherCatalog:
    return catalog(
        table(1, "s.root", "id a g*", is_partitioned=True, dropped_columns=2),
        table(2, "S.Leaf", "id a g* v~", parent=1),
        publications=[
            publication("q", listed(2), listed(1, "a > 'ü'", "id a"), schemas=["z", "a"], via_root=True),
            publication("p", all_tables=True, publish="delete", publish_generated=True),
        ],
        lsn=lsn,
    )


def test_json_form_round_trips() -> None:
    assert catalog_from_json(catalog_to_json(full())) == full()


def test_equal_catalogs_have_equal_json() -> None:
    first = full()
    second = PublisherCatalog(
        lsn=first.lsn,
        server_version=first.server_version,
        publications=dict(reversed(list(first.publications.items()))),
        tables=dict(reversed(list(first.tables.items()))),
    )

    assert catalog_to_json(first) == catalog_to_json(second)


def test_json_form_is_the_documented_one() -> None:
    """Logs of format 1 exist: this text must always be read as this catalog."""
    p = publication("p", listed(7, "id > 1", "id"), publish="insert")
    written = catalog(table(7, "s.t", "id"), publications=[dataclasses.replace(p, oid=9)])
    text = (
        '{"format":1,"lsn":"0/64","server_version":180006,"publications":[{"oid":9,"name":"p","all_tables":false,'
        '"via_root":false,"actions":["insert"],"schemas":[],"publish_generated":false,"memberships":['
        '{"relation":7,"row_filter":{"node_tree":"{id > 1}","sql":"id > 1"},"columns":["id"]}]}],"tables":['
        '{"id":7,"schema":"s","name":"t","is_partitioned":false,"parent":null,"replica_identity":"d",'
        '"key_columns":["id"],"primary_key":["id"],"dropped_columns":0,"is_publishable":true,"columns":['
        '{"attnum":1,"name":"id","type_oid":23,"typmod":-1,"type_sql":"integer","collation_sql":null,'
        '"generated":"","generation_sql":null}]}]}'
    )

    assert catalog_to_json(written) == text
    assert catalog_from_json(text) == written


@pytest.mark.parametrize(
    ("original", "replacement"),
    [
        ('"format":1', '"format":2'),
        ('"via_root"', '"via_rood"'),
        ('"lsn":"', '"lsn":"x'),
        ('"attnum"', '"number"'),
        ('"replica_identity":"d"', '"replica_identity":"x"'),
        ('"delete"', '"destroy"'),
        ('"server_version":', '"server_version":{'),
        ('"memberships":[]', '"memberships":3'),
        ('"typmod":-1', '"typmod":-1.0'),
        ('"attnum":1', '"attnum":true'),
        ('"is_partitioned":false', '"is_partitioned":0'),
        ('"type_oid":', '"type_oid":-'),
        ('"name":"', '"name":"\\u0000'),
        ('"name":"', '"name":"\\ud800'),
        ('"server_version":', '"more":1,"server_version":'),
        ('"server_version":', '"server_version":Infinity,"x":'),
        ('"server_version":', '"more":' + "[" * 100_000 + "]" * 100_000 + ',"server_version":'),
    ],
)
def test_damaged_json_is_rejected(original: str, replacement: str) -> None:
    text = catalog_to_json(full())
    assert original in text
    with pytest.raises(ChangeLogDamaged):
        catalog_from_json(text.replace(original, replacement))


@pytest.mark.parametrize("text", ["", "[]", "null", '{"format": 1}'])
def test_invalid_json_is_rejected(text: str) -> None:
    with pytest.raises(ChangeLogDamaged):
        catalog_from_json(text)


def test_same_definitions_ignores_positions() -> None:
    assert same_definitions(full(1), full(2))
    assert not same_definitions(full(1), catalog(lsn=1))
