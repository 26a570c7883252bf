"""`validate --repair` writes the rows that differ, and nothing else, then proves it again."""

from __future__ import annotations

import json

import pytest

from cdc_replay.commands.validate import validate
from cdc_replay.commands.validate_and_repair import validate_and_repair
from cdc_replay.errors import NotConfirmed
from cdc_replay.model.results import TableReconciled, ValidateResult
from cdc_replay.subscriber.history import last_validations
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLES = """
    create table t (id int primary key, a int);
    create table u (id int primary key, a int);
    create table counted (id int primary key, a int)
"""


@pytest.fixture
def damaged(twin: Twin) -> Twin:
    """`t` lacks row 1, has another row 2 and one of its own; `u` is equal.

    `counted` is published without DELETE: it need not mirror the publisher, and has a row too many.
    """
    twin.publisher.run(
        f"{TABLES}; insert into t select i, i from generate_series(1, 50) i; insert into u values (1, 1);"
        " insert into counted values (1, 1);"
        " create publication p for table t where (id < 40 or id > 90), u;"
        " create publication q for table counted with (publish = 'insert')"
    )
    twin.subscribe("s", "p", "q", tables=TABLES, native=False)
    twin.sync_ours()
    twin.publish("delete from counted")
    ours = twin.pairs["s"].ours
    ours.run("delete from t where id = 1; update t set a = 0 where id = 2; insert into t values (99, 9)")
    return twin


def written(result: ValidateResult) -> list[tuple[str, int, int, int]]:
    return [(table.table, table.inserted, table.updated, table.deleted) for table in result.repaired]


def test_a_repair_writes_what_differs_and_proves_it(damaged: Twin) -> None:
    ours = damaged.pairs["s"].ours
    untouched = ours.rows("select ctid::text, xmin::text from u")

    result = validate_and_repair(damaged.config, "s")

    assert (result.success, result.error, result.dry_run) == (True, None, False)
    assert written(result) == [("public.t", 1, 1, 1)]
    (repaired,) = result.repaired
    assert (repaired.inserted_keys, repaired.updated_keys, repaired.deleted_keys) == (
        ("(id)=(1)",),
        ("(id)=(2)",),
        ("(id)=(99)",),
    )
    assert ours.rows("select count(*), sum(a) from t") == [(39, sum(range(1, 40)))]
    assert ours.rows("select ctid::text, xmin::text from u") == untouched
    assert ours.rows("table counted") == [(1, 1)]
    (left,) = result.not_repaired
    assert left.startswith("public.counted: for information only")

    page = result.report.read_text()
    assert result.first_report is not None
    assert all(text in page for text in ("Repaired before", "deleted (id)=(99)", result.first_report.name))
    assert "NOT" not in page
    assert "did not hold exactly" in result.first_report.read_text()
    with ours.connect() as connection:
        kept = last_validations(connection, "s", 10)
    assert sorted(record.consistent for record in kept) == [False, True]
    # The table has changes up to the repair: nothing is applied twice.
    damaged.publish("update t set a = a + 1 where id = 1")
    damaged.sync_ours()
    assert ours.rows("select a from t where id = 1") == [(2,)]
    assert validate(damaged.config, "s").success


def test_a_dry_run_writes_nothing(damaged: Twin) -> None:
    ours = damaged.pairs["s"].ours
    before = ours.rows("select ctid::text, * from t order by id")

    result = validate_and_repair(damaged.config, "s", dry_run=True)

    assert (result.success, result.dry_run, result.first_report) == (False, True, None)
    assert written(result) == [("public.t", 1, 1, 1)]
    assert json.loads(json.dumps(result.to_dict()))["repaired"][0]["deleted_keys"] == ["(id)=(99)"]
    assert ours.rows("select ctid::text, * from t order by id") == before


def test_declined_deletions_change_nothing(damaged: Twin) -> None:
    ours = damaged.pairs["s"].ours
    before = ours.rows("select ctid::text, * from t order by id")
    asked = list[tuple[TableReconciled, ...]]()

    def decline(planned: tuple[TableReconciled, ...]) -> bool:
        asked.append(planned)
        return False

    with pytest.raises(NotConfirmed, match="nothing was changed"):
        validate_and_repair(damaged.config, "s", confirm=decline)
    assert [table.deleted for planned in asked for table in planned] == [1]
    assert ours.rows("select ctid::text, * from t order by id") == before


def test_a_consistent_subscriber_is_not_written_to(twin: Twin) -> None:
    twin.publisher.run(f"{TABLES}; create publication p for table t; insert into t values (1, 1)")
    twin.subscribe("s", "p", tables=TABLES, native=False)
    twin.sync_ours()
    result = validate_and_repair(twin.config, "s")
    assert (result.success, result.repaired, result.first_report) == (True, (), None)
