"""Triggers FOR EACH STATEMENT, as far as the role that applies may disable them (R8.13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc_replay.subscriber import triggers
from fixtures.postgres import Database
from integration.replay.apply.one_window import EXPECTED, PUBLISHED, TABLES, run_once
from integration.replay.apply.windows import Target

if TYPE_CHECKING:
    import pytest

TRIGGERS = """
    create table fired (what text);
    create function note() returns trigger language plpgsql security definer as $$ begin
        insert into public.fired values (tg_op);
        return null;
    end $$;
    create trigger note after insert or update or delete on t execute function note();
    alter table t enable replica trigger note
"""
ENABLED = "select tgenabled::text from pg_trigger where tgname = 'note'"


def test_table_owner_fires_no_statement_trigger_and_leaves_them_enabled(subscriber: Database) -> None:
    subscriber.run(f"{TABLES}; {TRIGGERS}")

    assert run_once(Target(subscriber.dsn, PUBLISHED))

    assert subscriber.rows("select * from t order by id") == EXPECTED
    assert subscriber.rows("table fired") == []
    assert subscriber.rows(ENABLED) == [("R",)]


def test_role_without_ownership_is_warned_that_statement_triggers_fire(
    subscriber: Database, caplog: pytest.LogCaptureFixture
) -> None:
    role = f"guest_{subscriber.name}"
    subscriber.run(
        f"{TABLES}; {TRIGGERS}; create role {role} login;"
        f"grant create on database {subscriber.name} to {role};"
        f"grant all on all tables in schema public to {role};"
        f"grant set on parameter session_replication_role to {role}"
    )
    try:
        dsn = subscriber.cluster.dsn(subscriber.name, role)
        assert run_once(Target(dsn, PUBLISHED, run_as_owner=True))
        assert subscriber.rows("select * from t order by id") == EXPECTED
        assert subscriber.rows("table fired") != []
        [warning] = [record.getMessage() for record in caplog.records if record.name == triggers.__name__]
        assert warning.startswith("table public.t: statement-level triggers fire, unlike in a native worker")
        assert "must be owner of table t" in warning
    finally:
        subscriber.run(f"drop owned by {role} cascade; drop role {role}")
