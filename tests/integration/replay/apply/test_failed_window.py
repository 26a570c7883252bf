"""A window that fails leaves nothing, one without changes needs no Spark. Killed ones: `tests/faults`."""

from __future__ import annotations

import pytest

from cdc_replay.errors import MissingPrivilege, TargetMismatch
from cdc_replay.failpoints import VARIABLE
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Ready
from cdc_replay.postgres.connection import connect
from cdc_replay.replay.apply.session import ApplyRequest, advance_only
from cdc_replay.subscriber import state_schema, subscription_records, subscription_tables
from fixtures.postgres import ANY_DATABASE, Database
from integration.replay.apply import windows
from integration.replay.apply.one_window import EXPECTED, PUBLISHED, TABLES, run_once
from integration.replay.apply.windows import Target, record_progress

STAGING = "select count(*) from pg_class where relname like 'stage%'"


def test_failed_window_leaves_no_staging_and_can_be_repeated(
    subscriber: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscriber.run(TABLES)
    target = Target(subscriber.dsn, PUBLISHED)
    monkeypatch.setenv(VARIABLE, "replay.mid_merge=error")
    with pytest.raises(RuntimeError, match=r"replay\.mid_merge"):
        run_once(target)
    assert subscriber.rows(STAGING) == [(0,)]
    monkeypatch.delenv(VARIABLE)
    assert run_once(target)
    assert subscriber.rows("select * from t order by id") == EXPECTED


def test_table_renamed_to_the_target_meanwhile_gets_nothing(
    subscriber: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7.12: it is not subscribed to, under any name."""
    subscriber.run(TABLES)
    before = subscriber.rows("select * from t order by id")
    target = Target(subscriber.dsn, PUBLISHED)

    def replace(name: str) -> None:
        if name == "replay.after_staging":
            subscriber.run("alter table t rename to was_t; create table t (like was_t including all)")

    monkeypatch.setattr(windows, "failpoint", replace)
    with pytest.raises(TargetMismatch, match=r'table "public"\."t" .* was renamed, dropped or recreated'):
        run_once(target)
    assert subscriber.rows("select * from t") == []
    assert subscriber.rows("select * from was_t order by id") == before


def test_rule_that_appears_meanwhile_rewrites_nothing(
    subscriber: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8.13: natively no rule fires. The changes would be lost: the next window begins after this one."""
    subscriber.run(TABLES)
    before = subscriber.rows("select * from t order by id")
    target = Target(subscriber.dsn, PUBLISHED)

    def add_rule(name: str) -> None:
        if name == "replay.after_staging":
            subscriber.run(
                "create rule nothing as on insert to t do instead nothing;"
                " alter table t enable always rule nothing"
            )

    monkeypatch.setattr(windows, "failpoint", add_rule)
    with pytest.raises(TargetMismatch, match=r'table "public"\."t" .* has rules .*"nothing"'):
        run_once(target)
    assert subscriber.rows("select * from t order by id") == before


def test_empty_window_advances_without_spark(subscriber: Database) -> None:
    subscriber.run(TABLES)
    target = Target(subscriber.dsn, PUBLISHED)
    tables = tuple(target.window().tables)
    request = ApplyRequest(target.subscription, subscriber.dsn, tables, Lsn(500))
    with connect(subscriber.dsn, purpose="test") as connection:
        state_schema.install(connection)
        subscription_records.bind_subscription(connection, "nsw", "1", ["p"], ANY_DATABASE)
        advance_only(request, lambda connection, _: record_progress(connection, request))
        ready = Ready(Lsn(500))
        assert subscription_tables.table_states(connection, "nsw") == {
            QualifiedName("public", "t"): ready,
            QualifiedName("public", "u"): ready,
        }


def test_role_that_cannot_act_as_apply_worker_is_named_its_privileges(subscriber: Database) -> None:
    """R8.13: session_replication_role needs a superuser, or the privilege on the parameter."""
    role = f"poor_{subscriber.name}"
    subscriber.run(
        f"{TABLES}; create role {role} login; grant create on database {subscriber.name} to {role};"
        f"grant all on all tables in schema public to {role}"
    )
    try:
        dsn = subscriber.cluster.dsn(subscriber.name, role)
        target = Target(dsn, PUBLISHED, run_as_owner=True)
        with pytest.raises(MissingPrivilege, match="grant set on parameter session_replication_role"):
            run_once(target)
        subscriber.run(f"grant set on parameter session_replication_role to {role}")
        assert run_once(target)
        assert subscriber.rows("select * from t order by id") == EXPECTED
    finally:
        subscriber.run(f"drop owned by {role} cascade; drop role {role}")
