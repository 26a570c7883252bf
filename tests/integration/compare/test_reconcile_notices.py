"""A changed filter may leave rows: status, explain and validate report that until they are reconciled."""

from __future__ import annotations

import pytest

from cdc_replay.commands.explain import explain
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.status import status
from cdc_replay.commands.validate import validate
from cdc_replay.model.relation import QualifiedName
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLES = "create table t (id int primary key, a int); create table u (id int primary key)"
REMEDY = "cdc-replay refresh s --reconcile"


@pytest.fixture
def filtered(twin: Twin) -> Twin:
    twin.publisher.run(f"{TABLES}; insert into t select i, i from generate_series(1, 20) i")
    twin.publisher.run("create publication p for table t where (id <= 10), u")
    twin.publisher.run("alter table t replica identity full")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    return twin


def in_status(twin: Twin) -> list[str]:
    """The tables that `status` has a notice of."""
    tables = [table for table in status(twin.config).tables if table.notice is not None]
    assert all(REMEDY in (table.notice or "") for table in tables)
    return [table.table for table in tables]


def in_explain(twin: Twin) -> list[str]:
    warnings = [warning for warning in explain(twin.config, "s").warnings if REMEDY in warning]
    return [warning.split(":")[0] for warning in warnings]


def test_changed_filter_is_reported_until_the_table_is_reconciled(filtered: Twin) -> None:
    """R9.12: the rows stay as natively; `validate` fails because of them and gives the remedy."""
    assert in_status(filtered) == in_explain(filtered) == []
    filtered.publish("alter publication p set table t where (id <= 5 or id > 18), u")
    assert in_explain(filtered) == ["public.t"]  # reads the publisher
    filtered.sync_ours()
    assert in_status(filtered) == ["public.t"]  # reads the log

    verdict = validate(filtered.config, "s")
    assert not verdict.success
    assert REMEDY in (verdict.error or "")
    notes = {str(table["table"]): str(table["notes"]) for table in verdict.tables}
    assert REMEDY in notes["public.t"]
    assert REMEDY not in notes["public.u"]
    assert REMEDY in verdict.report.read_text()

    plain = refresh(filtered.config, "s")
    assert [REMEDY in warning for warning in plain.warnings] == [True]
    assert in_status(filtered) == ["public.t"]  # it keeps the rows, as natively

    reconciled = refresh(filtered.config, "s", reconcile=True)
    assert (reconciled.inserted, reconciled.deleted, reconciled.warnings) == (2, 5, ())
    assert in_status(filtered) == in_explain(filtered) == []
    assert validate(filtered.config, "s").success


def test_filter_that_was_changed_back_is_reported_too(filtered: Twin) -> None:
    """Rows replicated meanwhile passed the other filter, and are outside this one."""
    filtered.publish("alter publication p set table t where (id <= 15), u")
    filtered.publish("update t set a = 0 where id = 12")
    filtered.publish("alter publication p set table t where (id <= 10), u")
    filtered.sync_ours()
    assert filtered.pairs["s"].ours.rows("select id from t where id > 10") == []  # did not exist: missed
    assert in_status(filtered) == in_explain(filtered) == ["public.t"]

    snapshot(filtered.config, "s", tables=[QualifiedName("public", "t")])
    assert in_status(filtered) == in_explain(filtered) == []


def test_changed_columns_and_publications_are_reported(filtered: Twin) -> None:
    filtered.publisher.run("create publication q for table t (id, a), u")
    filtered.change("s", "q")
    assert in_status(filtered) == []  # q is not in the log yet
    assert in_explain(filtered) == ["public.t"]
    refresh(filtered.config, "s", reconcile=True)
    assert in_explain(filtered) == []
    filtered.publish(
        "alter table t replica identity default;\n"
        "alter publication q set table t (id), u;\nupdate t set a = 5 where id = 5"
    )
    filtered.sync_ours()
    assert in_explain(filtered) == []  # rows lack nothing that is published
    filtered.publish("alter publication q set table t, u")
    assert in_explain(filtered) == ["public.t"]  # but the changes in between


def test_unrelated_changes_are_not_reported(filtered: Twin) -> None:
    """Other publications, actions, replica identities, added columns of other tables."""
    filtered.publish(
        "create publication other for table t where (id > 3);\n"
        "alter publication p set (publish = 'insert, delete');\n"
        "alter table t replica identity default;\nalter table u add b int;\n"
        "alter publication p set table u (id), t where (id <= 10)"
    )
    filtered.sync_ours()
    assert in_status(filtered) == in_explain(filtered) == []
