"""Tables whose definition has changed since they were copied."""

from __future__ import annotations

import dataclasses
from collections.abc import ValuesView
from typing import Any, cast

import pytest

from cdc_replay.catalog.history import CatalogHistory
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import Table
from cdc_replay.model.relation import RelationId
from cdc_replay.model.subscription import Subscription
from cdc_replay.model.table_state import Ready
from cdc_replay.replay import definition_drift
from cdc_replay.replay.definition_drift import definition_drifts
from cdc_replay.replay.log_view import LogView
from cdc_replay.subscriber import subscription_tables
from cdc_replay.subscriber.copy_definitions import CopyDefinition, Definition
from fixtures.catalogs import catalog, publication, table

COPIED = Lsn(100)
NO_CONNECTION = cast("Any", None)


class CountedTables(dict[RelationId, Table]):
    """Tables of a catalog that count how often all of them are read."""

    reads = 0

    def values(self) -> ValuesView[Table]:  # type: ignore[override]
        self.reads += 1
        return super().values()


@pytest.mark.parametrize("size", [2, 40])
def test_all_tables_are_not_read_for_each_of_them(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    tables = [table(oid, f"s.t{oid:02}", "id a b") for oid in range(size)]
    present = catalog(*tables, publications=[publication("p", all_tables=True)])
    counted = CountedTables(present.tables)
    withheld = {"id", "a"}
    copies = {
        entry.name: CopyDefinition(COPIED, Definition(None, frozenset(columns)))
        for entry, columns in zip(tables, [withheld, *[{"id", "a", "b"}] * (size - 1)], strict=True)
    }
    states = dict.fromkeys(copies, Ready(COPIED))
    monkeypatch.setattr(definition_drift, "read_copy_definitions", lambda *_: copies)
    monkeypatch.setattr(subscription_tables, "table_states", lambda *_: states)

    drifts = definition_drifts(
        NO_CONNECTION,
        Subscription("s", "pub", ("p",)),
        LogView("", _end_lsn=COPIED, _catalogs=CatalogHistory([])),
        dataclasses.replace(present, tables=counted),
    )

    assert [str(name) for name in drifts] == ["s.t00"]
    assert counted.reads == 3
