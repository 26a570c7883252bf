"""Which tables are merged together, and in which order."""

from __future__ import annotations

import pytest

from cdc_replay.subscriber.firing_foreign_keys import group_tables
from cdc_replay.subscriber.target_tables import TargetTable
from fixtures.target_tables import target_table


def table(name: str, references: str) -> TargetTable:
    """A table whose name is its oid; `references` are names of others."""
    return target_table(name, oid=ord(name), references=frozenset(map(ord, references)))


@pytest.mark.parametrize(
    ("tables", "groups"),
    [
        pytest.param({"a": "", "b": ""}, "a b", id="no foreign key"),
        pytest.param({"a": "x", "b": ""}, "a b", id="the referenced table is not in the window"),
        pytest.param({"a": "c", "b": "", "c": ""}, "b ca", id="the referenced one is first"),
        pytest.param({"a": "", "b": "a"}, "ab", id="it is so already"),
        pytest.param({"a": "b", "b": "c", "c": ""}, "cba", id="chain"),
        pytest.param({"a": "bc", "b": "d", "c": "d", "d": ""}, "dbca", id="two ways"),
        pytest.param({"a": "a", "b": ""}, "b a", id="itself"),
        pytest.param({"a": "b", "b": "a", "c": "a"}, "bac", id="circle"),
        pytest.param({"a": "b", "b": "", "c": "d", "d": ""}, "badc", id="two pairs"),
        pytest.param({}, "", id="nothing"),
    ],
)
def test_linked_tables_are_one_group_with_referenced_tables_first(
    tables: dict[str, str], groups: str
) -> None:
    grouped = group_tables(table(name, references) for name, references in tables.items())
    assert ["".join(target.name.name for target in group) for group in grouped] == groups.split()
