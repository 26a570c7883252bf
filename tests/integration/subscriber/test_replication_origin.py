"""R8.18, R8.19: applied rows have an origin, so that other subscribers can skip them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc_replay.postgres.connection import connect
from cdc_replay.subscriber import replication_origin as origin
from cdc_replay.subscriber import subscription_records
from fixtures.native import NativeSubscription
from fixtures.postgres import Database, our_origins
from integration.replay.apply.one_window import EXPECTED, PUBLISHED, TABLES, run_once
from integration.replay.apply.windows import Target

if TYPE_CHECKING:
    import pytest

BEFORE = [(1, 1, "x"), (2, 2, "y"), (3, 3, "z")]
NOW = """
    select roname::text, pg_replication_origin_session_is_setup()
    from pg_replication_origin
    join pg_database on starts_with(roname::text, 'cdc_replay_' || pg_database.oid || '_')
    where datname = current_database()
"""


def test_a_subscription_with_origin_none_gets_only_local_changes(
    subscriber: Database, onward: tuple[Database, Database]
) -> None:
    subscriber.run(f"{TABLES}; create publication onward for table t, u")
    by_option = dict(zip(("any", "none"), onward, strict=True))
    natives = []
    for option, database in by_option.items():
        database.run(TABLES)
        natives.append(NativeSubscription(subscriber, database, f"{option}_{subscriber.name}"))
        natives[-1].create(["onward"], {"copy_data": False, "origin": option})

    assert run_once(Target(subscriber.dsn, PUBLISHED))
    subscriber.run("insert into t values (9, 9, 'here')")
    for native in natives:
        native.wait()

    here = (9, 9, "here")
    assert by_option["any"].rows("table t order by id") == [*EXPECTED, here]
    assert by_option["any"].rows("select count(*) from u") == [(100,)]
    assert by_option["none"].rows("table t order by id") == [*BEFORE, here]
    assert by_option["none"].rows("table u") == []


def test_an_origin_exists_only_during_a_window(subscriber: Database) -> None:
    """Native subscriptions need the few origins of a server."""
    subscriber.run(TABLES)
    target = Target(subscriber.dsn, PUBLISHED)
    during: list[tuple[str, bool]] = []
    target.apply(
        target.window(), before_commit=lambda connection, _: during.extend(connection.execute(NOW).fetchall())
    )
    [(name, is_mine)] = during
    assert (name.startswith("cdc_replay_"), name.endswith("_nsw"), is_mine) == (True, True, True)
    assert our_origins(subscriber) == []


def test_an_origin_of_a_killed_process_is_reused_and_dropped_with_the_subscription(
    subscriber: Database,
) -> None:
    subscriber.run(TABLES)
    target = Target(subscriber.dsn, PUBLISHED)
    with connect(subscriber.dsn, purpose="test") as connection:
        name = origin.origin_name(connection, "nsw")
        connection.execute("select pg_replication_origin_create(%s)", (name,))
        assert run_once(target)
        assert our_origins(subscriber) == []
        connection.execute("select pg_replication_origin_create(%s)", (name,))
        subscription_records.remove_subscription(connection, "nsw")
    assert our_origins(subscriber) == []


def test_a_role_without_origin_privileges_applies_with_a_warning_that_names_the_grants(
    subscriber: Database,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(origin, "_warned", set())
    role = f"plain_{subscriber.name}"
    subscriber.run(
        f"{TABLES}; create role {role} login; grant create on database {subscriber.name} to {role};"
        f"grant all on all tables in schema public to {role};"
        f"grant set on parameter session_replication_role to {role}"
    )
    try:
        dsn = subscriber.cluster.dsn(subscriber.name, role)
        target = Target(dsn, PUBLISHED, run_as_owner=True)
        assert run_once(target)
        assert subscriber.rows("table t order by id") == EXPECTED
        assert our_origins(subscriber) == []
        [warning] = [record.getMessage() for record in caplog.records if record.name == origin.__name__]
        granted = "grant execute on function " + ", ".join(origin.FUNCTIONS)
        assert all(function in warning for function in origin.FUNCTIONS)

        subscriber.run(f"{granted} to {role}")
        during: list[tuple[str, bool]] = []
        again = Target(target.dsn, PUBLISHED, run_as_owner=True)
        subscriber.run(f"grant execute on function pg_replication_origin_session_is_setup() to {role}")
        again.apply(
            again.window(),
            before_commit=lambda connection, _: during.extend(connection.execute(NOW).fetchall()),
        )
        assert [is_mine for _, is_mine in during] == [True]
        assert our_origins(subscriber) == []
    finally:
        subscriber.run(f"drop owned by {role} cascade; drop role {role}")
